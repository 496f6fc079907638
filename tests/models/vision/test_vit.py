"""Vision transformers: the papers' parameter counts, positions, tokens, and properties of every image model."""

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
from transformer_jax.layers.patches import cut_into_patches, join_patches
from transformer_jax.layers.positions.images import cubic_resize_matrix, resize_grid, sinusoidal_grid
from transformer_jax.models.vision.dino import Dino, DinoConfig
from transformer_jax.models.vision.masked_autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from transformer_jax.models.vision.vit import ViT, ViTClassifier, ViTConfig
from transformer_jax.parameter_names import named_leaves

SIZES = dict(image_size=12, patch_size=4, width=24, layers=2, heads=3, feed_forward=37, classes=5)


def model_of(config=None, compute=ComputeOptions(), **changes):
    config = ViTConfig(**(SIZES | changes)) if config is None else config
    return jax.jit(lambda: ViTClassifier(config, rngs=nnx.Rngs(0), compute=compute))()


def pictures(rows=3, height=12, width=12):
    return jax.random.normal(jax.random.key(1), (rows, height, width, 3))


# Table 1 of Touvron et al. 2021 (Ti, S) and of Dosovitskiy et al. 2021, as published with heads of 1,000
# classes; and table 1 of Hassani et al. 2021 to its two digits.
COUNTS = {"ti16": 5_717_416, "s16": 22_050_664, "b16": 86_567_656, "b32": 88_224_232, "l16": 304_326_632,
          "h14": 632_045_800}  # fmt: skip
COMPACT = {"cct_2_3x2": 0.28, "cct_4_3x2": 0.48, "cct_7_3x1": 3.76, "lite_6_4": 3.19}


@pytest.mark.parametrize(("preset", "count"), COUNTS.items())
def test_counts_of_the_papers(preset, count):
    config = ViTConfig.preset(preset, classes=1_000)
    assert jax.eval_shape(lambda: ViTClassifier(config, rngs=nnx.Rngs(0))).parameter_count == count


@pytest.mark.parametrize(("preset", "millions"), COMPACT.items())
def test_counts_of_compact_models(preset, millions):
    config = ViTConfig.preset(preset, classes=10)
    count = jax.eval_shape(lambda: ViTClassifier(config, rngs=nnx.Rngs(0))).parameter_count
    assert abs(count / 1e6 - millions) < 0.01


def test_a_compact_model_of_six_layers_has_one_layer_less_than_one_of_seven():
    def count(name):
        config = ViTConfig.preset(name, classes=10)
        return jax.eval_shape(lambda: ViTClassifier(config, rngs=nnx.Rngs(0))).parameter_count

    six, seven = count("cct_6_3x1"), count("cct_7_3x1")
    assert seven - six == 8 * 256**2 + 11 * 256  # four projections, two products of 2 D, biases and two norms


@pytest.mark.parametrize(
    ("preset", "width", "layers", "patch"), [("ti4", 192, 12, 4), ("s4", 384, 12, 4), ("mini", 64, 4, 2)]
)
def test_counts_of_small_sizes(preset, width, layers, patch):
    config = ViTConfig.preset(preset, classes=10)
    block = 12 * width**2 + 13 * width  # four projections, two products of 4 D, biases and two norms
    tokens = (config.image_size // patch) ** 2 + 1
    embedded = (3 * patch**2 + 1) * width + width + tokens * width
    expected = layers * block + embedded + 2 * width + 10 * (width + 1)
    assert jax.eval_shape(lambda: ViTClassifier(config, rngs=nnx.Rngs(0))).parameter_count == expected


def test_patches_are_cut_row_by_row():
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    patches = np.asarray(cut_into_patches(jnp.asarray(images), 2))
    assert patches.shape == (2, 6, 12)
    np.testing.assert_array_equal(patches[1, 4], images[1, 2:4, 2:4].reshape(-1))
    np.testing.assert_array_equal(join_patches(jnp.asarray(patches), 2, 2), images)
    with pytest.raises(ValueError, match="patches of 5 pixels do not divide images of 4 x 6"):
        cut_into_patches(jnp.asarray(images), 5)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize(("old", "new"), [(7, 3), (7, 7), (5, 11)])
def test_resized_rows_keep_constants_and_ramps(antialias, old, new):
    """Cubic convolution is exact for constants and, with a = -0.5, for straight lines inside the borders."""
    matrix = cubic_resize_matrix(old, new, antialias=antialias)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-6)
    if old == new:
        np.testing.assert_allclose(matrix, np.eye(old), atol=1e-6)
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    if antialias and old <= new:  # the wider kernel of a smaller grid has no row inside both borders
        inside = (centres >= 1) & (centres <= old - 2)
        assert inside.any()
        np.testing.assert_allclose((matrix @ np.arange(old))[inside], centres[inside], atol=1e-5)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("new", [(3, 4), (7, 7), (14, 9)])
