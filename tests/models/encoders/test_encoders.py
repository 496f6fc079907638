"""The text encoders with each task's head: properties that all of them have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.models.traces import trace_of, unread_fields
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.sharding import model_shardings, rule_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.encoders.electra import ElectraConfig, ElectraPretraining
from transformer_jax.models.registry import MODELS
from transformer_jax.parameter_names import named_leaves

V, B, T = 53, 3, 13
LENGTHS = (13, 5, 8)
SIZES = dict(vocab_size=V, width=24, layers=2, heads=4, feed_forward=37, max_length=17, classes=5)
KINDS = ("encoder", "masked_lm", "sequence_classifier", "token_classifier", "span_predictor", "replaced_token",
         "discriminator")  # fmt: skip
CASES = [(kind, name) for kind in KINDS for name in MODELS[kind]]
NAMES = list(MODELS["encoder"])
# Every head of one encoder, and one head of every encoder; the others run with `--soak`.
CORNERS = others_soak(
    CASES, *((kind, "bert") for kind in KINDS if "bert" in MODELS[kind]),
    *(("sequence_classifier", name) for name in NAMES), ("replaced_token", "electra"),
    ("discriminator", "electra"),
)  # fmt: skip
# One encoder with full attention and one with a window.
FULL_AND_WINDOWED = others_soak(NAMES, "bert", "longformer")


def config_of(kind, name, **changes):
    config = MODELS[kind][name].config
    extra = {"embedding_width": 16} if name == "electra" else {}
    return config(**(SIZES | extra | changes))


@functools.cache
def model_of(kind, name, compute=ComputeOptions(), **changes):
    config = config_of(kind, name, **dict(changes))
    return jax.jit(lambda: MODELS[kind][name].module(config, rngs=nnx.Rngs(0), compute=compute))()


@functools.partial(jax.jit, static_argnames="return_weights")
def forward(model, tokens, **arguments):
    return model(tokens, **arguments)


def inputs(name):
    rng = np.random.default_rng(1)
    mask = np.arange(T) < np.array(LENGTHS)[:, None]
    tokens = jnp.asarray(rng.integers(5, V, (B, T)))
    types = jnp.asarray(rng.integers(0, 2, (B, T))) if name in ("bert", "electra") else None
    return tokens, types, jnp.asarray(mask)


def is_per_token(output):
    return output.ndim >= 2 and output.shape[1] == T


@pytest.mark.parametrize(("kind", "name"), CORNERS)
def test_padding_changes_nothing(kind, name):
    model, (tokens, types, mask) = model_of(kind, name), inputs(name)
    changed = jnp.where(mask, tokens, (tokens + 3) % V)
    before, after = (forward(model, t, types=types, mask=mask) for t in (tokens, changed))
    if is_per_token(before):
        before, after = before[np.asarray(mask)], after[np.asarray(mask)]
    np.testing.assert_array_equal(before, after)
    unpadded = forward(model, tokens[1:2, :5], types=None if types is None else types[1:2, :5])
    expected = forward(model, tokens, types=types, mask=mask)[1:2]
    expected = expected[:, :5] if is_per_token(expected) else expected
    np.testing.assert_allclose(unpadded, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "name", "field"),
    others_soak(
        [
            *(("sequence_classifier", name, "classifier_dropout") for name in NAMES[:3]),
            ("token_classifier", "bert", "classifier_dropout"),
            ("sequence_classifier", "distilbert", "classifier_dropout"),
            ("token_classifier", "distilbert", "dropout"),
            ("span_predictor", "distilbert", "reader_dropout"),
        ],
        ("token_classifier", "bert", "classifier_dropout"),
        ("token_classifier", "distilbert", "dropout"),
        ("span_predictor", "distilbert", "reader_dropout"),
    ),
)
def test_dropout_before_a_head(kind, name, field):
    """A head uses its own rate if it has one, else `dropout`, as published; the encoder is not affected."""
    tokens, types, mask = inputs(name)
    key = jax.random.key(0)

    def output(dropout_key, **rates):
        model = model_of(kind, name, **({"dropout": 0.0, "attention_dropout": 0.0} | rates))
        return forward(model, tokens, types=types, mask=mask, dropout_key=dropout_key)

    expected = output(None)
    np.testing.assert_array_equal(output(key), expected)
    if field == "dropout":  # DistilBERT's `classifier_dropout` does not apply to tags
        np.testing.assert_array_equal(output(key, classifier_dropout=0.9), expected)
    else:
        assert jnp.abs(output(key, **{field: 0.9}) - expected).max() > 0.01
    if kind != "sequence_classifier":
        model = model_of(kind, name, **({"dropout": 0.0, "attention_dropout": 0.0} | {field: 0.5}))
        dropped = model._apply_dropout(jnp.ones((64, 64)), key)
        assert 0.4 < (dropped == 0).mean() < 0.6


@pytest.mark.parametrize("name", FULL_AND_WINDOWED)
def test_packed_rows_equal_single_texts(name):
    model, (tokens, types, _) = model_of("masked_lm", name), inputs(name)
    segments = jnp.array([[1] * 5 + [2] * 6 + [0] * 2])
    row = forward(model, tokens[:1], types=None if types is None else types[:1], segments=segments)
    for first, last in ((0, 5), (5, 11)):
        text_types = None if types is None else types[:1, first:last]
        expected = forward(model, tokens[:1, first:last], types=text_types)
        np.testing.assert_allclose(row[:, first:last], expected, atol=2e-5)
    with pytest.raises(ValueError, match="omit mask"):
        model(tokens[:1], segments=segments, mask=jnp.ones((1, T), bool))


@pytest.mark.parametrize("name", FULL_AND_WINDOWED)
def test_attention_is_bidirectional(name):
    """The state of every token depends on the first and on the last token."""
    model, (tokens, _, _) = model_of("encoder", name), inputs(name)
    for position in (0, T - 1):
        changed = tokens.at[0, position].set((tokens[0, position] + 1) % V)
        before, after = forward(model, tokens), forward(model, changed)
        assert (np.abs(before - after)[0].max(axis=-1) > 0).all()
        np.testing.assert_array_equal(before[1:], after[1:])


CHANGES = dict(width=32, layers=3, heads=8, feed_forward=41, max_length=19, activation="relu", norm_epsilon=0.1,
               vocab_size=200, classes=7, dtype="bfloat16", vocab_multiple=64, token_types=3,
               padding_id=2, embedding_width=24, generator_size=0.5, initial_values="neighbours",
               classifier_pooling="mean", window=4, global_tokens=3, separator_id=7)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_config_matters(name):
    """A change affects the initial values or the output of a task's model that reads the field."""
    tokens, _, mask = inputs(name)
    config = config_of("masked_lm", name)
    # The masked language model reads most fields.
    read_by = dict.fromkeys(("reader_dropout", "separator_id", "global_tokens"), "span_predictor")
    heads = ("classifier_dropout", "classifier_pooling", "classes", "pooler", "token_types")
    read_by |= dict.fromkeys(heads, "sequence_classifier")
    read_by |= {"generator_size": "replaced_token"}

    def trace(kind, **changes):
        def init_and_apply(key):
            model = MODELS[kind][name].module(dataclasses.replace(config, **changes), rngs=nnx.Rngs(key))
            return model(tokens, mask=mask, dropout_key=key)

        return trace_of(init_and_apply)

    fields = [field.name for field in dataclasses.fields(config)]
    changes = {n: not config.pooler if n == "pooler" else CHANGES.get(n, 0.5) for n in fields}
    for kind in {"masked_lm", *map(read_by.get, fields)} - {None}:
        read = {n: value for n, value in changes.items() if read_by.get(n, "masked_lm") == kind}
        assert unread_fields(functools.partial(trace, kind), read) == [], kind


