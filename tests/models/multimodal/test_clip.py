"""CLIP and SigLIP: counts, the pooling of texts, every field, masks and inference forms."""

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
from transformer_jax.models.multimodal.clip import Clip, ClipConfig
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.multimodal.contrastive import limited

CONFIG = ClipConfig(
    image_size=12, patch_size=4, width=24, layers=2, heads=2, feed_forward=20, vocab_size=53, max_length=11,
    text_width=16, text_layers=3, text_heads=4, text_feed_forward=28, embedding_width=10,
)  # fmt: skip
SIGLIP = dict(
    pooling="attention", text_pooling="last", text_bias=True, image_projection=False, embedding_width=24,
    similarity="sigmoid",
)  # fmt: skip
CHANGES = {
    "image_size": 16, "patch_size": 6, "width": 32, "layers": 3, "heads": 4, "feed_forward": 36, "channels": 2,
    "patch_bias": False, "convolutions": 1, "pooling": "mean", "positions": "sinusoidal", "registers": 2,
    "distillation": True, "norm": "post", "input_norm": True, "final_norm": False, "layer_scale": 0.5,
    "gated": True, "activation": "quick_gelu", "norm_epsilon": 0.1, "pooler": True, "dtype": "bfloat16",
    "vocab_size": 60, "max_length": 13, "text_width": 32, "text_layers": 2, "text_heads": 2,
    "text_feed_forward": 12, "text_pooling": "last", "text_bias": True, "embedding_width": 12,
    "similarity": "sigmoid", "vocab_multiple": 64, "dropout": 0.5, "attention_dropout": 0.5,
    "stochastic_depth": 0.5, "text_dropout": 0.5,
}  # fmt: skip
# Fields that only matter with a head that CLIP lacks, or for images of another size.
NOT_HERE = {"classes", "distillation_head", "antialias", "image_projection"}


