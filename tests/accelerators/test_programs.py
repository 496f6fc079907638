"""Programs of tiny models, one per type of block, compiled for absent TPUs and GPUs."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.cases import others_soak
from tests.conftest import ROOT
from transformer_jax import configure
from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.mesh import on_mesh
from transformer_jax.distributed.program_report import reported, shard_bytes
from transformer_jax.distributed.targets import CHIPS, chip_of_kind, missing_compiler, target_mesh, topology_of
from transformer_jax.errors import UserError
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.visibility import causal, real, same_segment, window
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.chip_plan import compile_decoding, describe_report, meshes_for_decoding
from transformer_jax.training.plan import abstract_step, compile_step
from transformer_jax.training.task import entry_of
from transformer_jax.training.ways_to_fit import changes, flags_of, ways_to_fit

# The constant of the fusion barrier as printed in programs; see `layers.fusion_barrier`.
BARRIER = str(0x7FABCDEF)
KERNEL = {"v5e:2x2": "splash", "h100:2": "cudnn"}


def for_chips(topology):
    reason = missing_compiler("tpu" if topology.startswith("v") else "gpu")
    return pytest.param(topology, marks=[pytest.mark.skipif(reason is not None, reason=reason or "")])


TOPOLOGIES = [for_chips("v5e:2x2"), for_chips("h100:2")]
TPU, GPU = TOPOLOGIES


def soak_unless(is_kept):
    """Return the marks of a case of the ordinary suite, or of `make soak`."""
    return [] if is_kept else [pytest.mark.soak]


def corners(names, *kept):
    """Return the pairs of a name and a topology, marking all except `kept` as soak."""
    return [
        pytest.param(name, *chips.values, marks=[*chips.marks, *soak_unless((name, chips) in kept)])
        for name in names
        for chips in TOPOLOGIES
    ]


# Images in a batch of the contrastive models, which no other size of theirs divides.
ROWS = 640
BOTH = "fsdp=2,tensor=2"  # for four chips; two GPUs have one axis
# The models whose training steps are compiled in the ordinary suite; `make soak` compiles the others.
CORNERS = ("transformer", "gpt", "llama 256", "bahdanau", "vit")
# Every type of block on a TPU and a GPU; image encoders are stacks of encoder blocks on both.
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


@pytest.mark.parametrize(
    "topology",
    [for_chips(f"{chip}:2x2") for chip in ("v5e", "v6e")]
    + [for_chips(f"{chip}:2x2x1") for chip in ("v4", "v5p", "tpu7x")]
    + [for_chips(f"{chip}:1") for chip in CHIPS if CHIPS[chip].kind == "gpu"],
)
def test_chips_are_known_by_the_name_of_their_devices(topology):
    devices = topology_of(topology)
    assert chip_of_kind(devices.devices[0].device_kind) is devices.chip


@pytest.fixture(autouse=True)
def unrolling_as_on_the_target(monkeypatch):
    """Undo the setting of the tests that scans every stack."""
    from tests.conftest import UNROLLED

    monkeypatch.setattr(ComputeOptions, "unroll_of", UNROLLED)


def config(name):
    """Build a config of 128 tokens ("gpt 256": 256), two layers, heads of 32, and bfloat16 except for "dino".

    Models of two networks have three layers, so that no layer of one has the shape of a stack of the other.
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
            feed_forward=256, layers=3, embedding_width=128, generator_size=0.5, dtype="bfloat16",
        )  # fmt: skip
    if name == "dino":
        return configure(
            "self_distillation", "images", image_size=32, patch_size=4, convolutions=0, width=128, heads=4,
            feed_forward=256, layers=1, batch_size=16, prototypes=64, local_crop_size=16,
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
    if name == "longformer":
        return configure(
            "sequence_classification", "fine_tune", model="longformer", preset="mini", max_length=1_024,
            width=128, heads=2, feed_forward=256, layers=2, window=256, classes=3, batch_size=4,
            dtype="bfloat16", vocab_size=300,
        )  # fmt: skip
    image_text: dict[str, Any] = dict(
        preset="mini", image_size=64, patch_size=4, pooling="mean", width=128, heads=4, feed_forward=256,
        layers=2, dtype="bfloat16",
    )  # fmt: skip
    if name in ("clip", "siglip"):
        return configure("contrastive", "drawn", model=name, batch_size=ROWS, **image_text)
    if name == "captioner":
        return configure("captioning", "drawn", batch_size=16, decoder_width=128, **image_text)
    if name == "graphormer":
        return configure(
            "graph_prediction", "graphs", batch_size=64, width=128, heads=4, feed_forward=256, layers=2,
            max_nodes=64, dtype="bfloat16",
        )  # fmt: skip
    if name == "decision_transformer":
        # The three tokens of 128 steps, enough for a kernel.
        sizes = dict(width=128, heads=2, dtype="bfloat16", context=128)
        return configure("offline_decisions", "cart_pole", batch_size=64, **sizes)
    if name == "whisper":
        return configure(
            "speech_recognition", "digits", batch_size=16, width=128, encoder_layers=2, decoder_layers=2,
            feed_forward=256, max_frames=1_024, kernel=3, max_length=128, dtype="bfloat16",
        )  # fmt: skip
    name, _, context = name.partition(" ")
    return configure(
        "language_modeling", "text", model=name, context=int(context or 128), batch_size=16, vocab_size=300,
        layers=2, dtype="bfloat16",
    )  # fmt: skip


@functools.cache
def step(name, topology, mesh):
    return compile_step(config(name), topology=topology, mesh=mesh)


def state_of(name, topology, mesh):
    """Return the abstract state of a training step, and its mesh."""
    run, mesh = config(name), target_mesh(topology_of(topology), mesh)
    _, (state, _) = abstract_step(entry_of(run), run, ComputeOptions(), mesh)
    return state, mesh


def sizes(name, topology, mesh):
    """Return the bytes of the state on one device, and in total."""
    state, mesh = state_of(name, topology, mesh)
    leaves = jax.tree.leaves(state)
    with on_mesh(mesh):
        return sum(map(shard_bytes, leaves)), sum(
            shard_bytes(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in leaves
        )


def cast_stacks(name, topology, mesh, text):
    """Return the arrays of the compute dtype with the shape of all layers' weights."""
    state, mesh = state_of(name, topology, mesh)
    with on_mesh(mesh):
        shapes = [
            x.sharding.shard_shape(x.shape) for x in state.trained.values() if x.ndim > 2 and x.shape[0] < 4
        ]
    sizes = [",".join(map(str, shape)) for shape in shapes]
    assert any(f"f32[{size}]" in text for size in sizes)
    return {f"bf16[{size}]" for size in sizes if f"bf16[{size}]" in text}


def unsharded_stacks(name, topology, mesh, text):
    """Return the arrays with the unsharded shape of all layers' weights, for weights that are sharded."""
    state, mesh = state_of(name, topology, mesh)
    with on_mesh(mesh):
        stacks = [x for x in state.trained.values() if x.ndim > 2 and x.shape[0] < 4]
        shards = {x.sharding.shard_shape(x.shape) for x in stacks}
    # An unsharded stack can have the shape of another's shard: keys of two heads, queries of four.
    shapes = {x.shape for x in stacks} - shards
    assert shapes
    arrays = {f"{dtype}[{','.join(map(str, shape))}]" for shape in shapes for dtype in ("f32", "bf16")}
    return {array for array in arrays if array in text}


def copies_of_state(text):
    """Return the copies of donated arrays, except those that a TPU moves to its cores, S(1)."""
    donated = set(re.findall(r"\{[\d, ]*\}: \((\d+), ", text[: text.index("\n")]))
    entry = text[text.index("\nENTRY") :]
    parameters = {
        name for name, number in re.findall(r"%([\w.]+) = \S+ parameter\((\d+)\)", entry) if number in donated
    }
    assert len(parameters) == len(donated) > 0
    copies = re.findall(r"= (\w+\[\d[\d,]*\]\S*) copy\(%([\w.]+)\)", entry)
    return [(shape, name) for shape, name in copies if name in parameters and "S(" not in shape]


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
@pytest.mark.skipif(not pathlib.Path(sys.prefix, "ready").exists(), reason="not the environment of make")
def test_the_compilers_that_make_installs_are_found(kind):
    """Without a compiler the other tests of this file are skipped."""
    assert missing_compiler(kind) is None


@pytest.mark.parametrize("topology", [for_chips(text) for text in ("v5e:3x7", "h100:2x2x2", "2*h100:2")])
def test_topologies_that_the_compiler_refuses(topology):
    with pytest.raises(UserError, match=f"`topology` '{re.escape(topology)}'.*; write v4:2x2x1, v5e:1x1"):
        topology_of(topology)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology", "mesh"),
    [
        pytest.param(
            name, *chips.values, mesh, marks=[*chips.marks, *([] if name in CORNERS else [pytest.mark.soak])]
        )
        for name, chips, mesh in TRAINED
    ],
)
def test_a_training_step(name, topology, mesh):
    report = step(name, topology, mesh)
    assert report.fits
    assert 0 < report.utilisation_modelled <= 1
    text = report.program.as_text()
    assert BARRIER not in text
    recurrent = {"lstm": 128, "bahdanau": 64}  # steps in time
    if name not in recurrent:
        # Encoders drop attention weights.
        assert report.attention == ["dropout" if name == "electra" else KERNEL[topology]]
        if "sequence" not in mesh:
            # Each attention calls the kernel once forward, and backward once (cuDNN) or twice (Pallas).
            target, calls = {"h100:2": ("__cudnn$fmha", 2), "v5e:2x2": ("tpu_custom_call", 3)}[topology]
            if name == "electra" and topology == "h100:2":
                target, calls = "__gpu$xla.gpu.triton", 3
            attentions = {"transformer": 3, "electra": 2, "masked_autoencoder": 2}.get(name, 1)
            assert text.count(f'custom_call_target="{target}') == calls * attentions
        assert " while(" in text, "layers in a loop"
        assert cast_stacks(name, topology, mesh, text) == set(), "weights are cast layer by layer"
        assert unsharded_stacks(name, topology, mesh, text) == set(), "weights are gathered layer by layer"
    share, total = sizes(name, topology, mesh)
    memory = report.program.memory_analysis()
    # Weights and moments stay sharded, except vectors and arrays that no axis divides.
    assert share < total / 1.7
    # The state is donated and not copied; the compiler counts full tiles, hence the inequality.
    assert memory.alias_size_in_bytes >= share * 0.98
    # The arguments are sharded as planned; an unsharded state would be at least twice as large.
    assert memory.argument_size_in_bytes < (share + total) / 2
    assert copies_of_state(text) == []
    # No collective moves the entire state, but at most a layer or a table. Parameters are a third of a state. A
    # recurrent layer gathers its parameters before the loop over time, and a GPU's compiler gathers those of a
    # translator's layers in one collective. With `tensor` only, the activations of all rows are summed.
    operations = collectives(text)
    assert operations
    if "sequence" in mesh:
        assert "collective-permute" in report.collective_bytes, "keys and values pass around the ring"
    state_bytes = [op.bytes for op in operations if mesh != "tensor=2" or op.kind != "all-reduce"]
    assert max(state_bytes, default=0) < total / {"lstm": 2.5, "bahdanau": 2}.get(name, 4)
    gathered = [op.bytes * op.times for op in operations if op.kind == "all-gather"]
    steps = recurrent.get(name)
    assert steps is None or all(op.times < steps for op in operations if op.bytes > 4_096), "none per step"
    assert sum(gathered) < 4 * total


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology"),
    corners(
        ["clip", "siglip", "captioner", "whisper", "decision_transformer"],
        ("clip", GPU), ("captioner", TPU), ("whisper", GPU), ("decision_transformer", TPU),
    ),
)  # fmt: skip
def test_models_of_images_sounds_and_texts(name, topology):
    """Patches and frames use a kernel, and the chunked loss holds no array of the batch squared."""
    devices = 2 if topology == "h100:2" else 4

    def compiled(parts):
        compute = ComputeOptions(loss_parts=parts)
        return compile_step(config(name), topology=topology, mesh=f"data={devices}", compute=compute)

    report = compiled(16)
    assert report.fits
    assert KERNEL[topology] in report.attention
    text = report.program.as_text()
    assert BARRIER not in text
    # Scalars such as the temperature may be copied.
    assert [copy for copy in copies_of_state(text) if not copy[0].startswith("f32[1]")] == []
    if name not in ("clip", "siglip"):
        return

    def largest_similarities(text):
        sizes = {ROWS, ROWS // devices, ROWS // 16}
        shapes = [tuple(map(int, shape)) for shape in re.findall(r"f32\[(\d+),(\d+)\]", text)]
        return max(first * second for first, second in shapes if {first, second} <= sizes)

    assert largest_similarities(compiled(1).program.as_text()) >= ROWS * ROWS // devices
    assert largest_similarities(text) <= ROWS * ROWS // 16 // devices


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
@pytest.mark.filterwarnings("ignore:attention. cudnn does not support dtype float32")
def test_products_without_a_kernel(topology):
    """For some products of 65 tokens in float32 a GPU's compiler has no kernel except Triton's."""
    report = step("dino", topology, "data=2")
    assert report.fits
    assert report.attention == []
    assert BARRIER not in report.program.as_text()
    assert report.program.memory_analysis().alias_size_in_bytes >= report.argument_bytes * 0.9


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        pytest.param(
            *for_chips(text).values, n,
            marks=[*for_chips(text).marks, *soak_unless(text.split(":")[0] in ("v4", "tpu7x", "b200", "t4"))],
        )
        for text, n in (
            ("v4:2x2x1", 4),
            ("v6e:2x2", 4),
            ("tpu7x:2x2x1", 8),
            ("h200:2", 2),
            ("b200:2", 2),
            ("gb200:4", 4),
            ("rtx4090:2", 2),
            ("l4:2", 2),
            ("t4:2", 2),
        )
    ],
)  # fmt: skip
def test_a_product_on_other_chips(topology, devices):
    """These chips have no other test; the two cores of a v4 chip are one device."""
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
    """Two chips have memory for four fifths of an unsharded prefill."""
    model_config, target = config("llama").model, topology_of(topology)
    options = dict(rows=1, prompt=128, length=128)
    unsharded = compile_decoding(model_config, topology=target, mesh=None, **options)
    memory = int(0.8 * (unsharded["prefill"].argument_bytes + unsharded["prefill"].temporary_bytes))
    small = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory=memory))
    reports_by_mesh = dict(meshes_for_decoding(model_config, small, None, **options))
    assert list(reports_by_mesh) == ["tensor=2", "fsdp=2"]
    assert all(report.fits for reports in reports_by_mesh.values() for report in reports.values())
    # One row cannot be sharded, so each device computes all of it.
    assert unsharded["decoding"].flops == pytest.approx(2 * reports_by_mesh["tensor=2"]["decoding"].flops)


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
    """Each device of the ring has 128 tokens, the minimum of a TPU's kernel."""
    report = step(name, topology, mesh)
    assert KERNEL[topology] in report.attention
    assert "collective-permute" in report.collective_bytes, "keys and values pass around the ring"


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("2*v5e:2x2")])
def test_gradients_go_between_slices(topology):
    """Gradients are summed within a slice first, so each device sends a quarter to the other slice."""
    report = step("gpt", topology, "data=8")
    assert "splash" in report.attention
    # Parameters and both moments are float32, gradients are bfloat16; the compiler pads small arrays.
    gradients = report.argument_bytes / 12 * 2
    assert 1 < report.link_bytes["between"] / (gradients / 4) < 2
    assert report.link_bytes["between"] < report.link_bytes["within"] / 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology"),
    corners(
        ["transformer", "gpt", "llama", "lstm", "bahdanau"],
        ("transformer", GPU), ("gpt", TPU), ("llama", GPU), ("bahdanau", TPU),
    ),
)  # fmt: skip
def test_decoding(name, topology):
    mesh = {"v5e:2x2": "data=2,tensor=2", "h100:2": "tensor=2"}[topology]
    reports = compile_decoding(config(name).model, topology=topology, rows=4, prompt=128, mesh=mesh)
    first = "encode" if name in ("transformer", "bahdanau") else "prefill"
    assert set(reports) == {first, "decoding"}
    for report in reports.values():
        assert report.fits
        assert BARRIER not in report.program.as_text()
    # The tokens of a prompt or source attend to each other; a step of one token needs no kernel.
    assert reports["decoding"].attention == []
    assert reports[first].attention == ([] if name in ("lstm", "bahdanau") else [KERNEL[topology]])
    if topology == "h100:2" and first == "prefill" and name != "lstm":
        # Prompts of unequal length are rotated instead of masked by an array of all pairs.
        assert '"mask_type": "CAUSAL"' in reports[first].program.as_text()
    # The cache is updated in place.
    model_config, placed = config(name).model, target_mesh(topology_of(topology), mesh)
    with on_mesh(placed):
        programs = abstract_programs(
            model_config, rows=4, prompt=min(128, model_config.max_length), length=model_config.max_length,
            mesh=placed, dtype="bfloat16", compute=ComputeOptions(),
        )  # fmt: skip
        cache = sum(map(shard_bytes, jax.tree.leaves(programs["decoding"][1][1])))
    memory = reports["decoding"].program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache * 0.9


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
@pytest.mark.parametrize(
    ("mask", "T"),
    others_soak(
        [("lengths", 512), ("causal lengths", 511), ("documents", 512)],
        ("causal lengths", 511),
        ("documents", 512),
    ),
)
def test_padding_reaches_a_gpus_kernel_as_lengths(topology, mask, T):
    """Documents need an array of all pairs, because the kernel has no other mask for them."""
    B = 4
    x = jax.ShapeDtypeStruct((B, T, 4, 64), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((B, T) if mask == "documents" else (B,), jnp.int32)

    def total(query, key, value, numbers):
        visible = same_segment(numbers, numbers) if mask == "documents" else real(numbers, T)
        visible = visible & causal(T, T) if mask == "causal lengths" else visible
        return dot_product_attention(query, key, value, mask=visible).astype(jnp.float32).sum()

    with on_mesh(target_mesh(topology_of(topology), "data=2")):
        program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x, numbers).compile()
    calls = [line for line in program.as_text().splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2, "one forward, one backward"
    kind = {"lengths": "PADDING", "causal lengths": "PADDING_CAUSAL", "documents": "NO_MASK"}[mask]
    assert all(f'"mask_type": "{kind}"' in line for line in calls)
    pairs = f"bf16[{B // 2},1,{T},{T}]"
    assert (pairs in program.as_text()) == (mask == "documents")
    assert not any(pairs in line.partition(" custom-call(")[0] for line in calls), "no gradient of the array"


WINDOWS = {
    "causal": dict(before=255),
    "symmetric": dict(before=128, after=128),
    "global": dict(before=128, after=128, global_keys=True),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topology"), corners(list(WINDOWS), ("causal", GPU), ("global", GPU), ("global", TPU))
)
@pytest.mark.parametrize("mesh", others_soak(["data=2", "sequence=2"], "sequence=2"))
def test_windows_use_a_kernel_in_memory_proportional_to_the_length(name, topology, mesh):
    """Forward and backward, with padding; over `sequence` devices exchange only borders."""
    B, axes = 4, mesh
    if topology != "h100:2":
        axes = {"data=2": "data=4", "sequence=2": "data=2,sequence=2"}[mesh]

    def compiled(T):
        x = jax.ShapeDtypeStruct((B, T, 4, 64), jnp.bfloat16)
        lengths = jax.ShapeDtypeStruct((B,), jnp.int32)

        def total(query, key, value, lengths):
            options = dict(WINDOWS[name])
            if options.pop("global_keys", False):
                options["global_keys"] = jnp.zeros((B, 1), jnp.int32)
            mask = window(T, T, **options) & real(lengths, T)
            return dot_product_attention(query, key, value, mask=mask).astype(jnp.float32).sum()

        with on_mesh(target_mesh(topology_of(topology), axes)):
            return jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x, lengths).compile()

    short, long = compiled(32_768), compiled(65_536)
    assert ("__cudnn$fmha" if topology == "h100:2" else "splash") in short.as_text()
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (short, long)]
    # Twice as much, besides what fits into a TPU's VMEM; all pairs would need four times as much.
    assert sizes[1] <= 3 * sizes[0]
    assert ("collective-permute" in short.as_text()) == ("sequence" in axes)