def test_bert_without_a_pooler_cannot_classify_from_the_first_token():
    model = model_of("sequence_classifier", "bert", pooler=False)
    with pytest.raises(ValueError, match="no pooler"):
        model(inputs("bert")[0])


REDUCTIONS = {"first": lambda x: x[0], "mean": lambda x: x.mean(axis=0), "max": lambda x: x.max(axis=0)}
DENSE = {
    "bert": np.tanh,
    "roberta": np.tanh,
    "electra": functools.partial(jax.nn.gelu, approximate=False),
    "distilbert": jax.nn.relu,
    "longformer": np.tanh,
}


@pytest.mark.parametrize(
    ("name", "changes", "pooling"),
    [
        *((name, {}, "first") for name in NAMES),
        ("electra", {}, "mean"), ("longformer", {}, "mean"), ("distilbert", {}, "max"),
        *(("bert", {"pooler": False}, pooling) for pooling in ("mean", "max")),
    ],
)  # fmt: skip
def test_classifier_equals_the_formula(name, changes, pooling):
    """Compute the head in NumPy from the states of the real tokens."""
    model = model_of("sequence_classifier", name, classifier_pooling=pooling, **changes)
    tokens, types, mask = inputs(name)
    marks = {"global_tokens": jnp.zeros((B, 1), jnp.int32)} if name == "longformer" else {}
    states = np.asarray(forward(model.encoder, tokens, types=types, mask=mask, **marks))
    vectors = np.stack([REDUCTIONS[pooling](x[:n]) for x, n in zip(states, LENGTHS, strict=True)])
    dense = model.encoder.pooler if name == "bert" else model.pooling
    if dense is not None:
        vectors = np.asarray(DENSE[name](vectors @ dense.kernel[...] + dense.bias[...]))
    expected = vectors @ model.head.kernel[...] + model.head.bias[...]
    logits = forward(model, tokens, types=types, mask=mask)
    np.testing.assert_allclose(logits, expected, atol=2e-6)
    with_lengths = forward(model, tokens, types=types, mask=jnp.array(LENGTHS))
    np.testing.assert_array_equal(with_lengths, logits)
    (with_segments,) = forward(model, tokens[1:2], types=None if types is None else types[1:2],
                               segments=mask[1:2].astype(jnp.int32))  # fmt: skip
    np.testing.assert_allclose(with_segments, logits[1], atol=2e-6)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_parameter_has_one_rule(kind, name):
    config = config_of(kind, name)
    model = jax.eval_shape(lambda: MODELS[kind][name].module(config, rngs=nnx.Rngs(0)))
    for path, leaf in named_leaves(model).items():
        assert len(rule_of(path, model).axes) == leaf.ndim, path