@functools.cache
def model_of(compute=ComputeOptions(), **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return jax.jit(lambda: Clip(config, rngs=nnx.Rngs(0), compute=compute))()


def inputs(rows=3, size=12, channels=3):
    rng = np.random.default_rng(1)
    images = jnp.asarray(rng.normal(size=(rows, size, size, channels)), jnp.float32)
    lengths = jnp.asarray([4, 11, 7, 5][:rows])
    tokens = jnp.asarray(rng.integers(0, 53, (rows, 11)), jnp.int32)
    return images, tokens, lengths


forward = jax.jit(lambda model, *arguments: model(*arguments))


@jax.jit
def vectors_of(model, images, tokens, lengths):
    return jnp.stack([model.embed_images(images), model.embed_texts(tokens, lengths)])


@pytest.mark.parametrize(
    ("preset", "count"), [("b32", 151_277_313), ("l14", 427_616_513), ("siglip_b16", 203_155_970)]
)
def test_counts_of_the_published_models(preset, count):
    config = ClipConfig.preset(preset)
    assert jax.eval_shape(lambda: Clip(config, rngs=nnx.Rngs(0))).parameter_count == count


def test_vectors_have_length_one_and_logits_are_their_products():
    images, tokens, lengths = inputs()
    for changes in ({}, SIGLIP):
        model = model_of(**changes)
        image_vectors, text_vectors = model.embed_images(images), model.embed_texts(tokens, lengths)
        for vectors in (image_vectors, text_vectors):
            np.testing.assert_allclose(jnp.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        scale, bias = (10.0, -10.0) if changes else (1 / 0.07, 0.0)
        expected = scale * np.asarray(image_vectors) @ np.asarray(text_vectors).T + bias
        np.testing.assert_allclose(forward(model, images, tokens, lengths), expected, atol=1e-4)


def test_a_text_is_represented_by_its_end_token():
    """CLIP's vector ignores what follows the end; SigLIP's encoder reads the padding too."""
    images, tokens, lengths = inputs()
    changed = tokens.at[0, 6].add(1)
    for changes, is_equal in (({}, True), (SIGLIP, False)):
        model = model_of(**changes)
        before, after = (forward(model, images, t, lengths) for t in (tokens, changed))
        assert bool((before[:, 0] == after[:, 0]).all()) == is_equal
        np.testing.assert_array_equal(before[:, 1:], after[:, 1:])
    earlier = forward(model_of(), images, tokens.at[0, 2].add(1), lengths)
    assert (earlier[:, 0] != forward(model_of(), images, tokens, lengths)[:, 0]).all()


def test_the_scale_is_limited_in_training_and_still_trained():
    assert limited(jnp.float32(150.0)) == 100
    assert limited(jnp.float32(20.0)) == 20
    assert jax.grad(limited)(jnp.float32(150.0)) == 1


def test_every_field_matters():
    def trace(**changes):
        config = dataclasses.replace(CONFIG, **changes)

        def init_and_apply(key):
            images, *texts = inputs(size=config.image_size, channels=config.channels)
            model = Clip(config, rngs=nnx.Rngs(key))
            vectors = model.embed_images(images, dropout_key=key), model.embed_texts(*texts, dropout_key=key)
            return model(images, *texts), vectors

        return trace_of(init_and_apply)

    assert unread_fields(trace, CHANGES) == []


def test_every_field_is_tested():
    assert CHANGES.keys() | NOT_HERE == {field.name for field in dataclasses.fields(ClipConfig)}


@pytest.mark.parametrize(
    "field",
    others_soak(
        ["dropout", "attention_dropout", "stochastic_depth", "text_dropout"], "stochastic_depth", "text_dropout"
    ),
)
def test_randomness_is_on_only_with_a_key(field):
    images, tokens, lengths = inputs()
    model = model_of(**{field: 0.5})

    def vectors(key):
        if field == "text_dropout":
            return model.embed_texts(tokens, lengths, dropout_key=key)
        return model.embed_images(images, dropout_key=key)

    np.testing.assert_array_equal(vectors(None), vectors(None))
    first, second = (vectors(jax.random.key(seed)) for seed in (0, 1))
    assert (first != second).any()
    assert (first != vectors(None)).any()


@pytest.mark.parametrize("changes", [{}, SIGLIP], ids=["clip", "siglip"])
def test_scan_unrolled_and_inference_forms_are_the_same(changes):
    expected = vectors_of(model_of(**changes), *inputs())
    for model in (model_of(ComputeOptions(unroll=8), **changes), model_of(**changes).for_inference()):
        np.testing.assert_allclose(vectors_of(model, *inputs()), expected, atol=2e-5)


@pytest.mark.parametrize("changes", [{}, SIGLIP], ids=["clip", "siglip"])
def test_parameters_match_one_rule_and_are_sharded(changes):
    model = model_of(**changes)
    for name, leaf in named_leaves(model).items():
        assert len(rule_of(name, model).axes) == leaf.ndim, name
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    with on_mesh(mesh):
        sharded = jax.device_put(model, model_shardings(model, mesh))
        vectors = vectors_of(sharded, *(jnp.concatenate([x, x[:1]]) for x in inputs()))
    np.testing.assert_allclose(vectors[:, :3], vectors_of(model, *inputs()), atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_heads": 3}, "text_width 16 must be a multiple of text_heads 3"),
        ({"text_pooling": "first"}, "text_pooling='first' is not one of end, last"),
        ({"similarity": "cosine"}, "similarity='cosine' is not one of softmax, sigmoid"),
        ({"image_projection": False}, "embedding_width 10 must be the width of image vectors, 24"),
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"text_dropout": 1.0}, "text_dropout=1.0 must be"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_texts_that_do_not_fit():
    _, tokens, lengths = inputs()
    with pytest.raises(ValueError, match="a text of 22 tokens is longer than the model's max_length 11"):
        model_of().embed_texts(jnp.tile(tokens, 2), lengths)
