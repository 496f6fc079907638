"""Hard attention: one position per step, and a policy gradient whose mean is the exact gradient."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.battery import TranslatorBattery, forward
from transformer_jax.data.tokenizers.byte_pairs import END, PAD
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.translators.bahdanau import Bahdanau, BahdanauConfig
from transformer_jax.models.translators.hard_attention import HardAttention, HardAttentionConfig
from transformer_jax.tasks.translators.hard_attention import HardAttentionTraining, returns

CONFIG = HardAttentionConfig(
    vocab_size=37, width=12, hidden=17, layers=1, alignment=14, dropout=0.1, max_length=23
)


@pytest.mark.soak
class TestHardAttention(TranslatorBattery):
    module = HardAttention
    default_compute = ComputeOptions()  # whose loops over time do not unroll
    config = CONFIG
    changes = dict(  # noqa: RUF012
        vocab_size=41, width=10, hidden=19, layers=3, dropout=0.2, max_length=6, tie="none", dtype="bfloat16",
        vocab_multiple=7, alignment=9,
    )  # fmt: skip

    def test_each_step_looks_at_one_position(self, inputs):
        source, target, mask = inputs
        _, weights = self.forward(self.make(), source, target, source_mask=mask)
        np.testing.assert_array_equal(np.sort(np.unique(weights)), [0, 1])


@pytest.fixture
def model():
    config = HardAttentionConfig(
        vocab_size=7, width=4, hidden=5, layers=1, alignment=3, dropout=0.0, tie="none", vocab_multiple=1
    )
    rng = np.random.default_rng(0)
    model = HardAttention(config, rngs=nnx.Rngs(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), model)


EMBEDDINGS = ("target_embedding", "source_embedding", "unembedding")


# Three positions and two steps: nine paths.
BATCH = {
    "source": jnp.array([[4, 5, 6]]),
    "target_in": jnp.array([[1, 5]]),
    "target_out": jnp.array([[5, END]]),
}


def test_drawn_positions_have_the_softmax_of_the_scores(model):
    """Compare 4,000 draws with the soft model's weights of the first step."""
    _, glances = jax.vmap(lambda rng: model.sampled(BATCH["source"], BATCH["target_in"], rng=rng))(
        jax.random.split(jax.random.key(0), 4_000)
    )
    probabilities = np.exp(np.asarray(glances.log_probability)[:, 0, 0])
    shares, counts = np.unique(probabilities.round(5), return_counts=True)
    np.testing.assert_allclose(shares.sum(), 1.0, atol=1e-4)
    np.testing.assert_allclose(counts / 4_000, shares, atol=0.03)
    expected = -(shares * np.log(shares)).sum()
    np.testing.assert_allclose(glances.entropy[:, 0, 0], expected, atol=1e-3)


def exact_objective(model, paths):
    """Return the expected log-likelihood of the target over all paths of positions, from the model's layers."""

    def along(path):
        x = model._embed(model.target_embedding, BATCH["target_in"], None)
        memory, states = model._encode(BATCH["source"], None, None, None)
        state, log_probability, likelihood = states[:, 0], 0.0, 0.0
        for t, position in enumerate(path):
            scores = jnp.tanh(model.query(state)[:, None] + memory.keys) @ model.direction[...]  # (1, S)
            log_probability += jax.nn.log_softmax(scores)[0, position]
            context = memory.values[:, position]
            pairs = model.readout(jnp.concatenate([state, x[:, t], context], axis=-1))
            logits = model.logits(pairs.reshape(1, -1, 2).max(axis=-1))
            likelihood += jax.nn.log_softmax(logits)[0, BATCH["target_out"][0, t]]
            state, _ = model.cell(state, jnp.concatenate([x[:, t], context], axis=-1))
        return jnp.exp(log_probability) * likelihood

    return sum(along(path) for path in paths)


@pytest.mark.long
def test_the_policy_gradient_is_the_exact_one_on_average(model):
    """The mean of 60,000 draws equals the gradient over all paths within 5 standard errors and 5 % in norm.

    With discount 1, a step is rewarded for all later tokens.
    """
    paths = list(itertools.product(range(3), repeat=2))
    exact = jax.grad(lambda m: -exact_objective(m, paths))(model)
    loss = HardAttentionTraining(0.0, discount=1.0, entropy=0.0, soft=0.0)

    def gradient(key):
        def objective(m):
            sums, _ = loss.loss(m, None, BATCH, key)
            return sums["loss"] - 0.5 * sums["baseline_error"]

        return jax.grad(objective)(model)

    drawn = jax.jit(jax.vmap(gradient))(jax.random.split(jax.random.key(1), 60_000))
    for name in ("query", "key", "first_state", "readout"):
        ours = np.asarray(getattr(drawn, name).kernel[...], np.float64)  # a sum of 60,000
        expected = np.asarray(getattr(exact, name).kernel[...])
        mean, error = ours.mean(axis=0), ours.std(axis=0) / np.sqrt(len(ours))
        assert (np.abs(mean - expected) < 5 * error + 1e-6).all(), name
        assert np.linalg.norm(mean - expected) < 0.05 * np.linalg.norm(expected), name