@pytest.mark.long
@pytest.mark.parametrize(("global_keys", "topology"), corners([False, True], (False, GPU), (True, GPU)))
def test_a_window_with_dropout_uses_a_kernel(global_keys, topology):
    """The kernel with dropout has no array of all pairs."""
    axes = "data=2" if topology == "h100:2" else "data=4"

    def compiled(T):
        x = jax.ShapeDtypeStruct((4, T, 4, 64), jnp.bfloat16)

        def total(query, key, value):
            first_token = jnp.zeros((4, 1), jnp.int32) if global_keys else None
            mask = window(T, T, before=128, after=128, global_keys=first_token) & real(jnp.full(4, T - 7), T)
            options = dict(weight_dropout=0.1, dropout_key=jax.random.key(0))
            return dot_product_attention(query, key, value, mask=mask, **options).astype(jnp.float32).sum()

        with on_mesh(target_mesh(topology_of(topology), axes)):
            return jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).compile()

    short, long = compiled(16_384), compiled(32_768)
    assert "attention_with_dropout" in short.as_text()
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (short, long)]
    assert sizes[1] <= 2.2 * sizes[0]


@pytest.mark.long
@pytest.mark.parametrize(("name", "topology"), corners(["graphormer"], ("graphormer", TPU)))
def test_a_step_of_a_graphormer(name, topology):
    """No kernel takes the biases of the structure, so the weights of attention are in memory."""
    report = step(name, topology, "data=2" if topology == "h100:2" else "data=2,tensor=2")
    assert report.fits
    text = report.program.as_text()
    assert BARRIER not in text
    assert "scatter" not in text, "tables are read by products, whose gradients are products"
    # The bias of the virtual node, a number per head, may be copied.
    assert [copy for copy in copies_of_state(text) if not copy[0].startswith(("f32[1]", "f32[1,"))] == []


