"""Tiny models of each block kind, compiled for TPUs and GPUs that are not here: what is in their programs."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import ROOT
from transformer_jax import configure
from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.mesh import on_mesh
from transformer_jax.distributed.program_report import reported, shard_bytes
from transformer_jax.distributed.targets import missing_compiler, target_mesh, topology_of
from transformer_jax.errors import UserError
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.visibility import causal, real, same_segment
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.chip_plan import compile_decoding, describe_report, meshes_for_decoding
from transformer_jax.training.plan import abstract_step, compile_step
from transformer_jax.training.task import entry_of
from transformer_jax.training.ways_to_fit import changes, described, ways_to_fit

# What the fusion barrier compares with, as programs print it; see `layers.fusion_barrier`.
BARRIER = str(0x7FABCDEF)
KERNEL = {"v5e:2x2": "splash", "h100:2": "cudnn"}


def for_chips(topology):
    reason = missing_compiler("tpu" if topology.startswith("v") else "gpu")
    return pytest.param(topology, marks=[pytest.mark.skipif(reason is not None, reason=reason or "")])


TOPOLOGIES = [for_chips("v5e:2x2"), for_chips("h100:2")]
TPU, GPU = TOPOLOGIES
BOTH = "fsdp=2,tensor=2"  # as four chips have them; two GPUs have one axis
# Each kind of block on each kind of chip. A stack of images' patches is one of encoder blocks on both.
TRAINED = [
    (name, chips, mesh)
    for chips, meshes in (
        (TPU, dict.fromkeys(("transformer", "gpt", "modern_gpt", "bahdanau", "electra", "vit"), BOTH)),
        (TPU, {"llama 256": "fsdp=2,sequence=2"}),
        (
            GPU,
            {
                "transformer": "fsdp=2",
                "gpt": "tensor=2",
                "llama": "tensor=2",
                "modern_gpt": "fsdp=2",
                "lstm": "fsdp=2",
                "bahdanau": "fsdp=2",
                "electra": "tensor=2",
                "masked_autoencoder": "fsdp=2",
            },
        ),
    )
    for name, mesh in meshes.items()
]


@pytest.fixture(autouse=True)
def stacks_are_as_on_the_target(monkeypatch):
    """The tests' own setting scans every stack; what an accelerator gets is to be seen here."""
    from tests.conftest import UNROLLED

    monkeypatch.setattr(ComputeOptions, "unroll_of", UNROLLED)


def config(name):
    """Of 128 tokens, two layers and heads of 32, in bfloat16 but for "dino"; "gpt 256" has 256 tokens.

    Networks of two sizes have three layers, so that no layer of one has the shape of a stack of the other.
    """
    if name.startswith("transformer"):
        length = int(name.partition(" ")[2] or 128)
        return configure(
            "translation", "phrases", model="transformer", preset="mini", vocab_size=300, max_length=length,
            batching="packed", batch_tokens=2_048, dtype="bfloat16", optimizer="adam",
        )  # fmt: skip
    if name in ("bahdanau", "luong"):
        return configure(
            "translation", "phrases", model=name, preset="mini", vocab_size=300, max_length=64,
            batch_tokens=2_048, dtype="bfloat16", optimizer="adam",
        )  # fmt: skip
    if name == "electra":
        return configure(
            "replaced_token_detection", "text", context=128, batch_size=16, vocab_size=300, width=128, heads=4,
            feed_forward=256, layers=3, embedding_width=128, generator_size=0.5, attention_dropout=0.0,
            dropout=0.0,
            dtype="bfloat16",
        )  # fmt: skip
    if name == "dino":
        return configure(
            "self_distillation", "images", image_size=32, patch_size=4, convolutions=0, width=128, heads=4,
            feed_forward=256, layers=1, batch_size=16, prototypes=64, part_size=16,
        )  # fmt: skip
    if name == "masked_autoencoder":
        return configure(
            "masked_autoencoding", "images", image_size=64, patch_size=4, width=128, heads=4, feed_forward=256,
            layers=2, decoder_width=128, decoder_layers=2, decoder_heads=4, batch_size=16, dtype="bfloat16",
        )  # fmt: skip
    if name == "vit":
        return configure(
            "image_classification", "images", preset="mini", image_size=64, patch_size=4, pooling="mean",
            width=128, heads=4, feed_forward=256, layers=2, stochastic_depth=0.1, classes=10, batch_size=16,
            dtype="bfloat16",
        )  # fmt: skip
    name, _, context = name.partition(" ")
    return configure(
        "language_modeling", "text", model=name, context=int(context or 128), batch_size=16, vocab_size=300,
        layers=2, dtype="bfloat16",
    )  # fmt: skip