def test_resized_grid_equals_torch(antialias, new):
    torch = pytest.importorskip("torch", reason="parity needs torch")
    grid = np.random.default_rng(0).normal(size=(1, 5, 7, 7)).astype(np.float32)
    expected = torch.nn.functional.interpolate(
        torch.tensor(grid), size=new, mode="bicubic", align_corners=False, antialias=antialias
    )
    resized = resize_grid(
        jnp.asarray(grid[0].transpose(1, 2, 0).reshape(49, 5)), (7, 7), new, antialias=antialias
    )
    np.testing.assert_allclose(resized, expected[0].permute(1, 2, 0).reshape(-1, 5).numpy(), atol=1e-5)


def test_sinusoidal_grid_knows_rows_and_columns():
    grid = np.asarray(sinusoidal_grid(3, 5, 8)).reshape(3, 5, 8)
    np.testing.assert_array_equal(grid[1, :, :4], np.broadcast_to(grid[1, 0, :4], (5, 4)))
    np.testing.assert_array_equal(grid[:, 2, 4:], np.broadcast_to(grid[0, 2, 4:], (3, 4)))
    assert len(np.unique(grid.reshape(15, 8).round(5), axis=0)) == 15
    with pytest.raises(ValueError, match="a width that is a multiple of 4, got 6"):
        sinusoidal_grid(2, 2, 6)


VARIANTS = {
    "mean": dict(pooling="mean"),
    "class_mean": dict(pooling="class_mean"),
    "weighted": dict(pooling="weighted"),
    "attention": dict(pooling="attention"),
    "input_norm": dict(input_norm=True, patch_bias=False),
    "sinusoidal": dict(positions="sinusoidal"),
    "registers": dict(registers=2),
    "distilled": dict(distillation=True, distillation_head=True),
    "post": dict(norm="post"),
    "layer_scale": dict(layer_scale=0.1),
    "gated": dict(gated=True),
    "pooler": dict(pooler=True),
    "convolutions": dict(convolutions=2),
}


@pytest.mark.parametrize("name", others_soak(VARIANTS, "distilled", "gated", "convolutions"))
def test_every_variant_reads_images_of_other_sizes(name):
    model = model_of(**VARIANTS[name])
    logits, weights = jax.jit(functools.partial(model.__call__, return_weights=True))(pictures())
    patches = 9
    tokens = model.config.prefix + patches
    assert logits.shape == (3, 5)
    assert weights.shape == (3, 2, 3, tokens, tokens)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert jax.jit(model)(pictures(2, 20, 8)).shape == (2, 5)
    for path in named_leaves(model):
        rule_of(path, model)


# Another value of each field, which must change the program.
FIELDS = dict(
    image_size=16, patch_size=6, width=48, layers=3, heads=4, feed_forward=41, convolutions=1, pooling="mean",
    positions="sinusoidal", registers=1, distillation=True, norm="post", final_norm=False, layer_scale=0.5,
    gated=True, activation="relu", norm_epsilon=0.1, pooler=True, classes=4, dtype="bfloat16", input_norm=True,
    dropout=0.5, attention_dropout=0.5, stochastic_depth=0.5,
)  # fmt: skip


def trace(size=12, **changes):
    """Return the program of a classifier with changed fields, for pictures of a size."""

    def init_and_apply(key):
        config = ViTConfig(**(SIZES | changes))
        return ViTClassifier(config, rngs=nnx.Rngs(key))(pictures(2, size, size), dropout_key=key)

    return trace_of(init_and_apply)


def test_every_field_matters():
    assert unread_fields(trace, FIELDS) == []
    assert trace(8) != trace(8, antialias=True)


RATES = ("dropout", "attention_dropout", "stochastic_depth")
# Two small values for each field that only Dino or the masked autoencoder has.
PRETRAINING_FIELDS = {
    DinoConfig: dict(prototypes=(11, 12), projection_hidden=(13, 14), bottleneck=(7, 8)),
    MaskedAutoencoderConfig: dict(decoder_width=(16, 24), decoder_layers=(1, 2), decoder_heads=(2, 4)),
}