@pytest.mark.long
@pytest.mark.parametrize(("name", "topology"), corners(["longformer"], ("longformer", TPU)))
def test_a_step_of_a_longformer(name, topology):
    """A document of 1,024 tokens, a window of 256 and a global first token, with dropout on the weights."""
    report = step(name, topology, "data=2" if topology == "h100:2" else "data=4")
    assert report.fits
    assert report.attention == ["dropout"]
    assert BARRIER not in report.program.as_text()
    assert report.program.memory_analysis().temp_size_in_bytes < 2**30


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
def test_ways_to_fit_a_step_that_does_not(topology):
    """The chip has one byte less than the step needs."""
    run = config("gpt 256")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=1))
    target = topology_of(topology)
    compute = ComputeOptions(remat="blocks")
    report = compile_step(run, topology=target, compute=compute)
    assert KERNEL[topology] in report.attention
    assert set(report.collective_bytes) == {"all-reduce"}, "rows are sharded over both without a mesh"
    needed = report.argument_bytes + report.temporary_bytes
    small = dataclasses.replace(target, chip=dataclasses.replace(target.chip, memory=needed - 1))
    short = dataclasses.replace(report, fits=False, device_memory_bytes=small.chip.memory)
    assert "0.00 GiB too much" in next(describe_report(short))
    way = next(ways_to_fit(entry_of(run), run, small, None, compute))
    assert way.report.fits
    assert way.report.argument_bytes + way.report.temporary_bytes < needed
    assert way.flags in ("--shard-optimizer", "--mesh fsdp=2"), "accumulation costs more"

    def flags(config, target, mesh=None, remat=None):
        compute = ComputeOptions(remat=remat)
        candidates = changes(entry_of(config), config, target, mesh, compute)
        return [flags_of(config, line, mesh, compute, target) for line in candidates]

    assert flags(run, target) == [
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
    assert flags(run, target, remat="blocks")[:3] == [
        "--shard-optimizer",
        "--mesh fsdp=2",
        "--mesh fsdp=2 --accumulation 2",
    ]
    assert not any("--remat" in line for line in flags(run, target, remat="offload"))
    # Without memory for an unsharded state, remat alone cannot help and is not tried.
    tight = dataclasses.replace(
        target, chip=dataclasses.replace(target.chip, memory=int(report.argument_bytes * 0.6))
    )
    assert all(line.startswith(("--mesh fsdp=2", "--mesh tensor=2")) for line in flags(run, tight))
    # Two devices cannot share one row.
    single = dataclasses.replace(run, task=dataclasses.replace(run.task, batch_size=1))
    assert all("--mesh" not in line for line in flags(single, target, mesh="tensor=2"))


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:2")])
def test_a_plain_interpreter_finds_the_devices(topology):
    """The variables that commands and tests set for a GPU's plugin are absent; the mesh is an error."""
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
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    completed = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert "2 tensor=2 of `mesh` does not divide the model's 3 heads" in completed.stdout, completed.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "kernel"),
    [
        pytest.param("l4:1", "cudnn", marks=for_chips("l4:1").marks),
        pytest.param("t4:1", None, marks=for_chips("t4:1").marks),
    ],
)
def test_attention_of_workstation_and_notebook_chips(topology, kernel):
    """cuDNN's kernels need compute capability 8.0, which a T4 does not have."""
    run = config("gpt 256")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, layers=1))
    assert compile_step(run, topology=topology_of(topology)).attention == [kernel] * (kernel is not None)


@pytest.mark.long
@pytest.mark.parametrize("topology", [for_chips("h100:1")])
def test_a_plan_prints_no_lines_of_the_runtime(topology):
    flags = ["--preset", "micro", "--context", "128", "--batch-size", "2", "--dtype", "bfloat16"]
    completed = subprocess.run(
        [sys.executable, "-m", "experiments.language_model", *flags, "--dry-run", "--topology", topology],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
