"""Eight devices against one: every model on several meshes, and invalid meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.runs import train, write_pairs
from transformer_jax import configure, load
from transformer_jax.decoding.generation import for_decoding
from transformer_jax.decoding.plan import abstract_programs
from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.mesh import (
    check_model,
    check_rows,
    check_tokens,
    make_mesh,
    on_mesh,
    parse_mesh,
    place_batch,
    planned_mesh,
    replicated,
    row_shards,
)
from transformer_jax.distributed.sharding import (
    describe_sharding,
    gradient_shardings,
    model_shardings,
    parameter_sharding,
    shard_over_data,
    state_shardings,
)
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders import gpt, llama, modern_gpt, recurrent_lm
from transformer_jax.models.translators import bahdanau, hard_attention, luong, seq2seq
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks import TASKS
from transformer_jax.tasks.decoders.language_modeling import NextToken
from transformer_jax.tasks.translators.hard_attention import HardAttentionTraining
from transformer_jax.tasks.translators.objective import TokenLoss
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.driver import begin
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.plan import abstract_state
from transformer_jax.training.schedules import make_schedule
from transformer_jax.training.step import create_state, make_train_step
from transformer_jax.training.trained_model import make_model

V, D, T, S = 64, 16, 16, 8
DECODER = dict(vocab_size=V, width=D, heads=4, layers=2, max_length=T, dropout=0.1, vocab_multiple=8)
CELLS = dict(vocab_size=V, width=D, hidden=24, layers=1, dropout=0.1, max_length=T, vocab_multiple=8)
TRANSLATORS = {
    "transformer": (
        Transformer,
        TransformerConfig(
            vocab_size=V, width=D, feed_forward=32, heads=4, kv_heads=4, encoder_layers=2, decoder_layers=2,
            dropout=0.1, norm="pre", vocab_multiple=8,
        ),
    ),
    "lstm": (seq2seq.Seq2Seq, seq2seq.Seq2SeqConfig(**CELLS)),
    "bahdanau": (bahdanau.Bahdanau, bahdanau.BahdanauConfig(alignment=8, **CELLS)),
    "luong": (luong.Luong, luong.LuongConfig(**CELLS)),
    "hard_attention": (
        hard_attention.HardAttention, hard_attention.HardAttentionConfig(alignment=8, **CELLS)
    ),
}  # fmt: skip
DECODERS = {
    "gpt": (gpt.GPT, gpt.GPTConfig(feed_forward=32, kv_heads=4, **DECODER)),
    "llama": (llama.Llama, llama.LlamaConfig(feed_forward=32, kv_heads=2, **DECODER)),
    "modern_gpt": (modern_gpt.ModernGPT, modern_gpt.ModernGPTConfig(feed_forward=32, kv_heads=4, **DECODER)),
    "lstm_lm": (recurrent_lm.RecurrentLM, recurrent_lm.RecurrentLMConfig(**CELLS)),
}
MODELS = TRANSLATORS | DECODERS
COMBINED = "data=2,fsdp=2,tensor=2"
# Every mesh for one model per type of block, and one combined mesh for every model.
CASES = [(name, COMBINED) for name in MODELS] + [
    (name, mesh)
    for name in ("transformer", "llama", "bahdanau")
    for mesh in ("data=8", "fsdp=8", "tensor=2,data=4", "sequence=2,data=4", "fsdp=2,tensor=2,sequence=2")
]


def batch_of(name):
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.integers, 3, V, dtype=np.int32)
    if name in DECODERS:
        tokens = draw((8, T + 1))
        weights = (np.arange(T) < rng.integers(4, T, 8)[:, None]).astype(np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    source, target = draw((8, S)), draw((8, T + 1))
    source[:, S - 2 :] = 0
    target[5:, T - 4 :] = 0
    return {"source": source, "target_in": target[:, :-1], "target_out": target[:, 1:]}


@functools.cache
def one_device(name):
    """Return the loss and the gradients without a mesh."""
    module, config = MODELS[name]
    return outcome(name, module(config, rngs=nnx.Rngs(0)), None)


def outcome(name, model, mesh):
    loss = NextToken() if name in DECODERS else TokenLoss(0.1)
    if name == "hard_attention":
        loss = HardAttentionTraining(0.1)
    batch = place_batch(batch_of(name), mesh)

    def objective(model, batch):
        sums, weights = loss.loss(model, None, batch, jax.random.key(1))
        return sums["loss"] / weights["loss"]

    differentiated = jax.value_and_grad(objective)
    value, gradient = jax.jit(lambda model, batch: replicated(differentiated(model, batch)))(model, batch)
    return float(value), {n: np.asarray(g) for n, g in named_leaves(gradient).items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "text"),
    others_soak(
        CASES,
        *((name, COMBINED) for name in ("transformer", "lstm", "gpt")),
        ("transformer", "fsdp=2,tensor=2,sequence=2"),
        ("llama", "sequence=2,data=4"),
    ),
)
def test_a_mesh_preserves_loss_and_gradients(name, text):
    assert_equals_one_device(name, *sharded_outcome(name, text))


def sharded_outcome(name, text):
    module, config = MODELS[name]
    mesh = make_mesh(text)

    def make():
        return module(config, rngs=nnx.Rngs(0))

    with on_mesh(mesh):
        shardings = model_shardings(jax.eval_shape(make), mesh)
        model = jax.jit(make, out_shardings=shardings)()
        return outcome(name, model, mesh)


def assert_equals_one_device(name, value, gradient):
    expected, expected_gradient = one_device(name)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for leaf, reference in expected_gradient.items():
        norm = np.linalg.norm(reference)
        assert np.linalg.norm(gradient[leaf] - reference) <= 1e-5 * max(norm, 1e-2), leaf


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_training_keeps_a_state_sharded(optimizer):
    """The optimizer's moments are sharded like their parameters, before and after a step."""
    module, config = MODELS["llama"]
    mesh = make_mesh(COMBINED)
    with on_mesh(mesh):
        make = lambda: module(config, rngs=nnx.Rngs(0))  # noqa: E731
        shardings = model_shardings(jax.eval_shape(make), mesh)
        model = jax.jit(make, out_shardings=shardings)()
        schedule = make_schedule("constant", peak=1e-3, warmup=1, steps=4)
        options = dict(weight_decay=0.1, clip=1.0, b1=0.9, b2=0.95, epsilon=1e-8)
        transformation = make_optimizer(optimizer, schedule, model, **options)
        create = lambda model, key: create_state(model, transformation, key, with_ema=True)  # noqa: E731
        key = jax.random.key(1)
        state_sharding = state_shardings(jax.eval_shape(create, model, key), mesh)
        state = jax.jit(create, out_shardings=state_sharding)(model, key)
        before = {n: leaf.sharding for n, leaf in named_leaves(state).items()}
        lines = list(describe_sharding(state, mesh))
        step = make_train_step(NextToken(), transformation, shardings=state_sharding)
        state, _ = step(state, place_batch(batch_of("llama"), mesh))
        state, _ = step(state, place_batch(batch_of("llama"), mesh))
    assert {n: leaf.sharding for n, leaf in named_leaves(state).items()} == before
    expand = "blocks/feed_forward/expand/kernel"
    moments = [n for n in before if n.startswith("optimizer_state") and n.endswith(expand)]
    assert moments
    for name in (*moments, f"ema/{expand}"):
        assert before[name].spec == before[f"trained/{expand}"].spec == jax.P(None, "fsdp", "tensor")
    leaf = named_leaves(state)[f"trained/{expand}"]
    assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    assert lines[0] == "mesh of 8 device(s): data 2, fsdp 2, tensor 2"
    assert any(line.startswith("  parameters, axis 1 fsdp x 2 tensor: ") for line in lines)
    assert not any("sequence" in line for line in lines)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    reported = float(lines[-1].split("state: ")[1].split(" MB")[0].replace(",", ""))
    assert size / 8e6 < reported < size / 3e6


