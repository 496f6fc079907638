"""Longformer against `transformers` on PyTorch, read and written, and built from BERT and RoBERTa."""

import dataclasses
import json
import os
import random

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.pretrained.test_encoders import small_tokenizer
from tests.pretrained.test_parity import noisy
from transformer_jax import pretrained
from transformer_jax.errors import UserError
from transformer_jax.models.encoders.longformer import LongformerConfig, leaves_of_encoder
from transformer_jax.models.registry import MODELS
from transformer_jax.parameter_names import named_leaves, with_leaves
from transformer_jax.pretrained.families import FAMILIES

V, T = 97, 31
LENGTHS = (31, 9, 20)
ARCHITECTURES = [family.architecture for family in FAMILIES["longformer"]]


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    return pytest.importorskip("transformers", reason="parity needs transformers")


def random_config(transformers, architecture, draw):
    heads, layers = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    pad = draw.choice([0, 1, 3])
    positions = T + pad + 1 + draw.choice([0, 5])
    # The head of a masked LM has GELU whatever the config says.
    activation = "gelu" if "MaskedLM" in architecture else draw.choice(["gelu", "gelu_new", "relu"])
    config = transformers.LongformerConfig(
        vocab_size=V, hidden_size=heads * draw.choice([4, 8, 12]), num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=37, max_position_embeddings=positions,
        type_vocab_size=draw.choice([1, 2]), attention_window=draw.choice([4, 8, [6] * layers]),
        layer_norm_eps=draw.choice([1e-12, 1e-5, 1e-3]), pad_token_id=pad, sep_token_id=4,
        hidden_act=activation,
        **({"num_labels": draw.choice([1, 2, 5])} if "Classification" in architecture else {}),
    )  # fmt: skip
    config.architectures = [architecture]
    return config


def torch_outputs(model, tokens, types, mask, global_tokens):
    import torch

    inputs = dict(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask).long())
    if types is not None:
        inputs["token_type_ids"] = torch.tensor(types)
    if global_tokens is not None:
        marks = np.zeros(tokens.shape, np.int64)
        for row, positions in enumerate(global_tokens):
            marks[row, [n for n in positions if n >= 0]] = 1
        inputs["global_attention_mask"] = torch.tensor(marks)
    with torch.no_grad():
        output = model(**inputs)
    return [x.numpy() for x in output.to_tuple() if hasattr(x, "numpy")]


def jax_outputs(model, architecture, tokens, types, mask, global_tokens):
    output = model(
        jnp.asarray(tokens), types=None if types is None else jnp.asarray(types), mask=jnp.asarray(mask),
        global_tokens=None if global_tokens is None else jnp.asarray(global_tokens),
    )  # fmt: skip
    if architecture.endswith("QuestionAnswering"):
        return [output[..., 0], output[..., 1]]
    if architecture.endswith("Model"):
        return [output, model.pooled(output[:, 0])]
    return [output]


def check_close(outputs, references, mask, **tolerance):
    assert len(outputs) == len(references)
    for output, reference in zip(outputs, references, strict=True):
        output = np.asarray(output)
        if reference.ndim > 1 and reference.shape[:2] == mask.shape:
            output, reference = output[mask], reference[mask]
        np.testing.assert_allclose(output, reference, **tolerance)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("TRANSFORMER_JAX_RANDOM_CONFIGS", "1"))))