@functools.cache
def step(name, topology, mesh):
    return compile_step(config(name), topology=topology, mesh=mesh)


def sizes(name, topology, mesh):
    """(bytes of the state on one device, bytes of all of it)."""
    own = config(name)
    mesh = target_mesh(topology_of(topology), mesh)
    _, (state, _) = abstract_step(entry_of(own), own, ComputeOptions(), mesh)
    leaves = jax.tree.leaves(state)
    with on_mesh(mesh):
        return sum(map(shard_bytes, leaves)), sum(
            shard_bytes(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in leaves
        )


def cast_stacks(name, topology, mesh, text):
    """Arrays of the compute dtype in the shape of all layers' weights."""
    own = config(name)
    mesh = target_mesh(topology_of(topology), mesh)
    _, (state, _) = abstract_step(entry_of(own), own, ComputeOptions(), mesh)
    with on_mesh(mesh):
        shapes = [
            x.sharding.shard_shape(x.shape) for x in state.trained.values() if x.ndim > 2 and x.shape[0] < 4
        ]
    sizes = [",".join(map(str, shape)) for shape in shapes]
    assert any(f"f32[{size}]" in text for size in sizes)
    return {f"bf16[{size}]" for size in sizes if f"bf16[{size}]" in text}


def whole_stacks(name, topology, mesh, text):
    """Arrays in the shape of all layers' weights as they are before sharding, of those that are sharded."""
    own = config(name)
    mesh = target_mesh(topology_of(topology), mesh)
    _, (state, _) = abstract_step(entry_of(own), own, ComputeOptions(), mesh)
    with on_mesh(mesh):
        stacks = [x for x in state.trained.values() if x.ndim > 2 and x.shape[0] < 4]
        parts = {x.sharding.shard_shape(x.shape) for x in stacks}
    # One stack in whole may have the shape of another's part: keys of two heads, queries of four.
    whole = {x.shape for x in stacks} - parts
    assert whole
    named = {f"{dtype}[{','.join(map(str, shape))}]" for shape in whole for dtype in ("f32", "bf16")}
    return {one for one in named if one in text}


def copies_of_state(text):
    """Copies of arrays that a program is to write into, but for those that a TPU moves to its cores, S(1)."""
    donated = set(re.findall(r"\{[\d, ]*\}: \((\d+), ", text[: text.index("\n")]))
    entry = text[text.index("\nENTRY") :]
    given = {
        name for name, number in re.findall(r"%([\w.]+) = \S+ parameter\((\d+)\)", entry) if number in donated
    }
    assert len(given) == len(donated) > 0
    copies = re.findall(r"= (\w+\[\d[\d,]*\]\S*) copy\(%([\w.]+)\)", entry)
    return [(shape, name) for shape, name in copies if name in given and "S(" not in shape]


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.skipif(not pathlib.Path(sys.prefix, "ready").exists(), reason="not the environment of make")
def test_the_compilers_that_make_installs_are_found(kind):
    """Else every other test here is skipped."""
    assert missing_compiler(kind) is None


@pytest.mark.parametrize("topology", [for_chips(text) for text in ("v5e:3x7", "h100:2x2x2", "2*h100:2")])
def test_what_the_compiler_does_not_know(topology):
    with pytest.raises(UserError, match=f"`topology` '{re.escape(topology)}'.*; write v4:2x2x1, v5e:1x1"):
        topology_of(topology)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology", "mesh"),
    [pytest.param(name, *chips.values, mesh, marks=chips.marks) for name, chips, mesh in TRAINED],
)
def test_a_training_step(name, topology, mesh):
    report = step(name, topology, mesh)
    assert report.fits
    assert 0 < report.utilisation_modelled <= 1
    text = report.program.as_text()
    assert BARRIER not in text
    recurrent = {"lstm": 128, "bahdanau": 64}  # steps in time
    if name not in recurrent:
        assert KERNEL[topology] in report.attention
        if "sequence" not in mesh:
            # Each attention is the kernel, forward once and backward: cuDNN in one call, splash in two.
            target, calls = {"h100:2": ("__cudnn$fmha", 2), "v5e:2x2": ("tpu_custom_call", 3)}[topology]
            attentions = {"transformer": 3, "electra": 2, "masked_autoencoder": 2}.get(name, 1)
            assert text.count(f'custom_call_target="{target}') == calls * attentions
        assert " while(" in text, "layers in a loop"
        assert cast_stacks(name, topology, mesh, text) == set(), "weights are cast layer by layer"
        assert whole_stacks(name, topology, mesh, text) == set(), "weights are gathered layer by layer"
    own, complete = sizes(name, topology, mesh)
    needs = report.program.memory_analysis()
    # Weights and moments stay sharded: all but vectors and what an axis does not divide.
    assert own < complete / 1.7
    # The state is donated and nothing of it is copied; the compiler counts in tiles, hence "at least".
    assert needs.alias_size_in_bytes >= own * 0.98
    # What the program is given is sharded as planned: a state that was whole would be twice as much and more.
    assert needs.argument_size_in_bytes < (own + complete) / 2
    assert copies_of_state(text) == []
    # No collective has a whole state: those of a stack have a layer or a table. Parameters are a third of a
    # state, and a recurrent layer needs all of its own before its loop over time; a GPU's compiler gathers
    # those of a translator's layers in one collective. Over `tensor` alone all rows' activations are added up.
    found = collectives(text)
    assert found
    if "sequence" in mesh:
        assert "collective-permute" in report.collective_bytes, "keys and values go round"
    of_state = [one.bytes for one in found if mesh != "tensor=2" or one.kind != "all-reduce"]
    assert max(of_state, default=0) < complete / {"lstm": 2.5, "bahdanau": 2}.get(name, 4)
    moved = [one.bytes * one.times for one in found if one.kind == "all-gather"]
    steps = recurrent.get(name)
    assert steps is None or all(one.times < steps for one in found if one.bytes > 4_096), "none in each step"
    assert sum(moved) < 4 * complete


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
@pytest.mark.filterwarnings("ignore:attention. cudnn does not take dtype float32")
def test_products_without_a_kernel(topology):
    """Of 65 tokens in float32: a GPU's compiler has no kernel for the shapes of some, but for one by Triton."""
    report = step("dino", topology, "data=2")
    assert report.fits
    assert report.attention == []
    assert BARRIER not in report.program.as_text()
    assert report.program.memory_analysis().alias_size_in_bytes >= report.argument_bytes * 0.9


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        pytest.param(*for_chips(text).values, n, marks=for_chips(text).marks)
        for text, n in (("v4:2x2x1", 4), ("v6e:2x2", 4), ("h200:2", 2))
    ],
)
def test_a_product_on_other_chips(topology, devices):
    """Those that no model here is compiled for: v4 has two cores a chip that are one device."""
    target = topology_of(topology)
    mesh = target_mesh(target, None)
    x = jax.ShapeDtypeStruct(
        (devices, 128, 128), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("data", None, None))
    )
    with on_mesh(mesh):
        report = reported(jax.jit(lambda x: (x @ x).sum(0)), (x,), target)
    assert (report.devices, report.fits) == (devices, True)
    assert report.flops == 2 * 128**3
    assert report.argument_bytes == 128 * 128 * 2
    assert "all-reduce" in report.collective_bytes


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
def test_meshes_on_which_decoding_fits(topology):
    """On two chips that have room for four fifths of what reading the prompt takes where all is whole."""
    own, target = config("llama").model, topology_of(topology)
    options = dict(rows=1, prompt=128, length=128)
    whole = compile_decoding(own, topology=target, mesh=None, **options)
    memory = int(0.8 * (whole["prefill"].argument_bytes + whole["prefill"].temporary_bytes))
    small = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory=memory))
    found = dict(meshes_for_decoding(own, small, None, **options))
    assert list(found) == ["tensor=2", "fsdp=2"]
    assert all(report.fits for reports in found.values() for report in reports.values())
    # One row cannot be shared: each device computes all of it.
    assert whole["decoding"].flops == pytest.approx(2 * found["tensor=2"]["decoding"].flops)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology", "mesh"),
    [
        pytest.param("transformer 256", *TPU.values, "data=2,sequence=2", marks=TPU.marks),
        pytest.param("transformer 256", *GPU.values, "sequence=2", marks=GPU.marks),
        pytest.param("llama 256", *GPU.values, "sequence=2", marks=GPU.marks),
    ],
)
def test_tokens_over_devices(name, topology, mesh):
    """A part of the ring has 128 tokens, the fewest that a TPU's kernel takes."""
    report = step(name, topology, mesh)
    assert KERNEL[topology] in report.attention
    assert "collective-permute" in report.collective_bytes, "keys and values go round"


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("2*v5e:2x2")])
def test_gradients_go_between_slices(topology):
    """Summed within a slice first: each device sends a quarter of them to the other slice."""
    report = step("gpt", topology, "data=8")
    assert "splash" in report.attention
    # A parameter and its two moments are float32, its gradient here is bfloat16; the compiler pads small ones.
    gradients = report.argument_bytes / 12 * 2
    assert 1 < report.link_bytes["between"] / (gradients / 4) < 2
    assert report.link_bytes["between"] < report.link_bytes["within"] / 2