def train_steps(text, model="modern_gpt", shard_optimizer=False, **changes):
    """Train for three steps and return the losses and the collectives of the program."""
    sizes = dict(width=32, hidden=32, layers=2) if model == "lstm" else dict(
        width=32, heads=4, feed_forward=64, layers=2
    )  # fmt: skip
    config = configure(
        "language_modeling", "text", model=model, context=16, batch_size=8, vocab_size=64, learning_rate=1e-2,
        **sizes | changes,
    )  # fmt: skip
    mesh, objective = None if text is None else make_mesh(text), NextToken()
    with on_mesh(mesh):
        network = make_model(
            DECODERS["lstm_lm" if model == "lstm" else model][0],
            config.model,
            seed=0,
            compute=ComputeOptions(),
            mesh=mesh,
        )
        state, optimizer, shardings = begin(objective, config, network, mesh, shard_optimizer=shard_optimizer)
        step = make_train_step(
            objective, optimizer, shardings=shardings, accumulation=config.optimization.accumulation,
            of_gradients=gradient_shardings(state, mesh) if shard_optimizer else None,
        )  # fmt: skip
        batch = place_batch(batch_of("modern_gpt"), mesh)
        program = step.lower(state, batch).compile()
        losses = []
        for _ in range(3):
            state, metrics = program(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, collectives(program.as_text())


@pytest.mark.parametrize(
    ("mesh", "axes", "layers"),
    others_soak([("data=2,fsdp=2", 1, 2), ("fsdp=2,tensor=2", 2, 4), ("fsdp=2", 1, 3)]),
)
def test_muon_gathers_matrices_outside_its_iterations(mesh, axes, layers):
    """The losses equal those of one device, whether or not the mesh divides the layers."""

    def count(operations):
        return sum(operation.times for operation in operations)

    losses, operations = train_steps(mesh, optimizer="muon", layers=layers)
    np.testing.assert_allclose(losses, train_steps(None, optimizer="muon", layers=layers)[0], rtol=1e-5)
    # For six types of matrices, gradient, momentum and parameter arrive, and momentum and update leave.
    assert count(operations) <= count(train_steps(mesh, optimizer="adam", layers=layers)[1]) + 6 * 5 * axes


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    others_soak(
        [
            dict(layer_decay=0.5),
            dict(trainable="(blocks|unembedding)/.*"),
            dict(shard_optimizer=True),
            dict(shard_optimizer=True, accumulation=2),
            dict(model="lstm"),
        ],
        dict(shard_optimizer=True, accumulation=2),
    ),
    ids=str,
)
def test_muon_on_a_mesh_with_further_options(options):
    """Learning rates by depth, frozen parameters, state sharded over data, and unstack_encoder matrices."""
    unsharded = {name: value for name, value in options.items() if name != "shard_optimizer"}
    expected, _ = train_steps(None, optimizer="muon", **unsharded)
    assert len(set(expected)) == 3, "the model learns"
    losses, _ = train_steps("data=2,fsdp=2", optimizer="muon", **options)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "optimizer", "moments"),
    others_soak(
        [("data=4", "adam", 2), ("data=2,fsdp=2", "adam", 2), ("data=4", "muon", 1)],
        ("data=2,fsdp=2", "adam", 2),
    ),
)
def test_sharding_the_optimizer_over_data_preserves_losses(text, optimizer, moments):
    def train_on(text, shard_optimizer):
        mesh = None if text is None else make_mesh(text)
        config = configure(
            "language_modeling", "text", model="llama", context=8, batch_size=8, vocab_size=64,
            optimizer=optimizer, ema=0.9, steps=3,
        )  # fmt: skip
        losses = []
        with on_mesh(mesh):
            model = make_model(MODELS["llama"][0], config.model, seed=0, compute=ComputeOptions(), mesh=mesh)
            objective = NextToken()
            state, transformation, shardings = begin(
                objective, config, model, mesh, shard_optimizer=shard_optimizer
            )
            step = make_train_step(
                objective,
                transformation,
                ema_decay=0.9,
                shardings=shardings,
                of_gradients=gradient_shardings(state, mesh) if shard_optimizer else None,
            )
            for number in range(3):
                tokens = np.random.default_rng(number).integers(0, 64, (8, 9))
                batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=np.ones((8, 8), np.float32))
                state, metrics = step(state, place_batch(batch, mesh))
                losses.append(float(metrics["loss"]))
        return losses, state

    expected, _ = train_on(None, False)
    losses, state = train_on(text, True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    leaves = named_leaves(state)
    expand = "blocks/feed_forward/expand/kernel"
    names = [name for name in leaves if name.startswith("optimizer_state") and name.endswith(expand)]
    assert len(names) == moments
    for name in (*names, f"ema/{expand}"):
        assert leaves[name].addressable_shards[0].data.size * 4 == leaves[name].size, name
    assert "data" not in leaves[f"trained/{expand}"].sharding.spec, "parameters are not sharded over data"


@pytest.mark.parametrize("text", ["data=8", "data=4,fsdp=2", "data=2,tensor=4"])
@pytest.mark.parametrize(
    ("task", "recipe", "changes"),
    [
        ("language_modeling", "text", dict(model="gpt", preset="124M", vocab_size=50_257)),
        ("translation", "phrases", dict(model="transformer", preset="big", vocab_size=32_000)),
    ],
)
def test_each_device_holds_a_share_of_a_sharded_optimizer(task, recipe, changes, text):
    config, mesh = configure(task, recipe, **changes), planned_mesh(text)
    state = abstract_state(TASKS[task], config)
    shardings = named_leaves(state_shardings(state, mesh, shard_optimizer=True))
    size = share = 0
    for name, leaf in named_leaves(state).items():
        if name.startswith("optimizer_state"):
            size += leaf.size
            share += math.prod(shardings[name].shard_shape(leaf.shape))
    assert share < 1.02 * size / 8


@pytest.mark.soak
@pytest.mark.parametrize("text", ["data=8", "data=2,fsdp=2,tensor=2"])
def test_recurrent_gradients_over_data_equal_one_device(text):
    """XLA computed wrong gradients for a loop over time sharded on both axes: see `parameter_sharding`."""
    mesh, (module, config) = make_mesh(text), MODELS["lstm_lm"]
    with on_mesh(mesh):
        model = make_model(module, config, seed=0, compute=ComputeOptions(), mesh=mesh)
        shardings = {
            name: shard_over_data(parameter_sharding(name, leaf.shape, mesh, model), leaf.shape)
            for name, leaf in named_leaves(model).items()
        }

        def gradient(model, batch):
            loss = lambda m: NextToken().loss(m, None, batch, jax.random.key(1))[0]["loss"]  # noqa: E731
            leaves = named_leaves(jax.grad(loss)(model))
            return {n: jax.lax.with_sharding_constraint(g, shardings[n]) for n, g in leaves.items()}

        gradients = jax.jit(gradient)(model, place_batch(batch_of("lstm_lm"), mesh))
    model = module(config, rngs=nnx.Rngs(0))
    loss = lambda m: NextToken().loss(m, None, batch_of("lstm_lm"), jax.random.key(1))[0]["loss"]  # noqa: E731
    for name, expected in named_leaves(jax.jit(jax.grad(loss))(model)).items():
        np.testing.assert_allclose(
            gradients[name], expected, atol=1e-5 * np.abs(expected).max() + 1e-6, err_msg=name
        )


def state_on(text):
    """Return the Adam state of a small Llama after one step, on a mesh or on one device."""
    module, config = MODELS["llama"]
    mesh = None if text is None else make_mesh(text)
    schedule = make_schedule("constant", peak=1e-3, warmup=1, steps=4)
    model = module(config, rngs=nnx.Rngs(0))
    options = dict(weight_decay=0.0, clip=0.0, b1=0.9, b2=0.95, epsilon=1e-8)
    optimizer = make_optimizer("adam", schedule, model, **options)
    step = make_train_step(NextToken(), optimizer)
    state, _ = step(create_state(model, optimizer, jax.random.key(1)), batch_of("llama"))
    return state if mesh is None else jax.device_put(state, state_shardings(state, mesh))


@pytest.mark.long
def test_a_checkpoint_of_eight_devices_is_restored_on_other_meshes(tmp_path):
    saved = state_on(COMBINED)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved)
        checkpoints.wait()
        for text in (None, "fsdp=2", "tensor=2,data=2", "fsdp=8"):
            target = state_on(text)
            restored, _ = checkpoints.restore(
                jax.tree.map(lambda x: x if x.dtype == jax.random.key(0).dtype else 0 * x, target)
            )
            for name, leaf in named_leaves(restored).items():
                expected = named_leaves(saved)[name]
                assert leaf.sharding.is_equivalent_to(named_leaves(target)[name].sharding, leaf.ndim), name
                if leaf.dtype == jax.random.key(0).dtype:
                    leaf, expected = jax.random.key_data(leaf), jax.random.key_data(expected)
                np.testing.assert_array_equal(leaf, expected, err_msg=name)
            mean = checkpoints.average(functools.partial(checkpoints.restore_model, target.model), [1])
            jax.tree.map(np.testing.assert_array_equal, mean, saved.model)