def test_the_distillation_head_and_channels_matter():
    images = pictures()
    single, both = (model_of(distillation=True, distillation_head=head) for head in (False, True))
    assert not np.allclose(jax.jit(single)(images), jax.jit(both)(images), atol=1e-6)
    grey, without_bias = model_of(channels=1), model_of(patch_bias=False)
    bias = {"encoder/patches/projection/bias"}
    assert named_leaves(model_of()).keys() - named_leaves(without_bias).keys() == bias
    assert jax.jit(grey)(images[..., :1]).shape == (3, 5)


def test_every_field_is_tested():
    fields = {field.name for field in dataclasses.fields(ViTConfig)}
    assert fields == {*FIELDS, "antialias", "distillation_head", "channels", "patch_bias"}
    for config, extra in PRETRAINING_FIELDS.items():
        assert {field.name for field in dataclasses.fields(config)} == fields | set(extra)


@pytest.mark.parametrize("kind", PRETRAINING_FIELDS)
def test_every_field_of_pretraining_matters(kind):
    build, rest = (Dino, ()) if kind is DinoConfig else (MaskedAutoencoder, (jnp.array([[0, 4, 7]]),))
    small, changed = ({n: values[i] for n, values in PRETRAINING_FIELDS[kind].items()} for i in (0, 1))

    def trace(**changes):
        config = kind(**SIZES, **small | changes)
        return trace_of(lambda key: build(config, rngs=nnx.Rngs(key))(pictures(1), *rest))

    assert unread_fields(trace, changed) == []


@pytest.mark.parametrize("field", RATES)
def test_randomness_is_on_only_with_a_key(field):
    plain, model = model_of(), model_of(**{field: 0.5})
    images = pictures()
    np.testing.assert_array_equal(jax.jit(plain)(images), jax.jit(model)(images))
    apply = jax.jit(lambda model, key: model(images, dropout_key=key))
    first, second = (apply(model, jax.random.key(n)) for n in (1, 2))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, apply(model, jax.random.key(1)))
    np.testing.assert_array_equal(apply(plain, jax.random.key(1)), jax.jit(plain)(images))


def test_stochastic_depth_skips_rows_and_keeps_the_mean():
    model = model_of(stochastic_depth=0.4, layers=3).encoder
    factors = np.asarray(model._branch_factors(5_000, jax.random.key(0)))
    assert factors.shape == (3, 2, 5_000)
    np.testing.assert_array_equal(factors[0], 1)
    np.testing.assert_allclose((factors == 0).mean(axis=(1, 2)), [0, 0.2, 0.4], atol=0.02)
    np.testing.assert_allclose(factors.mean(axis=(1, 2)), 1, atol=0.02)


def test_scan_unrolled_and_inference_forms_are_the_same():
    images = pictures()
    expected = jax.jit(model_of(compute=ComputeOptions(unroll=1)))(images)
    np.testing.assert_allclose(jax.jit(model_of(compute=ComputeOptions(unroll=9)))(images), expected, atol=1e-5)
    np.testing.assert_allclose(jax.jit(model_of().for_inference())(images), expected, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda model: model(images).sum()))
    plain, remat = (gradient(model_of(compute=ComputeOptions(remat=name))) for name in ("none", "blocks"))
    for name, leaf in named_leaves(plain).items():
        np.testing.assert_allclose(leaf, named_leaves(remat)[name], atol=1e-4, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", others_soak(["data=8", "data=2,fsdp=4", "data=2,fsdp=2,tensor=2"], "data=2,fsdp=2,tensor=2")
)
def test_eight_devices_as_one(mesh):
    config = ViTConfig(**(SIZES | dict(heads=2, layer_scale=0.1, registers=1)))
    images = pictures(8)

    def loss(model, images):
        return jnp.square(model(images)).mean()

    expected = jax.jit(jax.value_and_grad(loss))(model_of(config), images)
    with on_mesh(made := make_mesh(mesh)):
        model = model_of(config)
        placed = jax.device_put(model, model_shardings(model, made))
        value, gradient = jax.jit(jax.value_and_grad(loss))(placed, images)
    np.testing.assert_allclose(value, expected[0], atol=1e-6)
    leaves = named_leaves(expected[1])
    for name, leaf in named_leaves(gradient).items():
        np.testing.assert_allclose(leaf, leaves[name], atol=1e-5, err_msg=name)


