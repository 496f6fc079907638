"""The Decision Transformer: causality, hidden returns, every field, shardings, and its loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.traces import trace_of, unread_fields
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.sharding import model_shardings, rule_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decisions.decision_transformer import DecisionTransformer, DecisionTransformerConfig
from transformer_jax.parameter_names import named_leaves

CONFIG = DecisionTransformerConfig(
    width=24, layers=2, heads=2, feed_forward=20, state_width=5, actions=4, context=7, max_steps=30, dropout=0.0
)
CHANGES = {
    "width": 32, "layers": 3, "heads": 4, "feed_forward": 28, "state_width": 6, "actions": 3,
    "continuous": True, "context": 5, "max_steps": 40, "dropout": 0.5, "activation": "gelu",
    "norm_epsilon": 0.1, "dtype": "bfloat16",
}  # fmt: skip
B, T = 4, 6


@functools.cache
def model_of(compute=ComputeOptions(), **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: DecisionTransformer(config, rngs=nnx.Rngs(0), compute=compute))()


def inputs(config=CONFIG, rows=B):
    rng = np.random.default_rng(1)
    if config.continuous:
        actions = rng.normal(size=(rows, T, config.actions)).astype(np.float32)
    else:
        actions = rng.integers(0, config.actions, (rows, T))
    return {
        "states": jnp.asarray(rng.normal(size=(rows, T, config.state_width)), jnp.float32),
        "actions": jnp.asarray(actions),
        "returns": jnp.asarray(rng.normal(size=(rows, T)), jnp.float32),
        "steps": jnp.asarray(3 + np.tile(np.arange(T), (rows, 1))),
        "is_conditioned": jnp.asarray(np.arange(rows) % 2 == 0),
    }


@functools.partial(jax.jit, static_argnames="return_weights")
def forward(model, window, **options):
    return model(**window, **options)


@pytest.mark.parametrize("changes", [{}, {"continuous": True}, {"dtype": "bfloat16"}], ids=str)
def test_shapes(changes):
    config = dataclasses.replace(CONFIG, **changes)
    logits, weights = forward(model_of(**changes), inputs(config), return_weights=True)
    assert (logits.shape, logits.dtype) == ((B, T, 4), jnp.float32)
    assert weights.shape == (B, 2, 2, 3 * T, 3 * T)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=0.02 if "dtype" in changes else 1e-5)


@pytest.mark.parametrize("name", ["states", "actions", "returns"])
def test_an_action_sees_what_came_before_it(name):
    """The action of step 3 sees the states and returns up to step 3, and the actions before it."""
    window = inputs()
    window["is_conditioned"] = jnp.ones(B, bool)
    before = forward(model_of(), window)
    changed = window | {name: window[name].at[:, 3].set((window[name][:, 3] + 1) % 4)}
    after = forward(model_of(), changed)
    first = 4 if name == "actions" else 3
    np.testing.assert_array_equal(before[:, :first], after[:, :first])
    assert (before[:, first:] != after[:, first:]).any(axis=-1).all()


def test_hidden_returns_are_unseen():
    window = inputs()
    changed = window | {"returns": window["returns"] + 1.0}
    before, after = forward(model_of(), window), forward(model_of(), changed)
    np.testing.assert_array_equal(before[1::2], after[1::2])
    assert (before[::2] != after[::2]).any(axis=(1, 2)).all()


def test_every_field_matters():
    def trace(**changes):
        config = dataclasses.replace(CONFIG, **changes)

        def init_and_apply(key):
            return DecisionTransformer(config, rngs=nnx.Rngs(key))(**inputs(config), dropout_key=key)

        return trace_of(init_and_apply)

    assert unread_fields(trace, CHANGES) == []
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(DecisionTransformerConfig)}


def test_scan_and_unrolled_forms_have_the_same_gradients():
    def loss(model):
        return jnp.square(model(**inputs(), dropout_key=jax.random.key(2))).mean()

    expected, unrolled = (
        named_leaves(jax.jit(jax.grad(loss))(model_of(compute, dropout=0.3)))
        for compute in (ComputeOptions(unroll=1), ComputeOptions(unroll=8, remat="blocks"))
    )
    for name, leaf in expected.items():
        np.testing.assert_allclose(unrolled[name], leaf, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"continuous": True}], ids=str)
def test_parameters_match_one_rule_and_are_sharded(changes):
    model = model_of(**changes)
    for name, leaf in named_leaves(model).items():
        assert len(rule_of(name, model).axes) == leaf.ndim, name
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    window = inputs(model.config)
    with on_mesh(mesh):
        sharded = forward(jax.device_put(model, model_shardings(model, mesh)), window)
    np.testing.assert_allclose(sharded, forward(model, window), atol=2e-5)


def test_windows_that_do_not_fit():
    window = inputs()
    with pytest.raises(ValueError, match=r"6 steps: the model takes 1 to 4 \(its `context`\)"):
        model_of(context=4)(**window)
    with pytest.raises(ValueError, match="states of 5 values: the model's have 6"):
        model_of(state_width=6)(**window)
    for field, value, message in (
        ("heads", 5, "width 24 must be a multiple of heads 5"),
        ("activation", "sine", "activation='sine' is not one of"),
        ("context", 0, "context=0 must be at least 1"),
        ("dropout", 1.0, "dropout=1.0 must be at least 0 and below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **{field: value})