@pytest.mark.long
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", ["transformer", "gpt", "llama", "lstm", "bahdanau"])
def test_decoding(name, topology):
    mesh = {"v5e:2x2": "data=2,tensor=2", "h100:2": "tensor=2"}[topology]
    reports = compile_decoding(config(name).model, topology=topology, rows=4, prompt=128, mesh=mesh)
    first = "encode" if name in ("transformer", "bahdanau") else "prefill"
    assert set(reports) == {first, "decoding"}
    for report in reports.values():
        assert report.fits
        assert BARRIER not in report.program.as_text()
    # A prompt's tokens, or a source's, attend to each other; a step of one token has no use for a kernel.
    assert reports["decoding"].attention == []
    assert reports[first].attention == ([] if name in ("lstm", "bahdanau") else [KERNEL[topology]])
    if topology == "h100:2" and first == "prefill" and name != "lstm":
        # Prompts of unequal length are turned, not masked by an array of all pairs.
        assert '"mask_type": "CAUSAL"' in reports[first].program.as_text()
    # All of the cache is written in place.
    own, placed = config(name).model, target_mesh(topology_of(topology), mesh)
    with on_mesh(placed):
        programs = abstract_programs(
            own, rows=4, prompt=min(128, own.max_length), length=own.max_length, mesh=placed,
            dtype="bfloat16", compute=ComputeOptions(),
        )  # fmt: skip
        cache = sum(map(shard_bytes, jax.tree.leaves(programs["decoding"][1][1])))
    needs = reports["decoding"].program.memory_analysis()
    assert needs.alias_size_in_bytes >= cache * 0.9


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
@pytest.mark.parametrize(("mask", "T"), [("lengths", 512), ("causal lengths", 511), ("documents", 512)])
def test_padding_reaches_a_gpus_kernel_as_lengths(topology, mask, T):
    """Documents, for which the kernel has no other form here, are an array of all pairs."""
    B = 4
    x = jax.ShapeDtypeStruct((B, T, 4, 64), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((B, T) if mask == "documents" else (B,), jnp.int32)

    def total(query, key, value, numbers):
        seen = same_segment(numbers, numbers) if mask == "documents" else real(numbers, T)
        seen = seen & causal(T, T) if mask == "causal lengths" else seen
        return dot_product_attention(query, key, value, mask=seen).astype(jnp.float32).sum()

    with on_mesh(target_mesh(topology_of(topology), "data=2")):
        program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x, numbers).compile()
    calls = [line for line in program.as_text().splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2, "one forward, one backward"
    kind = {"lengths": "PADDING", "causal lengths": "PADDING_CAUSAL", "documents": "NO_MASK"}[mask]
    assert all(f'"mask_type": "{kind}"' in line for line in calls)
    pairs = f"bf16[{B // 2},1,{T},{T}]"
    assert (pairs in program.as_text()) == (mask == "documents")
    assert not any(pairs in line.partition(" custom-call(")[0] for line in calls), "no gradient of the array"


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
def test_what_would_fit_where_a_step_does_not(topology):
    """On a chip with a byte less than the step needs."""
    own = config("gpt 256")
    own = dataclasses.replace(own, model=dataclasses.replace(own.model, layers=1))
    target = topology_of(topology)
    compute = ComputeOptions(remat="blocks")
    report = compile_step(own, topology=target, compute=compute)
    assert KERNEL[topology] in report.attention
    assert set(report.collective_bytes) == {"all-reduce"}, "rows over both, where no mesh is named"
    needed = report.argument_bytes + report.temporary_bytes
    small = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory=needed - 1))
    short = dataclasses.replace(report, fits=False, device_memory_bytes=small.chip.memory)
    assert "0.00 GiB too much" in next(describe_report(short))
    way = next(ways_to_fit(entry_of(own), own, small, None, compute))
    assert way.report.fits
    assert way.report.argument_bytes + way.report.temporary_bytes < needed
    assert way.flags in ("--shard-optimizer", "--mesh fsdp=2"), "accumulation costs more"

    def flags(config, target, mesh=None, remat=None):
        compute = ComputeOptions(remat=remat)
        found = changes(entry_of(config), config, target, mesh, compute)
        return [described(config, one, mesh, compute, target) for one in found]

    assert flags(own, target) == [
        "--shard-optimizer",
        "--mesh fsdp=2",
        "--remat attention",
        "--shard-optimizer --remat attention",
        "--mesh fsdp=2 --remat attention",
        "--mesh fsdp=2 --accumulation 2",
        "--mesh fsdp=2 --accumulation 4",
        "--remat blocks",
        "--shard-optimizer --remat blocks",
        "--mesh fsdp=2 --remat blocks",
        "--mesh fsdp=2 --remat blocks --accumulation 2",
        "--mesh fsdp=2 --remat blocks --accumulation 4",
        "--mesh tensor=2 --remat blocks",
        "--mesh fsdp=2 --remat offload",
        "--mesh fsdp=2 --remat blocks --accumulation 8",
    ]
    assert flags(own, target, remat="blocks")[:3] == [
        "--shard-optimizer",
        "--mesh fsdp=2",
        "--mesh fsdp=2 --accumulation 2",
    ]
    assert not any("--remat" in one for one in flags(own, target, remat="offload"))
    # Room for half of the state alone: nothing is compiled that could not fit whatever is recomputed.
    tight = dataclasses.replace(
        target, chip=dataclasses.replace(target.chip, memory=int(report.argument_bytes * 0.6))
    )
    assert all(one.startswith(("--mesh fsdp=2", "--mesh tensor=2")) for one in flags(own, tight))
    # A row that two devices cannot share.
    single = dataclasses.replace(own, task=dataclasses.replace(own.task, batch_size=1))
    assert all("--mesh" not in one for one in flags(single, target, mesh="tensor=2"))


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
def test_a_plain_interpreter_knows_the_devices(topology):
    """Without the settings that commands and tests make first, which a GPU's plugin needs; and a mesh that
    does not divide the heads."""
    program = f"""
from transformer_jax import configure
from transformer_jax.distributed.targets import topology_of
from transformer_jax.errors import UserError
from transformer_jax.training.chip_plan import compile_decoding
devices = len(topology_of({topology!r}).devices)
config = configure("language_modeling", "text", model="gpt", vocab_size=300, heads=3, kv_heads=3, width=96)
try:
    compile_decoding(config.model, topology={topology!r}, mesh=f"tensor={{devices}}")
except UserError as error:
    print(devices, error)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    ended = subprocess.run([sys.executable, "-c", program], env=kept, cwd=ROOT, capture_output=True, text=True)
    assert "2 tensor=2 of `mesh` does not divide the model's 3 heads" in ended.stdout, ended.stderr
