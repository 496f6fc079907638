"""Eight devices against one: every model under every way of cutting it, and meshes that cannot be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.errors import UserError
from transformer_jax.mesh import check_model, check_rows, make_mesh, on_mesh, parse_mesh, row_shards, spread
from transformer_jax.models import (
    bahdanau,
    gpt,
    hard_attention,
    llama,
    luong,
    modern_gpt,
    recurrent_lm,
    seq2seq,
)
from transformer_jax.models.transformer import Transformer, TransformerConfig
from transformer_jax.parameter_names import named_leaves
from transformer_jax.sharding import describe_sharding, model_shardings, tree_shardings
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.language_loss import language_loss
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.schedules import make_schedule
from transformer_jax.training.state import create_state, make_train_step
from transformer_jax.training.translation_loss import translation_loss

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
KEY = jax.random.key(0).dtype
COMBINED = "data=2,fsdp=2,tensor=2"
# Each way of cutting for a model of each kind of block, and one combination for every model.
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
    """(loss, gradients, model after a step) without a mesh."""
    module, config = MODELS[name]
    model = module(config, rngs=nnx.Rngs(0))
    return outcome(name, model, None)


def outcome(name, model, mesh):
    loss = language_loss() if name in DECODERS else translation_loss(0.1)
    batch = spread(batch_of(name), mesh)

    def objective(model):
        sums, weights, _ = loss(model, None, batch, jax.random.key(1))
        return sums["loss"] / weights["loss"]

    value, gradient = jax.jit(jax.value_and_grad(objective))(model)
    return float(value), {n: np.asarray(g) for n, g in named_leaves(gradient).items()}


@pytest.mark.long
@pytest.mark.parametrize(("name", "cut"), CASES)
def test_a_mesh_changes_no_loss_and_no_gradient(name, cut):
    module, config = MODELS[name]
    expected, expected_gradient = one_device(name)
    mesh = make_mesh(cut)

    def make():
        return module(config, rngs=nnx.Rngs(0))

    with on_mesh(mesh):
        shardings = model_shardings(jax.eval_shape(make), mesh)
        model = jax.jit(make, out_shardings=shardings)()
        value, gradient = outcome(name, model, mesh)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for leaf, wanted in expected_gradient.items():
        norm = np.linalg.norm(wanted)
        assert np.linalg.norm(gradient[leaf] - wanted) <= 1e-5 * max(norm, 1e-2), leaf


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_state_is_made_and_kept_in_its_parts(optimizer):
    """The optimizer's moments lie where their parameters do, before a step and after it."""
    module, config = MODELS["llama"]
    mesh = make_mesh(COMBINED)
    with on_mesh(mesh):
        make = lambda: module(config, rngs=nnx.Rngs(0))  # noqa: E731
        shardings = model_shardings(jax.eval_shape(make), mesh)
        model = jax.jit(make, out_shardings=shardings)()
        schedule = make_schedule("constant", peak=1e-3, warmup=1, steps=4)
        options = dict(weight_decay=0.1, clip=1.0, b1=0.9, b2=0.95, epsilon=1e-8)
        chosen = make_optimizer(optimizer, schedule, model, **options)
        shapes = {n: leaf.shape for n, leaf in named_leaves(model).items()}
        create = lambda model, key: create_state(model, chosen, key, with_ema=True)  # noqa: E731
        key = jax.random.key(1)
        kept = tree_shardings(jax.eval_shape(create, model, key), shapes, mesh)
        state = jax.jit(create, out_shardings=kept)(model, key)
        before = {n: leaf.sharding for n, leaf in named_leaves(state).items()}
        lines = list(describe_sharding(state, mesh))
        step = make_train_step(language_loss(), chosen, shardings=kept)
        state, _ = step(state, spread(batch_of("llama"), mesh))
        state, _ = step(state, spread(batch_of("llama"), mesh))
    assert {n: leaf.sharding for n, leaf in named_leaves(state).items()} == before
    expand = "blocks/feed_forward/expand/kernel"
    moments = [n for n in before if n.startswith("optimizer_state") and n.endswith(expand)]
    assert moments
    for name in (*moments, f"ema/{expand}"):
        assert before[name].spec == before[f"model/{expand}"].spec == jax.P(None, "fsdp", "tensor")
    # A quarter of it is on each device.
    leaf = named_leaves(state)[f"model/{expand}"]
    assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    assert lines[0] == "mesh of 8 device(s): data 2, fsdp 2, tensor 2"
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    told = float(lines[-1].split("state: ")[1].split(" MB")[0].replace(",", ""))
    assert whole / 8e6 < told < whole / 3e6