@pytest.mark.parametrize("architecture", others_soak(ARCHITECTURES, *ARCHITECTURES[:2]))
def test_random_configs_in_both_directions(transformers, architecture, seed, tmp_path):
    """Rows have padding, other lengths, and global tokens that differ between rows in place and number."""
    draw, rng = random.Random(f"{architecture} {seed}"), np.random.default_rng(seed)
    config = random_config(transformers, architecture, draw)
    torch_model = noisy(getattr(transformers, architecture)(config))
    torch_model.save_pretrained(tmp_path / "theirs")
    pad = config.pad_token_id
    small_tokenizer(pad=pad).save(tmp_path / "theirs/tokenizer.json")
    mask = np.arange(T) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, rng.integers(7, V, mask.shape), pad)
    tokens[:, [3, 4, 8]] = 4  # the three separators that a question needs
    types = (np.arange(T) >= 5).astype(int) * mask if config.type_vocab_size > 1 else None
    model, processor = pretrained.load(tmp_path / "theirs")
    reloaded = None
    for global_tokens in (None, np.array([[0, 17, 30], [2, -1, -1], [-1, 19, 5]])):
        inputs = tokens, types, mask, global_tokens
        expected = torch_outputs(torch_model, *inputs)
        check_close(jax_outputs(model, architecture, *inputs), expected, mask, atol=1e-4)
        if reloaded is None:
            pretrained.save(tmp_path / "ours", model, processor)
            reloaded, report = getattr(transformers, architecture).from_pretrained(
                tmp_path / "ours", output_loading_info=True
            )
            assert not report["missing_keys"]
            assert not report["unexpected_keys"]
        check_close(torch_outputs(reloaded.eval(), *inputs), expected, mask, atol=1e-6)
    reread, _ = pretrained.load(tmp_path / "ours")
    assert reread.config == dataclasses.replace(model.config, window=model.config.window)
    for path, leaf in named_leaves(model).items():
        np.testing.assert_array_equal(leaf, named_leaves(reread)[path], err_msg=path)


@pytest.mark.long
def test_windows_that_differ_between_layers_are_refused(transformers, tmp_path):
    config = random_config(transformers, "LongformerModel", random.Random(0))
    config.num_hidden_layers, config.attention_window = 2, [4, 8]
    transformers.LongformerModel(config).save_pretrained(tmp_path)
    small_tokenizer(pad=config.pad_token_id).save(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="attention_window is 4, 8: only one window for all layers"):
        pretrained.load(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"attention_window": [5, 5]}))
    with pytest.raises(UserError, match="window=5 must be an even number"):
        pretrained.load(tmp_path)


SIZES = dict(vocab_size=V, width=24, layers=2, heads=3, feed_forward=37, classes=5)


def build(name, kind, **changes):
    """Return (BERT or RoBERTa, the Longformer that is built from it)."""
    entry = MODELS[kind][name]
    old = entry.module(entry.config(**(SIZES | {"max_length": 7})), rngs=nnx.Rngs(0))
    config = LongformerConfig.of_encoder(old.config, **changes)
    module = MODELS[kind]["longformer"].module
    new = module(config, rngs=nnx.Rngs(1))
    leaves = leaves_of_encoder(named_leaves(old), old.config, config, named_leaves(new).keys())
    return old, with_leaves(new, {name: jnp.asarray(leaf) for name, leaf in leaves.items()})


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("kind", ["masked_lm", "sequence_classifier", "token_classifier", "span_predictor"])
def test_a_longformer_of_an_encoder_computes_the_same_for_short_texts(name, kind):
    """With a window over the complete text, and before training, global attention equals the local one."""
    old, new = build(name, kind, window=16, max_length=17)
    tokens = jnp.asarray(np.random.default_rng(0).integers(5, V, (2, 7)))
    mask = jnp.array([7, 4])
    expected = old(tokens, mask=mask)
    for global_tokens in (None, jnp.array([[0, 3], [-1, 2]])):
        output = new(tokens, mask=mask, global_tokens=global_tokens)
        rows = [slice(0, 7), slice(0, 4)]
        for row, part in enumerate(rows):
            part = part if expected.ndim == 3 else slice(None)
            np.testing.assert_allclose(output[row][part], expected[row][part], atol=2e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_positions_are_copied_until_the_table_is_full(name):
    old, new = build(name, "masked_lm", window=4, max_length=17)
    table = np.asarray(old.encoder.embeddings.positions.table.embedding[...])[old.config.position_offset :]
    copied = np.asarray(new.encoder.embeddings.positions.table.embedding[...])[new.config.position_offset :]
    np.testing.assert_array_equal(copied, table[[0, *(1 + n % 6 for n in range(16))]])
    attention = new.encoder.blocks.self_attention
    for part in ("query", "key", "value"):
        np.testing.assert_array_equal(
            getattr(attention, f"global_{part}").kernel[...], getattr(attention, part).kernel[...]
        )