def test_batches_are_padded_with_empty_rows():
    mesh = make_mesh("data=4,fsdp=2")
    batch = {"tokens": np.arange(1, 22, dtype=np.int32).reshape(7, 3), "weights": np.ones(7, np.float32)}
    with on_mesh(mesh):
        placed = place_batch(batch, mesh)
    np.testing.assert_array_equal(placed["tokens"], np.pad(batch["tokens"], [(0, 1), (0, 0)]))
    np.testing.assert_array_equal(placed["weights"], [1] * 7 + [0])
    assert placed["tokens"].addressable_shards[0].data.shape == (1, 3)
    assert place_batch(batch, None) is batch
    # Each micro-batch is padded, so that every row stays in its micro-batch.
    rows = {"weights": np.arange(1, 7, dtype=np.float32)}
    placed = place_batch(rows, make_mesh("data=2"), micro_batches=2)
    np.testing.assert_array_equal(placed["weights"], [1, 2, 3, 0, 4, 5, 6, 0])


def test_meshes():
    assert parse_mesh("data=2,tensor=4") == {"data": 2, "fsdp": 1, "tensor": 4, "sequence": 1}
    assert dict(make_mesh("fsdp=4").shape) == {"data": 1, "fsdp": 4, "tensor": 1, "sequence": 1}
    assert row_shards(make_mesh(COMBINED)) == 4
    assert row_shards(None) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "unknown axis 'model'; write data=N, fsdp=N, tensor=N, sequence=N"),
        ("", "unknown axis ''"),
        ("data", "data= must be a number of at least 1"),
        ("data=0", "data=0 must be a number of at least 1"),
        ("data=-2", "data=-2 must be a number"),
        ("data=two", "data=two must be a number"),
        ("data=2,data=4", "data is named twice"),
        ("data=3", "has 3 devices, which does not divide the 8 available"),
        ("data=16", "has 16 devices, which does not divide the 8"),
    ],
)
def test_invalid_meshes(text, message):
    with pytest.raises(UserError, match=message):
        make_mesh(text)


