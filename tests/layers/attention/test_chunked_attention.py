"""Attention in chunks against the plain form: values, gradients, masks and biases of every kind."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.layers.attention import dispatch as attention
from transformer_jax.layers.attention import visibility
from transformer_jax.layers.attention.chunked import chunked_attention
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.ring import ring_attention
from transformer_jax.layers.positions.bias import PositionBias
from transformer_jax.layers.positions.schemes import BucketedPositions, LinearBiasPositions

B, T, S, H, K, W = 2, 13, 17, 6, 5, 7
SEGMENTS = jnp.array([[1] * 5 + [2] * 8, [1] * 9 + [0] * 4])
KEY_SEGMENTS = jnp.array([[1] * 7 + [2] * 10, [1] * 11 + [0] * 6])
MASKS = {
    "none": None,
    "causal": visibility.causal(T, S, first_query=2),
    "causal of each sentence": visibility.causal(T, S, first_query=jnp.array([0, 4])),
    "window": visibility.window(T, S, before=2, after=1),
    "segments": visibility.same_segment(SEGMENTS, KEY_SEGMENTS) & visibility.real(KEY_SEGMENTS != 0),
    "attend_pair query sees nothing": jnp.ones((B, H, T, S), bool).at[1, :, 3].set(False),
    "of keys alone": jnp.arange(S) % 3 > 0,
}


def arrays(rng, groups, dtype=jnp.float32):
    shapes = (B, T, H, K), (B, S, groups, K), (B, S, groups, W)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def values_and_gradients(function, *arguments):
    def total(*arguments):
        output = function(*arguments)
        return (jnp.sin(jnp.arange(output.size)).reshape(output.shape) * output).sum(), output

    gradients, output = jax.jit(jax.grad(total, argnums=tuple(range(len(arguments))), has_aux=True))(*arguments)
    return output, *gradients


SIZES = [(6, 4, 5), (2, 13, 3), (1, 5, 17)]


@pytest.mark.parametrize(
    ("mask", "groups", "queries", "keys"),
    others_soak(
        [(mask, *sizes) for sizes in SIZES for mask in MASKS],
        *((mask, *SIZES[number % 3]) for number, mask in enumerate(MASKS)),
    ),
)
def test_equals_the_plain_form_with_gradients(rng, mask, groups, queries, keys):
    mask = MASKS[mask]

    def chunked(query, key, value):
        return chunked_attention(query, key, value, mask=mask, scale=0.3, queries=queries, keys=keys)

    def plain(query, key, value):
        return dot_product_attention(query, key, value, mask=mask, scale=0.3, implementation="plain")

    inputs = arrays(rng, groups)
    for ours, expected in zip(
        values_and_gradients(chunked, *inputs), values_and_gradients(plain, *inputs), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=2e-6)


@pytest.mark.parametrize("mesh", [None, "sequence=4,data=2"])
def test_drops_the_weights_that_the_plain_form_drops(rng, mesh):
    length, options = 8, dict(scale=0.4, weight_dropout=0.3, dropout_key=jax.random.key(5))
    mask = visibility.causal(length, length)
    inputs = [jnp.asarray(rng.normal(size=(B, length, n, K)), jnp.float32) for n in (4, 2, 2)]

    def attend(implementation, *inputs):
        return dot_product_attention(*inputs, mask=mask, implementation=implementation, **options)

    plain = values_and_gradients(functools.partial(attend, "plain"), *inputs)
    if mesh is None:
        chunked = functools.partial(chunked_attention, mask=mask, queries=3, keys=5, **options)
        results = values_and_gradients(chunked, *inputs)
        tangents = jax.tree.map(lambda x: jnp.cos(x), inputs)
        _, expected = jax.jvp(functools.partial(attend, "plain"), inputs, tangents)
        np.testing.assert_allclose(jax.jvp(chunked, inputs, tangents)[1], expected, atol=3e-6)
    else:
        with on_mesh(make_mesh(mesh)):
            results = values_and_gradients(functools.partial(attend, "chunked"), *inputs)
    for ours, expected in zip(results, plain, strict=True):
        np.testing.assert_allclose(ours, expected, atol=3e-6)
    undropped = dot_product_attention(*inputs, mask=mask, implementation="plain", scale=0.4)
    assert float(jnp.abs(undropped - plain[0]).max()) > 0.1


@pytest.mark.parametrize("kind", ["array", "alibi", "bucketed"])
def test_biases_get_their_gradient(rng, kind):
    if kind == "array":
        bias = jnp.asarray(rng.normal(size=(1, H, T, S)), jnp.float32)
    else:
        scheme = LinearBiasPositions(H)
        if kind == "bucketed":
            scheme = BucketedPositions(H, buckets=8, max_distance=12, std=1.0, rngs=nnx.Rngs(0))
        bias = PositionBias(scheme, jnp.arange(T) + 4, jnp.stack([jnp.arange(S), jnp.arange(S) // 2]))
    query, key, value = arrays(rng, 3)
    mask = visibility.causal(T, S, first_query=4)
    leaves, structure = jax.tree.flatten(bias)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def attend(implementation, query, *new_leaves):
        replaced = list(leaves)
        for i, leaf in zip(floats, new_leaves, strict=True):
            replaced[i] = leaf
        options = dict(mask=mask, bias=jax.tree.unflatten(structure, replaced), scale=0.5)
        if implementation == "chunked":
            return chunked_attention(query, key, value, queries=4, keys=6, **options)
        return dot_product_attention(query, key, value, implementation="plain", **options)

    inputs = [query, *(leaves[i] for i in floats)]
    assert len(inputs) == (1 if kind == "alibi" else 2)
    for ours, expected in zip(
        *(values_and_gradients(lambda *a, n=n: attend(n, *a), *inputs) for n in ("chunked", "plain")),
        strict=True,
    ):
        np.testing.assert_allclose(ours, expected, atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_dtypes(rng, dtype):
    inputs = arrays(rng, 2, dtype)
    output = chunked_attention(*inputs, scale=0.4, queries=4, keys=5)
    assert output.dtype == dtype
    wide = (x.astype(jnp.float32) for x in inputs)
    expected = dot_product_attention(*wide, scale=0.4, implementation="plain")
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=0.03)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [None, "sequence=2"])
def test_second_derivatives(rng, mesh):
    """The gradient of a penalty on the gradient differentiates the backward pass."""
    length = 8
    inputs = [jnp.asarray(rng.normal(size=(1, length, n, K)), jnp.float32) for n in (2, 1, 1)]
    seen = visibility.causal(length, length)

    def penalty(attend, *inputs):
        def total(*inputs):
            return jnp.sin(attend(*inputs, mask=seen, scale=0.5)).sum()

        return sum((x**2).sum() for x in jax.grad(total, argnums=(0, 1, 2))(*inputs))

    def in_chunks(*inputs, **options):
        return (ring_attention if mesh else chunked_attention)(*inputs, queries=3, keys=3, **options)

    def plain(*inputs, **options):
        return dot_product_attention(*inputs, implementation="plain", **options)

    expected = jax.grad(penalty, argnums=(1, 2, 3))(plain, *inputs)
    with on_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
        results = jax.jit(jax.grad(penalty, argnums=(1, 2, 3)), static_argnums=0)(in_chunks, *inputs)
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_large_logits_stay_finite(rng):
    query, key, value = arrays(rng, 6)
    output = chunked_attention(100 * query, 100 * key, value, scale=1.0, queries=4, keys=5)
    expected = dot_product_attention(100 * query, 100 * key, value, scale=1.0, implementation="plain")
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_one_program_for_any_mask_stores_no_complete_matrix():
    """No array of T x S entries in the compiled forward and backward pass."""
    length = 4_096
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

    def total(query, key, value):
        mask = visibility.causal(length, length)
        return dot_product_attention(query, key, value, mask=mask).sum()

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length


def test_auto_is_plain_for_short_and_chunked_for_long():
    assert attention.form_of_attention("auto", 2_048, 2_048) == "plain"
    assert attention.form_of_attention("auto", 1, 100_000) == "plain", "a step of a decoder"
    assert attention.form_of_attention("auto", 2_049, 2_048) == "chunked"
    assert attention.form_of_attention("plain", 10_000, 10_000) == "plain"
    mask = visibility.causal(3, 3)
    assert attention.prepare_mask(mask, "chunked", 3, 3, "float32") is mask
    np.testing.assert_array_equal(attention.prepare_mask(mask, "auto", 3, 3, "float32"), mask.dense())
    assert attention.prepare_mask(None, "auto", 3, 3, "float32") is None


MESHES = ["sequence=4", "data=2,sequence=4", "sequence=2,tensor=2"]
KINDS = ["causal", "segments", "dense", "alibi", "bucketed"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "kind"),
    others_soak(
        [(mesh, kind) for kind in KINDS for mesh in MESHES],
        *((MESHES[number % 3], kind) for number, kind in enumerate(KINDS)),
    ),
)
def test_the_ring_equals_the_plain_form_with_gradients(rng, mesh, kind):
    length = 24
    shapes = (B, length, H, K), (B, length, 2, K), (B, length, 2, W)
    inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (B, length))))
    seen = visibility.causal(length, length)
    positions = jnp.arange(length)
    if kind == "segments":
        seen = seen & visibility.same_segment(segments, segments) & visibility.real(segments != 0)
    if kind == "dense":
        seen = seen.dense()
    if kind == "bucketed":
        inputs.append(jnp.asarray(rng.normal(size=(8, H)), jnp.float32))

    def bias(*table):
        if kind == "alibi":
            return PositionBias(LinearBiasPositions(H), positions, positions)
        if kind == "bucketed":
            scheme = BucketedPositions(H, buckets=8, max_distance=12, std=1.0, rngs=nnx.Rngs(0))
            scheme.bias_table.embedding = nnx.Param(table[0])
            return PositionBias(scheme, positions, positions)
        return None

    def attend(implementation, query, key, value, *table):
        return dot_product_attention(
            query, key, value, mask=seen, bias=bias(*table), implementation=implementation
        )

    def in_small_chunks(query, key, value, *table):
        return ring_attention(query, key, value, mask=seen, bias=bias(*table), scale=K**-0.5, queries=4, keys=3)

    expected = values_and_gradients(lambda *a: attend("plain", *a), *inputs)
    with on_mesh(make_mesh(mesh)):
        function = jax.jit(lambda *a: attend("auto", *a))
        assert "ppermute" in str(jax.make_jaxpr(function)(*inputs))
        for form in (function, in_small_chunks):
            for ours, theirs in zip(values_and_gradients(form, *inputs), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_a_device_needs_no_more_memory_in_a_larger_ring():
    """Forward and backward: it never holds the keys of all parts."""

    def total(query, key, value):
        mask = visibility.causal(*(x.shape[1] for x in (query, key)))
        return ring_attention(query, key, value, mask=mask, scale=0.1, queries=64, keys=64).sum()

    def needed(devices):
        x = jax.ShapeDtypeStruct((2, 512 * devices, 4, 32), jnp.float32)
        with on_mesh(make_mesh(f"sequence={devices}")):
            compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert needed(8) < 1.05 * needed(2)


@pytest.mark.parametrize("form", ["chunked", pytest.param("ring", marks=pytest.mark.long)])
def test_forward_mode_equals_that_of_the_plain_form(rng, form):
    """Tangents of query, key, value and an array of biases, and forward over reverse."""
    length = 8
    shapes = (2, length, 4, K), (2, length, 2, K), (2, length, 2, W), (1, 4, length, length)
    inputs, tangents = (
        tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes) for _ in "ab"
    )
    seen = visibility.causal(length, length) & visibility.real(jnp.arange(length)[None] > 0)

    def plain(query, key, value, bias):
        return dot_product_attention(query, key, value, mask=seen, bias=bias, scale=0.5, implementation="plain")

    def ours(query, key, value, bias):
        attend = ring_attention if form == "ring" else chunked_attention
        return attend(query, key, value, mask=seen, bias=bias, scale=0.5, queries=3, keys=3)

    def derivatives(attend, *tangents):
        def total(*inputs):
            return jnp.sin(attend(*inputs)).sum()

        first = jax.jvp(attend, inputs, tangents)
        second = jax.jvp(jax.grad(total, argnums=(0, 1, 2, 3)), inputs, tangents)
        return first, second

    expected = derivatives(plain, *tangents)
    with on_mesh(make_mesh("sequence=2")) if form == "ring" else contextlib.nullcontext():
        results = jax.jit(derivatives, static_argnums=0)(ours, *tangents)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_derivatives_of_a_batch_of_attentions(rng):
    """`jax.vmap` outside and inside of both modes, over queries and keys but not over values."""
    query, key, value = arrays(rng, 3)
    query, key = jnp.stack([query, -query]), jnp.stack([key, 2 * key])

    def in_chunks(*inputs, **options):
        return chunked_attention(*inputs, queries=4, keys=5, **options)

    def plain(*inputs, **options):
        return dot_product_attention(*inputs, implementation="plain", **options)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(attend):
        def attend_pair(query, key):
            return attend(query, key, value, scale=0.5)

        backward = jax.vmap(jax.grad(lambda *a: jnp.sin(attend_pair(*a)).sum(), argnums=(0, 1)))(query, key)
        forward = jax.jvp(jax.vmap(attend_pair), (query, key), (jnp.cos(query), key))
        return backward, forward

    for a, b in zip(*(jax.tree.leaves(derivatives(f)) for f in (in_chunks, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_tangent_stores_no_complete_matrix():
    """No array of T x S entries in the compiled forward mode."""
    length = 4_096
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

    def tangent(*inputs):
        def attend(query, key, value):
            return dot_product_attention(query, key, value, mask=visibility.causal(length, length))

        return jax.jvp(attend, inputs, inputs)

    compiled = jax.jit(tangent).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length
