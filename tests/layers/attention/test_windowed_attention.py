"""Attention within windows against the plain form with the same mask: values, gradients, meshes and kernels."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import others_soak
from tests.oracles.attention import attention as oracle
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.layers.attention import visibility
from transformer_jax.layers.attention.banded_weights import windowed_weights
from transformer_jax.layers.attention.borders import attention_with_borders
from transformer_jax.layers.attention.dispatch import dot_product_attention, form_of_attention
from transformer_jax.layers.attention.masks import window_mask
from transformer_jax.layers.attention.windowed import local_attention, windowed_attention
from transformer_jax.layers.attention.windowed_blocks import blocks_in_rows
from transformer_jax.layers.attention.windows import window_of

B, T, H, K, W = 2, 29, 6, 5, 7
GLOBALS = jnp.array([[0, 11, -1], [5, 28, 3]])
SEGMENTS = jnp.array([[1] * 9 + [2] * 15 + [0] * 5, [1] * 20 + [2] * 9])


def masks(length=T, global_tokens=GLOBALS, segments=SEGMENTS):
    window = functools.partial(visibility.window, length, length)
    of_all = dict(global_queries=global_tokens, global_keys=global_tokens)
    return {
        "symmetric": window(before=3, after=3),
        "causal": window(before=4),
        "global": window(before=3, after=3, **of_all),
        "global keys": window(before=3, after=2, global_keys=global_tokens),
        "dilated": window(before=6, after=6, dilation=3),
        "dilated and global": window(before=6, after=6, dilation=3, **of_all),
        "packed": window(before=4, after=4, **of_all)
        & visibility.same_segment(segments, segments)
        & visibility.real(segments != 0),
        "padded": window(before=4, after=4) & visibility.real(jnp.array([20, 7]), length),
        "causal and global": window(before=4, after=4, **of_all) & visibility.causal(length, length),
    }


NAMES = list(masks())


def arrays(rng, groups, length=T, width=W, dtype=jnp.float32):
    shapes = (B, length, H, K), (B, length, groups, K), (B, length, groups, width)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def values_and_gradients(function, *arguments):
    def total(*arguments):
        output = function(*arguments)
        return (jnp.sin(jnp.arange(output.size)).reshape(output.shape) * output).sum(), output

    gradients, output = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arguments)
    return output, *gradients


def plain(mask, **options):
    return functools.partial(dot_product_attention, mask=mask.dense(), implementation="plain", **options)


@pytest.mark.parametrize(
    ("name", "groups", "size"),
    others_soak(
        [(name, *sizes) for sizes in ((6, 4), (2, 128)) for name in NAMES],
        *((name, 2, 128) for name in NAMES),
        ("global", 6, 4),
        ("dilated and global", 6, 4),
    ),
)
def test_equals_the_plain_form_with_gradients(rng, name, groups, size):
    mask, inputs = masks()[name], arrays(rng, groups)
    windowed = functools.partial(windowed_attention, mask=mask, scale=0.3, size=size)
    results = values_and_gradients(windowed, *inputs)
    for ours, expected in zip(results, values_and_gradients(plain(mask, scale=0.3), *inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-6)
    np.testing.assert_allclose(results[0], oracle(*inputs, mask=mask.dense(), scale=0.3)[0], atol=2e-6)


@pytest.mark.parametrize("name", others_soak(["causal", "packed", "dilated and global"], "packed"))
def test_drops_the_weights_that_the_plain_form_drops(rng, name):
    mask, inputs = masks()[name], arrays(rng, 3)
    options = dict(scale=0.4, weight_dropout=0.3, dropout_key=jax.random.key(5))
    windowed = functools.partial(windowed_attention, mask=mask, size=8, **options)
    expected = values_and_gradients(plain(mask, **options), *inputs)
    for ours, reference in zip(values_and_gradients(windowed, *inputs), expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=3e-6)
    in_rows = functools.partial(windowed, local=blocks_in_rows)
    del in_rows.keywords["size"]
    for ours, reference in zip(values_and_gradients(in_rows, *inputs), expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=3e-6)
    assert jnp.abs(plain(mask, scale=0.4)(*inputs) - expected[0]).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_dtypes(rng, dtype):
    mask, inputs = masks()["packed"], arrays(rng, 2, dtype=dtype)
    output = windowed_attention(*inputs, mask=mask, scale=0.4, size=8)
    assert output.dtype == dtype
    wide = (x.astype(jnp.float32) for x in inputs)
    np.testing.assert_allclose(output.astype(jnp.float32), plain(mask, scale=0.4)(*wide), atol=0.03)


@pytest.mark.long
def test_derivatives_of_higher_order(rng):
    mask, inputs = masks()["global"], arrays(rng, 3)
    forms = functools.partial(windowed_attention, mask=mask, scale=0.4, size=8), plain(mask, scale=0.4)
    tangents = [jnp.cos(x) for x in inputs]
    ours, expected = (jax.jvp(form, inputs, tangents)[1] for form in forms)
    np.testing.assert_allclose(ours, expected, atol=3e-6)

    def penalty(attend, *inputs):
        gradients = jax.grad(lambda *x: jnp.sin(attend(*x)).sum(), argnums=(0, 1, 2))(*inputs)
        return sum((x**2).sum() for x in gradients)

    ours, expected = (jax.grad(functools.partial(penalty, form), argnums=(0, 1, 2))(*inputs) for form in forms)
    for x, reference in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, reference, rtol=1e-4, atol=1e-4)


# Length of the tests with many devices: four tokens each for eight devices.
LONG = 32
LONG_SEGMENTS = jnp.pad(SEGMENTS, [(0, 0), (0, 3)])


@pytest.mark.parametrize(
    ("name", "mesh"),
    others_soak(
        [
            (name, mesh)
            for mesh in ("sequence=8", "sequence=4,data=2")
            for name in ("symmetric", "causal", "packed", "padded", "global")
        ],
        ("packed", "sequence=8"),
        ("causal", "sequence=8"),
        ("padded", "sequence=4,data=2"),
        ("global", "sequence=4,data=2"),
    ),
)
def test_eight_devices_equal_one(rng, mesh, name):
    mask, inputs = masks(LONG, segments=LONG_SEGMENTS)[name], arrays(rng, 3, LONG)
    expected = values_and_gradients(plain(mask, scale=0.3), *inputs)
    with on_mesh(make_mesh(mesh)):
        attend = functools.partial(dot_product_attention, mask=mask, scale=0.3)
        results = values_and_gradients(attend, *inputs)
    for ours, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=3e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rate"),
    others_soak(
        [("symmetric", 0.0), ("causal", 0.0), ("packed", 0.0), ("global", 0.3)],
        ("packed", 0.0),
        ("global", 0.3),
    ),
)
def test_blocks_in_rows_over_eight_devices(rng, name, rate):
    """The form for accelerators, in which each device pads its borders to the size of a block.

    With dropout no kernel is used.
    """
    mask, inputs = masks(LONG, segments=LONG_SEGMENTS)[name], arrays(rng, 3, LONG)
    options = dict(scale=0.3, weight_dropout=rate, dropout_key=jax.random.key(5) if rate else None)
    expected = values_and_gradients(plain(mask, **options), *inputs)
    with on_mesh(make_mesh("sequence=8")):
        in_rows = functools.partial(blocks_in_rows, kernel="splash" if rate else None, interpret=True)
        local = functools.partial(attention_with_borders, size=8, local=in_rows)
        attend = functools.partial(windowed_attention, mask=mask, local=local, **options)
        results = values_and_gradients(attend, *inputs)
    for ours, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=3e-6)


def test_devices_exchange_only_borders(rng):
    """No device receives more keys than its windows reach in the neighboring parts."""
    length, mask = 512, visibility.window(512, 512, before=3, after=2)
    inputs = arrays(rng, 2, length, K)
    with on_mesh(make_mesh("sequence=8")):
        attend = functools.partial(dot_product_attention, mask=mask, scale=0.3)
        program = jax.jit(attend).lower(*inputs).compile().as_text()
    received = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", program)
    assert sorted(received) == sorted(2 * [f"{B},{n},2,{K}" for n in (3, 2)]), program
    assert "all-gather" not in program


def test_parts_shorter_than_a_window_travel_around_the_ring(rng):
    mask, inputs = visibility.window(LONG, LONG, before=5), arrays(rng, 3, LONG)
    expected = plain(mask, scale=0.3)(*inputs)
    with on_mesh(make_mesh("sequence=8")):
        output = jax.jit(functools.partial(dot_product_attention, mask=mask, scale=0.3))(*inputs)
        np.testing.assert_allclose(output, expected, atol=3e-6)
        local = functools.partial(attention_with_borders, size=8, local=local_attention)
        with pytest.raises(ValueError, match="fewer than the 5 that a window"):
            windowed_attention(*inputs, mask=mask, scale=0.3, local=local)


@pytest.mark.parametrize("name", others_soak(NAMES, "causal", "packed", "dilated and global", "padded"))
def test_blocks_in_rows_equal_the_plain_form(rng, name):
    length = 300
    tokens = jnp.array([[0, 111, -1], [5, 280, 3]])
    segments = jnp.array([[1] * 90 + [2] * 150 + [0] * 60, [1] * 200 + [2] * 100])
    mask, inputs = masks(length, tokens, segments)[name], arrays(rng, 2, length)
    in_rows = functools.partial(windowed_attention, mask=mask, scale=0.3, local=blocks_in_rows)
    results = values_and_gradients(in_rows, *inputs)
    for ours, expected in zip(results, values_and_gradients(plain(mask, scale=0.3), *inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", others_soak(["symmetric", "global", "dilated and global", "packed", "padded"], "global", "packed")
)
def test_blocks_by_the_kernel_of_a_tpu(rng, name):
    """Splash attention is interpreted; it needs head widths of 128 only on a device."""
    length = 300
    tokens = jnp.array([[0, 111, -1], [5, 280, 3]])
    segments = jnp.array([[1] * 90 + [2] * 150 + [0] * 60, [1] * 200 + [2] * 100])
    mask, inputs = masks(length, tokens, segments)[name], arrays(rng, 2, length, K)
    local = functools.partial(blocks_in_rows, kernel="splash", interpret=True)
    results = values_and_gradients(
        functools.partial(windowed_attention, mask=mask, scale=0.3, local=local), *inputs
    )
    for ours, expected in zip(results, values_and_gradients(plain(mask, scale=0.3), *inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=3e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"),
    others_soak(
        [("symmetric", None), ("global", None), ("dilated and global", None), ("packed", "data=4,tensor=2")],
        ("dilated and global", None),
        ("packed", "data=4,tensor=2"),
    ),
)
def test_blocks_with_dropout_by_a_kernel_drop_the_same_weights(rng, name, mesh):
    """Each sequence has four blocks, or two for each remainder of the dilation; a device has two of four."""
    length = 500
    tokens = jnp.array([[0, 111, -1], [5, 480, 3]])
    segments = jnp.array([[1] * 90 + [2] * 350 + [0] * 60, [1] * 200 + [2] * 300])
    mask, inputs = masks(length, tokens, segments)[name], arrays(rng, 2, length, K)
    options = dict(scale=0.3, weight_dropout=0.3, dropout_key=jax.random.key(5))
    expected = values_and_gradients(plain(mask, **options), *inputs)
    local = functools.partial(blocks_in_rows, kernel="splash", interpret=True)
    attend = functools.partial(windowed_attention, mask=mask, local=local, **options)
    with contextlib.nullcontext() if mesh is None else on_mesh(make_mesh(mesh)):
        results = values_and_gradients(attend, *inputs)
    for ours, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=3e-5)


def test_the_dispatch_selects_the_form_by_the_reach_of_the_window():
    window = functools.partial(visibility.window, 1_024, 1_024)
    assert form_of_attention("auto", 1_024, 1_024, window(before=256, after=256)) == "windowed"
    assert form_of_attention("chunked", 1_024, 1_024, window(before=256, after=256)) == "windowed"
    assert form_of_attention("plain", 1_024, 1_024, window(before=256, after=256)) == "plain"
    assert form_of_attention("auto", 1_024, 1_024, window(before=500, after=500)) == "plain"
    assert form_of_attention("auto", 1_024, 1_024, window(before=None)) == "plain"
    assert form_of_attention("auto", 4_096, 4_096, visibility.causal(4_096, 4_096)) == "chunked"
    assert window_of(visibility.causal(9, 9)) is None
    assert window_of(window(before=3) & window(before=9, after=9))[:2] == (-3, 0)


def test_memory_grows_linearly():
    """The program of a long sequence has no array of length x length."""
    length = 16_384
    mask = visibility.window(length, length, before=32, after=32, global_keys=jnp.zeros((1, 1), jnp.int32))
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

    def loss(*inputs):
        return dot_product_attention(*inputs, mask=mask).sum()

    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 40 * 4 * length * 2 * 8


@pytest.mark.parametrize("name", others_soak(NAMES, "causal", "packed", "dilated and global", "global keys"))
def test_banded_weights(rng, name):
    mask, (query, key, value) = masks()[name], arrays(rng, 2)
    weights = windowed_weights(query, key, mask=mask, scale=0.3)
    _, expected = dot_product_attention(query, key, value, mask=mask, scale=0.3, return_weights=True)
    np.testing.assert_allclose(weights.dense(), expected, atol=2e-6)
    window = window_of(mask)
    assert weights.local.shape == (B, H, T, (window.highest - window.lowest) // window.dilation + 1)
    output, banded = dot_product_attention(
        query, key, value, mask=mask, scale=0.3, return_weights="banded", implementation="chunked"
    )
    np.testing.assert_allclose(banded.dense(), expected, atol=2e-6)
    np.testing.assert_allclose(output, oracle(query, key, value, mask=mask.dense(), scale=0.3)[0], atol=2e-6)


def test_window_masks_are_the_definition():
    mask = window_mask(5, 5, before=2, after=2, dilation=2, global_tokens=jnp.array([[1, -1]]))
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1], [0, 1, 0, 1, 0], [0, 1, 1, 0, 1]]
    np.testing.assert_array_equal(mask[0, 0], np.array(expected, bool))


@pytest.mark.parametrize("width", [0, -2, 3])
def test_widths_that_have_no_halves_are_refused(width):
    with pytest.raises(ValueError, match=f"window={width} must be an even number of at least 2"):
        visibility.half_window(width)
    with pytest.raises(ValueError, match="dilation 0 is below 1"):
        visibility.window(3, 3, before=1, dilation=0)
    with pytest.raises(ValueError, match="a window from -1 tokens before a query to 0 after it has no key"):
        visibility.window(3, 3, before=-1)


def test_a_repeated_global_key_is_counted_once(rng):
    mask = visibility.window(T, T, before=3, after=3, global_keys=jnp.array([[20, 20]]))
    query, key, value = arrays(rng, 2)
    weights = windowed_weights(query, key, mask=mask, scale=0.3)
    _, expected = dot_product_attention(query, key, value, mask=mask, scale=0.3, return_weights=True)
    np.testing.assert_allclose(weights.dense(), expected, atol=2e-6)