def state_on(cut):
    """An Adam state of a small llama on a mesh, or on one device."""
    module, config = MODELS["llama"]
    mesh = None if cut is None else make_mesh(cut)
    schedule = make_schedule("constant", peak=1e-3, warmup=1, steps=4)
    model = module(config, rngs=nnx.Rngs(0))
    options = dict(weight_decay=0.0, clip=0.0, b1=0.9, b2=0.95, epsilon=1e-8)
    optimizer = make_optimizer("adam", schedule, model, **options)
    step = make_train_step(language_loss(), optimizer)
    state, _ = step(create_state(model, optimizer, jax.random.key(1)), batch_of("llama"))
    if mesh is None:
        return state
    shapes = {n: leaf.shape for n, leaf in named_leaves(state.model).items()}
    return jax.device_put(state, tree_shardings(state, shapes, mesh))


@pytest.mark.long
def test_a_checkpoint_of_eight_devices_is_read_on_any_others(tmp_path):
    saved = state_on(COMBINED)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved)
        checkpoints.wait()
        for cut in (None, "fsdp=2", "tensor=2,data=2", "fsdp=8"):
            target = state_on(cut)
            restored = checkpoints.restore(jax.tree.map(lambda x: x if x.dtype == KEY else 0 * x, target))
            for name, leaf in named_leaves(restored).items():
                wanted = named_leaves(saved)[name]
                assert leaf.sharding.is_equivalent_to(named_leaves(target)[name].sharding, leaf.ndim), name
                if leaf.dtype == KEY:
                    leaf, wanted = jax.random.key_data(leaf), jax.random.key_data(wanted)
                np.testing.assert_array_equal(leaf, wanted, err_msg=name)
            mean = checkpoints.average(target.model, [1])
            jax.tree.map(np.testing.assert_array_equal, mean, saved.model)


def test_rows_that_are_missing_are_added_empty():
    mesh = make_mesh("data=4,fsdp=2")
    batch = {"tokens": np.arange(1, 22, dtype=np.int32).reshape(7, 3), "weights": np.ones(7, np.float32)}
    with on_mesh(mesh):
        placed = spread(batch, mesh)
    np.testing.assert_array_equal(placed["tokens"], np.pad(batch["tokens"], [(0, 1), (0, 0)]))
    np.testing.assert_array_equal(placed["weights"], [1] * 7 + [0])
    assert placed["tokens"].addressable_shards[0].data.shape == (1, 3)
    assert spread(batch, None) is batch


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
        ("data=2,data=4", "data stands there twice"),
        ("data=3", "is of 3 devices, which does not divide the 8 that there are"),
        ("data=16", "is of 16 devices, which does not divide the 8"),
    ],
)
def test_meshes_that_cannot_be(text, message):
    with pytest.raises(UserError, match=message):
        make_mesh(text)


def test_what_does_not_divide_is_said():
    mesh = make_mesh("tensor=4,data=2")
    check_model(MODELS["gpt"][1], mesh)
    check_model(MODELS["lstm"][1], mesh)
    with pytest.raises(UserError, match="tensor=4 of --mesh does not divide the model's 2 kv_heads"):
        check_model(MODELS["llama"][1], mesh)
    check_rows(3, mesh, "--batch-tokens", whole=False)
    with pytest.raises(UserError, match="into 2 parts, which does not divide its 3 rows: set --batch-size"):
        check_rows(3, mesh, "--batch-size", whole=True)
    with pytest.raises(UserError, match="does not divide its 1 rows"):
        check_rows(1, mesh, "--batch-tokens", whole=False)


def test_a_program_without_a_mesh_is_left_alone():
    from transformer_jax.layers.named_points import RESIDUAL, named

    text = str(jax.make_jaxpr(lambda x: named(x, RESIDUAL))(jnp.ones((2, 4, 4))))
    assert "sharding_constraint" not in text
    with on_mesh(make_mesh("data=2,fsdp=4")):
        text = str(jax.make_jaxpr(lambda x: named(x, RESIDUAL))(jnp.ones((8, 4, 4))))
        assert "sharding_constraint" in text
        # One row cannot be cut.
        text = str(jax.make_jaxpr(lambda x: named(x, RESIDUAL))(jnp.ones((1, 4, 4))))
        assert "P(None, 'sequence', None)" in text