def test_a_mesh_that_does_not_divide_model_or_batch():
    mesh = make_mesh("tensor=4,data=2")
    check_model(MODELS["gpt"][1], mesh)
    check_model(MODELS["lstm"][1], mesh)
    with pytest.raises(UserError, match="tensor=4 of `mesh` does not divide the model's 2 kv_heads"):
        check_model(MODELS["llama"][1], mesh)
    check_rows(3, mesh, "`batch_tokens`", whole=False)
    with pytest.raises(UserError, match="into 2 parts, which does not divide its 3 rows: set `batch_size`"):
        check_rows(3, mesh, "`batch_size`", whole=True)
    with pytest.raises(UserError, match="does not divide its 1 rows"):
        check_rows(1, mesh, "`batch_tokens`", whole=False)
    check_tokens(16, make_mesh("sequence=8"), "`context`")
    with pytest.raises(UserError, match="sequence=8 of `mesh` does not divide `context` 100"):
        check_tokens(100, make_mesh("sequence=8"), "`context`")
    with pytest.raises(UserError, match="sequence=2 of `mesh` needs an attention model"):
        check_model(MODELS["lstm"][1], make_mesh("sequence=2"))


def test_constraints_need_a_mesh():
    from transformer_jax.layers.named_points import RESIDUAL, named

    text = str(jax.make_jaxpr(lambda x: named(x, RESIDUAL))(jnp.ones((2, 4, 4))))
    assert "sharding_constraint" not in text
    with on_mesh(make_mesh("data=2,fsdp=4")):
        text = str(jax.make_jaxpr(lambda x: named(x, RESIDUAL))(jnp.ones((8, 4, 4))))
        assert "sharding_constraint" in text
        # One row cannot be sharded.
        text = str(jax.make_jaxpr(lambda x: named(x, RESIDUAL))(jnp.ones((1, 4, 4))))
        assert "P(None, 'sequence', None)" in text


