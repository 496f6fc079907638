import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.battery import TranslatorBattery
from transformer_jax.distributed.sharding import rule_of
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.parameter_names import named_leaves

CONFIG = TransformerConfig(
    vocab_size=37, width=48, feed_forward=61, heads=6, kv_heads=3, encoder_layers=2, decoder_layers=3,
    dropout=0.1, max_length=23,
)  # fmt: skip

CHANGES = dict(
    vocab_size=41, width=60, feed_forward=59, heads=3, kv_heads=6, encoder_layers=3, decoder_layers=2,
    dropout=0.2, max_length=6, norm="pre", positions="learned", activation="gelu", tie="none",
    attention_bias=True, embedding_scale=False, norm_epsilon=1e-2, dtype="bfloat16", vocab_multiple=7,
)  # fmt: skip


class TestTransformer(TranslatorBattery):
    module = Transformer
    config = CONFIG
    changes = CHANGES


@pytest.mark.soak
class TestPreNorm(TranslatorBattery):
    module = Transformer
    config = dataclasses.replace(CONFIG, norm="pre", tie="none", attention_bias=True, positions="learned")
    changes = CHANGES | dict(norm="post", tie="decoder", attention_bias=False, positions="sinusoidal")


def abstract(config):
    return jax.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("name", "published", "difference"), [("base", 65_000_000, -1_954_368), ("big", 213_000_000, 1_171_648)]
)
def test_parameter_counts_against_the_paper(name, published, difference):
    """Table 3 of the paper lists 65 M and 213 M, rounded, without a breakdown.

    Counted from its formulas (no biases in the attention, one shared matrix for embeddings and logits,
    a vocabulary of "about 37000"), base has 63.05 M, 3.0 % fewer, and big has 214.17 M, 0.6 % more. One
    vocabulary cannot explain both: 65 M would need 40,817 entries and 213 M 35,786; nor can two, because
    section 3.4 describes one shared matrix. The formulas are the paper's, so its figures must count something
    else.
    """
    config = TransformerConfig.preset(name, 37_000)
    D, F, L, V = config.width, config.feed_forward, config.encoder_layers, 37_000
    feed_forward = 2 * D * F + F + D
    norm = 2 * D
    encoder = L * (4 * D * D + feed_forward + 2 * norm)
    decoder = L * (8 * D * D + feed_forward + 3 * norm)
    count = abstract(config).parameter_count
    assert count == V * D + encoder + decoder
    assert count - published == difference


def test_presets_are_the_papers():
    base, big = TransformerConfig.preset("base", 100), TransformerConfig.preset("big", 100)
    assert (base.encoder_layers, base.decoder_layers, base.width, base.feed_forward, base.heads) == (
        6, 6, 512, 2048, 8,
    )  # fmt: skip
    assert (big.encoder_layers, big.decoder_layers, big.width, big.feed_forward, big.heads) == (
        6, 6, 1024, 4096, 16,
    )  # fmt: skip
    assert (base.norm, base.tie, base.positions, base.dropout, big.dropout) == (
        "post", "all", "sinusoidal", 0.1, 0.3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="unknown preset 'huge': choose one of"):
        TransformerConfig.preset("huge", 100)


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
@pytest.mark.parametrize("name", TransformerConfig.presets)
def test_every_parameter_matches_one_rule_of_its_rank(name, tie):
    config = TransformerConfig.preset(name, 100, tie=tie, positions="learned", norm="pre", attention_bias=True)
    for parameter, leaf in named_leaves(abstract(config)).items():
        assert len(rule_of(parameter).axes) == leaf.ndim, parameter


def test_tying_shares_the_matrix():
    def tables(tie):
        names = named_leaves(abstract(dataclasses.replace(CONFIG, tie=tie)))
        return sorted(n for n in names if "embedding" in n)

    assert tables("all") == ["target_embedding/table/embedding"]
    assert tables("decoder") == ["source_embedding/table/embedding", "target_embedding/table/embedding"]
    assert "unembedding/kernel" in tables("none")


def test_the_vocabulary_is_padded_inside_only():
    for tie in ("all", "none"):
        small = Transformer(dataclasses.replace(CONFIG, tie=tie, vocab_multiple=1), rngs=nnx.Rngs(0))
        padded = Transformer(dataclasses.replace(CONFIG, tie=tie), rngs=nnx.Rngs(0))
        assert padded.target_embedding.table.embedding.shape[0] == 128
        assert padded.parameter_count == small.parameter_count
        source, target = jnp.array([[3, 4, 5]]), jnp.array([[1, 6]])
        if tie == "all":
            np.testing.assert_allclose(padded(source, target), small(source, target), atol=1e-5)
        assert padded(source, target).shape == (1, 2, 37)


def test_initial_values_are_the_documented_ones():
    model = Transformer(TransformerConfig.preset("small", 5000), rngs=nnx.Rngs(0))
    leaves = named_leaves(model)
    assert abs(np.std(leaves["target_embedding/table/embedding"][:5000]) - 256**-0.5) < 1e-3
    assert (leaves["target_embedding/table/embedding"][5000:] == 0).all()
    kernel = np.asarray(leaves["encoder/feed_forward/expand/kernel"])
    assert abs(np.abs(kernel).max() - math.sqrt(6 / (256 + 1024))) < 1e-3
    query = np.asarray(leaves["decoder/cross_attention/query/kernel"])
    assert abs(np.abs(query).max() - math.sqrt(6 / 512)) < 1e-3
    assert not np.array_equal(query[0], query[1]), "layers start alike"


def test_one_batch_is_overfitted():
    import optax

    model = Transformer(dataclasses.replace(CONFIG, dropout=0.0, norm="pre"), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    source = jnp.asarray(rng.integers(3, 37, (4, 6)))
    target = jnp.asarray(rng.integers(3, 37, (4, 6)))
    inputs = jnp.pad(target, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(model, state):
        def loss(model):
            logits = model(source, inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()

        value, gradient = jax.value_and_grad(loss)(model)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(model, updates), state, value

    state = optimizer.init(model)
    for _ in range(300):
        model, state, value = step(model, state)
    assert value < 0.01


@pytest.mark.parametrize("field", ["norm", "positions", "activation", "tie", "dtype"])
def test_unknown_choices_are_named(field):
    with pytest.raises(ValueError, match=f"{field}='nonsense' is not one of"):
        dataclasses.replace(CONFIG, **{field: "nonsense"})