@pytest.mark.soak
def test_forward_mode_equals_reverse_mode():
    model, images = model_of(activation="gelu"), pictures(1)

    def loss(model):
        return -jax.nn.log_softmax(model(images))[..., 3].mean()

    tangent = jax.tree.map(lambda x: 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), model)
    _, forward = jax.jvp(loss, (model,), (tangent,))
    gradient = jax.grad(loss)(model)
    reverse = sum(
        jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(tangent), strict=True)
    )
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


def test_one_batch_is_learned():
    import optax

    model, images, labels = model_of(), pictures(8), jnp.arange(8) % 5
    optimizer = optax.adam(3e-3)

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    @jax.jit
    def step(model, state):
        value, gradient = jax.value_and_grad(loss)(model)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(model, updates), state, value

    state = optimizer.init(model)
    for _ in range(90):
        model, state, value = step(model, state)
    assert value < 0.05


def test_a_head_of_prototypes_compares_directions():
    config = DinoConfig(**SIZES, prototypes=11, projection_hidden=13, bottleneck=7)
    model = jax.jit(lambda: Dino(config, rngs=nnx.Rngs(0)))()
    outputs = jax.jit(model)(pictures())
    assert outputs.shape == (3, 11)
    assert np.abs(outputs).max() <= 1 + 1e-5
    longer = nnx.merge(*nnx.split(model))
    longer.prototypes.kernel = nnx.Param(5 * model.prototypes.kernel[...])
    np.testing.assert_allclose(jax.jit(longer)(pictures()), outputs, atol=1e-5)
    differentiated = jax.jit(
        jax.grad(lambda model: jnp.square(model(pictures(), frozen_prototypes=True)).sum())
    )
    gradient = differentiated(model)
    np.testing.assert_array_equal(gradient.prototypes.kernel[...], 0)
    for name in named_leaves(model):
        rule_of(name, model)


def test_a_masked_autoencoder_reads_only_the_kept_patches():
    config = MaskedAutoencoderConfig(
        **SIZES | {"positions": "sinusoidal"}, decoder_width=16, decoder_layers=1, decoder_heads=2
    )
    model = jax.jit(lambda: MaskedAutoencoder(config, rngs=nnx.Rngs(0)))()
    images, kept = pictures(2), jnp.array([[0, 4, 7], [8, 1, 2]])
    predicted = jax.jit(model)(images, kept)
    assert predicted.shape == (2, 9, 48)
    patches = np.array(cut_into_patches(images, 4))
    for row, indices in enumerate(np.asarray(kept)):
        hidden = np.setdiff1d(np.arange(9), indices)
        patches[row, hidden] += 7
    changed = join_patches(jnp.asarray(patches), 4, 3)
    np.testing.assert_allclose(jax.jit(model)(changed, kept), predicted, atol=1e-6)
    # The order of the kept patches does not matter.
    np.testing.assert_allclose(jax.jit(model)(images, kept[:, ::-1]), predicted, atol=1e-5)
    for name in named_leaves(model):
        rule_of(name, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(patch_size=5), "image_size 12 must be a multiple of patch_size 5"),
        (dict(heads=5), "width 24 must be a multiple of heads 5"),
        (dict(pooling="last"), "pooling='last' is not one of class, mean, class_mean, weighted"),
        (dict(stochastic_depth=1.0), r"stochastic_depth=1.0 must be at least 0 and below 1"),
        (dict(registers=-1), "registers=-1 must be at least 0"),
        (dict(layers=0), "layers=0 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**(SIZES | changes))


def test_images_that_do_not_fit():
    model = model_of()
    with pytest.raises(ValueError, match="patches of 4 pixels do not divide images of 13 x 12"):
        model(pictures(1, 13, 12))
    with pytest.raises(ValueError, match=r"images must be \(B, height, width, 3\), got \(1, 12, 12, 1\)"):
        model(jnp.zeros((1, 12, 12, 1)))
    with pytest.raises(ValueError, match="a masked autoencoder needs patches"):
        MaskedAutoencoderConfig(**SIZES, convolutions=1)
    assert dataclasses.replace(ViTConfig(**SIZES), pooling="mean").prefix == 0
    assert ViT(ViTConfig(**SIZES), rngs=nnx.Rngs(0)).config.features == 24