@pytest.mark.soak
@pytest.mark.parametrize(("axes", "kind"), [(("batch", "model"), "Auto"), (("fsdp", "tensor"), "Auto")])
def test_a_mesh_with_other_axes_is_ignored(axes, kind):
    mesh = jax.make_mesh((2, 2), axes, axis_types=(jax.sharding.AxisType[kind],) * 2, devices=jax.devices()[:4])
    module, config = MODELS["gpt"]
    with jax.set_mesh(mesh):
        logits = module(config, rngs=nnx.Rngs(0))(jnp.ones((4, 3), jnp.int32))
    assert np.isfinite(logits).all()


@pytest.mark.long
def test_a_translator_resumes_on_another_mesh(tmp_path):
    """Two steps over data and fsdp with micro-batches, two over tensor, and beam search, as in the commands."""
    files = write_pairs(tmp_path, train=300, valid=8, test=8)
    config = configure(
        "translation", "files", **files, preset="mini", vocab_size=270, max_length=32, batch_tokens=1_280,
        accumulation=3, average=1, save_every=2, evaluate_every=4, beam_size=2, schedule="inverse_sqrt",
        dropout=0.1, batching="packed",
    )  # fmt: skip
    expected = train(config.with_values(steps=4), tmp_path / "one")
    train(config.with_values(steps=2), tmp_path / "many", mesh="data=2,fsdp=2")
    results = train(config.with_values(steps=4), tmp_path / "many", mesh="tensor=2")
    assert results["mesh"] == {"data": 1, "fsdp": 1, "tensor": 2, "sequence": 1}
    assert (expected["mesh"], results["processes"]) == (None, 1)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("one", "many")
    ]
    np.testing.assert_allclose(losses[1][-1], losses[0][-1], rtol=1e-4)
    text = ["a dog sees a cat", "big", "red dog"] * 3
    mesh = make_mesh("fsdp=2,tensor=2")
    with on_mesh(mesh):
        sharded = load(tmp_path / "many", mesh=mesh)
        assert len(jax.tree.leaves(sharded.model)[0].sharding.device_set) == 4
        assert sharded.translate(text) == load(tmp_path / "many").translate(text)


