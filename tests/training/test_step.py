"""The training step: accumulation, moving average, optimizers by the name table, and compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.data.batches.listed_examples import ListedExamples
from transformer_jax.data.batches.pair_batches import TranslationBatches, choose_buckets
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.translators.objective import TokenLoss
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.step import create_state, make_train_step

CONFIG = TransformerConfig(
    vocab_size=53, width=16, feed_forward=24, heads=4, kv_heads=4, encoder_layers=2, decoder_layers=2,
    dropout=0.0, attention_bias=True,
)  # fmt: skip


def model():
    return Transformer(CONFIG, rngs=nnx.Rngs(0))


def batch(rng, rows=6, length=9):
    """Return rows of very different lengths, which an average per micro-batch would weight wrongly."""
    sizes = [length - 1, 1, 1, 1, length - 1, 2][:rows]
    tokens = np.zeros((rows, length), np.int32)
    for row, size in zip(tokens, sizes, strict=True):
        row[:size] = rng.integers(3, 53, size)
    return {"source": tokens, "target_in": tokens, "target_out": tokens}


@pytest.mark.long
def test_accumulation_equals_the_complete_batch(rng):
    data = batch(rng)
    results = []
    for accumulation in (1, 2, 3):
        optimizer = optax.sgd(1.0)
        step = make_train_step(TokenLoss(0.1), optimizer, accumulation=accumulation)
        state, metrics = step(create_state(model(), optimizer, jax.random.key(0)), data)
        results.append((named_leaves(state.model), metrics))
    for leaves, metrics in results[1:]:
        for name, leaf in leaves.items():
            np.testing.assert_allclose(leaf, results[0][0][name], atol=1e-6, err_msg=name)
        for name, value in metrics.items():
            np.testing.assert_allclose(value, results[0][1][name], rtol=1e-5, err_msg=name)


def test_ema_follows_the_model(rng):
    optimizer = optax.sgd(0.5)
    state = create_state(model(), optimizer, jax.random.key(0), with_ema=True)
    expected = {n: np.asarray(x) for n, x in named_leaves(state.model).items()}
    step = make_train_step(TokenLoss(0.0), optimizer, ema_decay=0.9)
    data = batch(rng)
    for _ in range(3):
        state, _ = step(state, data)
        expected = {n: 0.9 * expected[n] + 0.1 * np.asarray(x) for n, x in named_leaves(state.model).items()}
    for name, leaf in named_leaves(state.ema).items():
        np.testing.assert_allclose(leaf, expected[name], atol=1e-6)


def test_dropout_differs_between_steps_and_is_reproducible(rng):
    import dataclasses

    config = dataclasses.replace(CONFIG, dropout=0.5)
    optimizer, data = optax.sgd(0.0), batch(rng)
    step = make_train_step(TokenLoss(0.0), optimizer)

    def losses():
        state = create_state(Transformer(config, rngs=nnx.Rngs(0)), optimizer, jax.random.key(4))
        values = []
        for _ in range(3):
            state, metrics = step(state, data)
            values.append(float(metrics["loss"]))
        return values

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_optimizers_take_parameters_by_name(rng, name):
    optimizer = make_optimizer(
        name, optax.constant_schedule(0.1), model(), weight_decay=0.5, clip=1.0, b1=0.9, b2=0.98, epsilon=1e-9
    )
    before = named_leaves(model())
    zero = jax.tree.map(jnp.zeros_like, before)
    updates, _ = optimizer.update(zero, optimizer.init(before), before)
    for parameter, update in updates.items():
        value = before[parameter]
        decays = parameter.endswith("kernel")
        expected = -0.1 * 0.5 * value if decays else jnp.zeros_like(value)
        np.testing.assert_allclose(update, expected, atol=1e-7, err_msg=parameter)


def test_muon_orthogonalizes_the_matrix_of_each_layer(rng):
    """The update of a stacked kernel has similar singular values in every layer."""
    optimizer = make_optimizer(
        "muon", optax.constant_schedule(1.0), model(), weight_decay=0.0, clip=0.0, b1=0.9, b2=0.98, epsilon=1e-9
    )
    before = named_leaves(model())
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), before)
    updates, _ = optimizer.update(gradient, optimizer.init(before), before)
    raw = np.linalg.svd(np.asarray(gradient["encoder/self_attention/query/kernel"][0]).reshape(16, 16))[1]
    assert np.quantile(raw, 0.1) / raw.max() < 0.3
    for parameter, inputs in (
        ("encoder/self_attention/query/kernel", 16),
        ("decoder/cross_attention/output/kernel", 16),
        ("decoder/feed_forward/expand/kernel", 16),
    ):
        for layer in np.asarray(updates[parameter]):
            singular_values = np.linalg.svd(layer.reshape(inputs, -1), compute_uv=False)
            # Five Newton-Schulz steps raise all except the smallest singular values.
            assert np.quantile(singular_values, 0.1) / singular_values.max() > 0.5, parameter


def test_adam_equals_the_published_algorithm(rng):
    optimizer = make_optimizer(
        "adam", optax.constant_schedule(0.1), model(), weight_decay=0.0, clip=0.0, b1=0.9, b2=0.98, epsilon=1e-9
    )
    before = named_leaves(model())
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), before)
    state = optimizer.init(before)
    for step in (1, 2):
        updates, state = optimizer.update(gradient, state, before)
        for name, update in updates.items():
            g = np.asarray(gradient[name], np.float64)
            m = (1 - 0.9**step) * g / (1 - 0.9**step)
            v = (1 - 0.98**step) * g**2 / (1 - 0.98**step)
            np.testing.assert_allclose(update, -0.1 * m / (np.sqrt(v) + 1e-9), rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_compilations_of_an_epoch_equal_the_number_of_buckets(rng):
    sizes = rng.integers(1, 30, size=(150, 2))
    examples = ListedExamples(*([list(rng.integers(3, 53, n)) for n in sizes[:, side]] for side in (0, 1)))
    buckets = choose_buckets(examples.lengths.max(axis=1) + 1, 3, 128)
    batches = TranslationBatches(examples, buckets, seed=0)
    assert len(batches.buckets) == 3
    optimizer = optax.sgd(0.1)
    step = make_train_step(TokenLoss(0.1), optimizer)
    state = create_state(model(), optimizer, jax.random.key(0))
    stream = batches.from_step(0)
    for _ in range(batches.batches_per_epoch):
        state, _ = step(state, next(stream))
    assert step._cache_size() == 3