@pytest.mark.soak
def test_compute_options_change_no_result():
    """Unrolling, rematerialization and chunking give the same loss and gradient with dropout."""
    name = "bert"
    tokens, types, mask = inputs(name)

    def loss_and_gradient(compute):
        model = model_of("masked_lm", name, compute)

        def loss(model):
            logits = model(tokens, types=types, mask=mask, dropout_key=jax.random.key(3))
            return jnp.square(jnp.where(mask[..., None], logits, 0)).mean()

        return jax.jit(jax.value_and_grad(loss))(model)

    expected, expected_gradient = loss_and_gradient(ComputeOptions())
    for compute in (ComputeOptions(unroll=2, remat="elementwise"), ComputeOptions(remat="blocks")):
        value, gradient = loss_and_gradient(compute)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for path, leaf in named_leaves(gradient).items():
            np.testing.assert_allclose(leaf, named_leaves(expected_gradient)[path], atol=1e-5, err_msg=path)
    plain, chunked = (
        forward(model_of("masked_lm", name, ComputeOptions(attention=form)), tokens, types=types, mask=mask)
        for form in ("plain", "chunked")
    )
    np.testing.assert_allclose(plain[np.asarray(mask)], chunked[np.asarray(mask)], atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "name"),
    others_soak(
        CASES, ("masked_lm", "bert"), ("sequence_classifier", "longformer"), ("discriminator", "electra")
    ),
)
def test_the_copy_for_inference_computes_the_same(kind, name):
    if kind == "replaced_token":
        pytest.skip("generator and discriminator are trained together but used separately")
    model, (tokens, types, mask) = model_of(kind, name), inputs(name)
    before, after = (forward(m, tokens, types=types, mask=mask) for m in (model, model.for_inference()))
    np.testing.assert_allclose(before, after, atol=2e-5)


def test_attention_weights_are_returned():
    tokens, types, mask = inputs("bert")
    _, weights = forward(model_of("encoder", "bert"), tokens, types=types, mask=mask, return_weights=True)
    assert weights.shape == (B, 2, 4, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (np.asarray(weights)[1, :, :, :, 5:] == 0).all()


def test_dropout_of_weights_keeps_their_mean():
    """The mean over many draws is the value without dropout, and a single draw differs from it."""
    from transformer_jax.layers.attention.dispatch import dot_product_attention

    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 3))
    plain = dot_product_attention(query, key, value)
    draws = jax.vmap(lambda k: dot_product_attention(query, key, value, weight_dropout=0.3, dropout_key=k))(
        jax.random.split(jax.random.key(1), 4_000)
    )
    assert np.abs(draws[0] - plain).max() > 0.01
    np.testing.assert_allclose(draws.mean(axis=0), plain, atol=0.06)


def test_electra_shares_its_embeddings():
    """The generator has no embeddings, and the gradient of its loss reaches the discriminator's embeddings."""
    config = ElectraConfig(**{k: v for k, v in SIZES.items() if k != "classes"}, embedding_width=16)
    model = jax.jit(lambda: ElectraPretraining(config, rngs=nnx.Rngs(0)))()
    names = named_leaves(model)
    assert not [name for name in names if name.startswith("generator/encoder/embeddings")]
    assert names["generator/encoder/projection/kernel"].shape == (16, 6)

    def loss(model):
        return model.generated(inputs("electra")[0], jnp.array([[1, 2]] * B)).std()

    gradient = named_leaves(jax.jit(jax.grad(loss))(model))
    assert np.abs(gradient["discriminator/encoder/embeddings/tokens/table/embedding"]).max() > 0
    assert np.abs(gradient["discriminator/encoder/embeddings/norm/scale"]).max() > 0
    assert not np.abs(gradient["discriminator/head/kernel"]).max()
    with pytest.raises(ValueError, match="must be an integer that divides"):
        dataclasses.replace(config, generator_size=0.3)


@pytest.mark.parametrize("name", FULL_AND_WINDOWED)
def test_eight_devices_equal_one(name):
    tokens, _, mask = inputs(name)
    tokens, mask = (jnp.resize(x, (8, T)) for x in (tokens, mask))
    model = model_of("masked_lm", name)
    expected = forward(model, tokens, mask=mask)
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    with on_mesh(mesh):
        sharded = jax.device_put(model, model_shardings(model, mesh))
        logits = forward(sharded, tokens, mask=mask)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