@pytest.mark.parametrize("axes", ["data=2,fsdp=2,tensor=2", "data=1"])
def test_planned_shardings_equal_those_of_decoding(axes):
    """Blocks are unstacked and sharded as in their stack; on one device they are joined and replicated."""
    config = llama.LlamaConfig.preset("mini", vocab_size=50, layers=2)
    mesh = make_mesh(axes)
    model = make_model(llama.Llama, config, mesh=mesh)
    with on_mesh(mesh):
        leaves = named_leaves(for_decoding(model))
        programs = abstract_programs(
            config, rows=4, prompt=8, length=16, mesh=mesh, dtype="bfloat16", parameters="float32",
            compute=ComputeOptions(),
        )  # fmt: skip
    planned = named_leaves(programs["prefill"][1][0])
    assert {name: leaf.shape for name, leaf in leaves.items()} == {n: leaf.shape for n, leaf in planned.items()}
    for name, leaf in leaves.items():
        assert leaf.sharding.is_equivalent_to(planned[name].sharding, leaf.ndim), name
        assert leaf.dtype == planned[name].dtype, "a run computes in bfloat16 with float32 parameters"


@pytest.mark.long
def test_a_language_model_on_a_mesh_equals_one_device(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    config = configure(
        "language_modeling", "text", text=(str(text),), tokenizer="char", model="llama", context=32,
        batch_size=8, accumulation=2, steps=20, save_every=20, evaluate_every=20, sample_tokens=8,
    )  # fmt: skip
    notes: dict[str, list[str]] = {"one": [], "many": []}
    train(config, tmp_path / "one", note=notes["one"].append)
    train(config, tmp_path / "many", note=notes["many"].append, mesh="data=2,tensor=2,sequence=2")
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("one", "many")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    samples = [[line for line in lines if line.startswith("sample: ")] for lines in notes.values()]
    assert samples[0] == samples[1] != []
    mesh, options = make_mesh("tensor=2,fsdp=2"), dict(max_new_tokens=8, temperature=0.0)
    with on_mesh(mesh):
        texts = load(tmp_path / "many", mesh=mesh).generate(["the cat", "a dog"], **options)
    assert texts == load(tmp_path / "many").generate(["the cat", "a dog"], **options)
    for mesh, message in (
        ("data=8", "into 8 parts, which does not divide its 4 rows: set `batch_size`"),
        ("tensor=8", "tensor=8 of `mesh` does not divide"),
    ):
        with pytest.raises(UserError, match=message):
            train(config, tmp_path / "bad", mesh=mesh)
    assert not (tmp_path / "bad").exists()