def test_soft_rows_are_the_soft_model(model):
    """With soft=1 the logits are Bahdanau's and nothing is drawn; with soft=0.5 about half of the rows draw."""
    source, target = BATCH["source"], BATCH["target_in"]
    parts = {name: getattr(model, name) for name in ("forward", "backward", "first_state", "key", "query")}
    soft = Bahdanau(BahdanauConfig(**dataclasses.asdict(model.config)), rngs=nnx.Rngs(0))
    for name in (*parts, "direction", "cell", "readout", *EMBEDDINGS):
        setattr(soft, name, getattr(model, name))
    states, glances = model.sampled(source, target, rng=jax.random.key(0), soft=1.0)
    np.testing.assert_allclose(model.logits(states), soft(source, target), atol=1e-6)
    np.testing.assert_array_equal(glances.log_probability, 0)
    repeated = [jnp.repeat(x, 400, axis=0) for x in (source, target)]
    _, glances = model.sampled(*repeated, rng=jax.random.key(0), soft=0.5)
    drew_nothing = np.asarray(glances.log_probability) == 0  # (B, T)
    np.testing.assert_array_equal(drew_nothing[:, 0], drew_nothing[:, 1])
    assert 150 < drew_nothing[:, 0].sum() < 250


def test_the_baseline_learns_the_returns(model):
    loss = HardAttentionTraining(0.0)

    @jax.jit
    def step(model, key):
        def objective(m):
            sums, _ = loss.loss(m, None, BATCH, key)
            return 0.5 * sums["baseline_error"], sums["baseline_error"]

        (_, error), gradient = jax.value_and_grad(objective, has_aux=True)(model)
        return jax.tree.map(lambda x, g: x - 0.05 * g, model, gradient), error, gradient

    errors = []
    for n in range(60):
        model, error, gradient = step(model, jax.random.fold_in(jax.random.key(2), n))
        errors.append(float(error))
        # The baseline's gradient does not reach the translator.
        assert not np.asarray(gradient.query.kernel[...]).any()
        assert not np.asarray(gradient.cell.dense_h.kernel[...]).any()
    assert np.mean(errors[-10:]) < 0.5 * np.mean(errors[:5])


def test_returns_end_with_the_sentence():
    rewards = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0]])
    last = jnp.array([[False, False, True, False, False]])
    np.testing.assert_allclose(returns(rewards, last, 0.5)[0], [3.0, 4.0, 4.0, 16.0, 16.0])
    np.testing.assert_allclose(returns(rewards, last, 0.0), rewards)


def test_padding_does_not_change_the_loss(model):
    loss = HardAttentionTraining(0.1)
    longer = {
        "source": BATCH["source"],
        "target_in": jnp.pad(BATCH["target_in"], ((0, 0), (0, 3)), constant_values=PAD),
        "target_out": jnp.pad(BATCH["target_out"], ((0, 0), (0, 3)), constant_values=PAD),
    }
    sums, weights = loss.loss(model, None, longer, jax.random.key(0))
    assert float(weights["loss"]) == 2.0
    changed = longer | {"target_in": longer["target_in"].at[:, -3:].set(BATCH["target_in"][0, 1])}
    assert float(loss.loss(model, None, changed, jax.random.key(0))[0]["loss"]) == float(sums["loss"])


def test_the_most_probable_position_is_chosen_without_a_key(model):
    _, weights = forward(model, BATCH["source"], BATCH["target_in"], return_weights=True)
    _, soft_state = model._encode(BATCH["source"], None, None, None)
    memory, _ = model._encode(BATCH["source"], None, None, None)
    scores = jnp.tanh(model.query(soft_state[:, 0])[:, None] + memory.keys) @ model.direction[...]
    assert int(weights[0, 0, 0, 0].argmax()) == int(scores[0].argmax())


def test_presets():
    config = HardAttentionConfig.preset("tiny", 100)
    assert isinstance(config, HardAttentionConfig)
    assert config.hidden == 256


def test_the_loss_in_parts_is_the_same(model):
    """Three tokens in two parts, the last part padded; the positions are drawn before the parts are formed."""
    batch = {
        "source": jnp.array([[4, 5, 6], [5, 4, PAD]]),
        "target_in": jnp.array([[1, 5, 4], [1, 6, PAD]]),
        "target_out": jnp.array([[5, 4, END], [6, END, PAD]]),
    }
    gradients = []
    for parts in (1, 2):
        model.compute = ComputeOptions(loss_parts=parts)

        def objective(model):
            sums, weights = HardAttentionTraining(0.1).loss(model, None, batch, jax.random.key(0))
            return sums["loss"], (sums, weights)

        gradients.append(jax.jit(jax.grad(objective, has_aux=True))(model))
    for single, split in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(single, split, rtol=1e-4, atol=1e-6)
