"""Initial values that make an encoder's heads attend to neighboring tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.models.encoders.bert import BertConfig, BertMaskedLM
from transformer_jax.models.encoders.electra import ElectraConfig, ElectraPretraining

SIZES = dict(vocab_size=500, layers=2, max_length=40, initial_values="neighbours")
OFFSETS = (-1, 1, -2, 2)


def test_each_head_attends_to_its_neighbour():
    model = BertMaskedLM(BertConfig(width=256, heads=4, feed_forward=96, **SIZES), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 40), 0, 500)
    _, weights = jax.jit(lambda m, t: m(t, return_weights=True))(model, tokens)
    first_layer = np.asarray(weights)[:, 0]
    for head, offset in enumerate(OFFSETS):
        inner = first_layer[:, head, 2:-2]
        at_offset = np.stack([inner[:, i - 2, i + offset] for i in range(2, 38)], axis=1)
        assert at_offset.mean() > 0.3
        assert (inner.argmax(-1) == np.arange(2, 38) + offset).mean() > 0.7


def test_heads_take_the_offsets_in_turn_over_the_layers():
    # A generator of one head: each layer has another offset.
    config = ElectraConfig(width=256, heads=4, feed_forward=96, embedding_width=256, **SIZES)
    model = ElectraPretraining(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 40), 0, 500)
    _, weights = jax.jit(
        lambda m, t: m.generator.encoder.hidden_states(t, embeddings=m.embeddings, return_weights=True)
    )(model, tokens)
    for layer, offset in enumerate(OFFSETS[:2]):
        inner = np.asarray(weights)[:, layer, 0, 2:-2]
        means = {o: np.mean([inner[:, i - 2, i + o] for i in range(2, 38)]) for o in range(-2, 3)}
        # Deeper states are mixtures of neighbours, whose positions are less distinct.
        assert max(means, key=means.get) == offset
        assert means[offset] > (0.3, 0.08)[layer]


def test_a_discriminator_starts_with_the_share_of_replaced_tokens():
    config = ElectraConfig(width=64, heads=4, feed_forward=96, embedding_width=64, **SIZES)
    model = ElectraPretraining(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 40), 0, 500)
    replaced = jax.nn.sigmoid(jax.jit(lambda m, t: m.replaced(t))(model, tokens))
    assert 0.1 < float(replaced.mean()) < 0.17


@pytest.mark.parametrize("width", [64, 24])
def test_heads_copy_the_values_that_they_read(width):
    config = BertConfig(width=width, heads=4, feed_forward=96, **SIZES)
    attention = BertMaskedLM(config, rngs=nnx.Rngs(0)).encoder.blocks.self_attention
    value, output = attention.value.kernel[...], attention.output.kernel[...]
    product = jnp.einsum("ldhk,lhke->lde", value, output)
    # Each factor contains two random terms with standard deviation 0.02.
    np.testing.assert_allclose(product, jnp.broadcast_to(jnp.eye(width), product.shape), atol=0.15)


def test_neighbours_alone_change_the_initial_values():
    plain, changed = (
        BertMaskedLM(
            BertConfig(width=64, heads=4, feed_forward=96, **(SIZES | {"initial_values": kind})),
            rngs=nnx.Rngs(0),
        )
        for kind in ("normal", "neighbours")
    )
    same = plain.encoder.blocks.feed_forward, changed.encoder.blocks.feed_forward
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.state, same))
    assert float(jnp.abs(plain.encoder.blocks.self_attention.query.kernel[...]).max()) < 0.2
    with pytest.raises(ValueError, match="initial_values"):
        BertConfig(width=64, heads=4, feed_forward=96, **(SIZES | {"initial_values": "zeros"}))
