"""The Transformer against PyTorch's Transformer with copied weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.models.translators.transformer import Transformer, TransformerConfig

torch = pytest.importorskip("torch", reason="parity needs torch, which is not a dependency")

pytestmark = [
    pytest.mark.long,
    # torch warns about its nested tensors
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]


def _copy_linear(linear, kernel, bias, inputs):
    kernel = np.array(kernel)
    linear.weight.data = torch.tensor(kernel.reshape(inputs, -1).T.copy())
    linear.bias.data = torch.tensor(np.array(bias).reshape(-1))


def _copy_attention(theirs, ours, layer, width):
    parts = [ours.query, ours.key, ours.value]
    kernels = [np.array(p.kernel[...][layer]).reshape(width, width).T for p in parts]
    biases = [np.array(p.bias[...][layer]).reshape(-1) for p in parts]
    theirs.in_proj_weight.data = torch.tensor(np.concatenate(kernels))
    theirs.in_proj_bias.data = torch.tensor(np.concatenate(biases))
    _copy_linear(theirs.out_proj, ours.output.kernel[...][layer], ours.output.bias[...][layer], width)


def _copy_norm(theirs, ours, layer=None):
    pick = (lambda x: np.array(x)) if layer is None else (lambda x: np.array(x[layer]))
    theirs.weight.data, theirs.bias.data = (torch.tensor(pick(x[...])) for x in (ours.scale, ours.bias))


@pytest.mark.parametrize(("norm", "activation"), [("post", "relu"), ("pre", "gelu")])
def test_logits_equal_torch_nn_transformer(norm, activation):
    D, F, V, H = 24, 19, 37, 6
    config = TransformerConfig(
        vocab_size=V, width=D, feed_forward=F, heads=H, kv_heads=H, encoder_layers=2, decoder_layers=3,
        dropout=0.0, norm=norm, activation=activation, attention_bias=True, norm_epsilon=1e-5,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    model = Transformer(config, rngs=nnx.Rngs(0))
    model = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32), model)
    theirs = torch.nn.Transformer(
        D, H, 2, 3, F, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre"
    ).eval()
    if norm == "post":  # torch ends each stack with one more norm, which the paper's model lacks
        theirs.encoder.norm = theirs.decoder.norm = None
    else:
        _copy_norm(theirs.encoder.norm, model.encoder_norm)
        _copy_norm(theirs.decoder.norm, model.decoder_norm)
    for i, layer in enumerate(theirs.encoder.layers):
        _copy_attention(layer.self_attn, model.encoder.self_attention, i, D)
        _copy_norm(layer.norm1, model.encoder.self_attention_norm, i)
        _copy_norm(layer.norm2, model.encoder.feed_forward_norm, i)
        for linear, ours in ((layer.linear1, "expand"), (layer.linear2, "contract")):
            part = getattr(model.encoder.feed_forward, ours)
            _copy_linear(linear, part.kernel[...][i], part.bias[...][i], part.kernel.shape[1])
    for i, layer in enumerate(theirs.decoder.layers):
        _copy_attention(layer.self_attn, model.decoder.self_attention, i, D)
        _copy_attention(layer.multihead_attn, model.decoder.cross_attention, i, D)
        _copy_norm(layer.norm1, model.decoder.self_attention_norm, i)
        _copy_norm(layer.norm2, model.decoder.cross_attention_norm, i)
        _copy_norm(layer.norm3, model.decoder.feed_forward_norm, i)
        for linear, ours in ((layer.linear1, "expand"), (layer.linear2, "contract")):
            part = getattr(model.decoder.feed_forward, ours)
            _copy_linear(linear, part.kernel[...][i], part.bias[...][i], part.kernel.shape[1])

    S, T = 7, 5
    source, target = rng.integers(0, V, (3, S)), rng.integers(0, V, (3, T))
    valid = np.arange(S) < np.array([7, 4, 2])[:, None]
    table = np.array(model.target_embedding.table.embedding[...][:V], np.float64)
    positions = np.arange(max(S, T))[:, None] / 10_000 ** (2 * (np.arange(D) // 2) / D)
    encoding = np.where(np.arange(D) % 2 == 0, np.sin(positions), np.cos(positions))

    def embed(tokens):
        return torch.tensor(table[tokens] * D**0.5 + encoding[: tokens.shape[1]], dtype=torch.float32)

    padded = torch.tensor(~valid)
    with torch.no_grad():
        hidden = theirs(
            embed(source), embed(target),
            tgt_mask=torch.triu(torch.ones(T, T, dtype=torch.bool), 1),
            src_key_padding_mask=padded, memory_key_padding_mask=padded,
        )  # fmt: skip
    expected = hidden.numpy().astype(np.float64) @ table.T
    logits = model(jnp.asarray(source), jnp.asarray(target), source_mask=jnp.asarray(valid))
    np.testing.assert_allclose(logits, expected, atol=2e-4 * np.abs(expected).max())
