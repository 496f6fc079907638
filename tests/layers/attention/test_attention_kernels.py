"""Kernels: their form of each mask against literal grids, Pallas's kernel on a CPU against the plain form."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import others_soak
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.program_flops import program_flops
from transformer_jax.layers.attention import kernels as attention_kernels
from transformer_jax.layers.attention import visibility
from transformer_jax.layers.attention.chunked import Ring
from transformer_jax.layers.attention.dispatch import dot_product_attention
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.kernels import kernel_attention, pad_to_even, refusal
from transformer_jax.layers.attention.ring_kernels import _Cudnn, _Static, ring_kernel_attention

SEGMENTS = jnp.asarray([[1, 1, 2, 2, 0], [1, 2, 2, 2, 2]])
VALID = SEGMENTS != 0
ODD_DOCUMENTS = visibility.same_segment(jnp.ones((2, 129), jnp.int32), jnp.ones((2, 129), jnp.int32))


def grid(rows):
    return np.array([[int(digit) for digit in row] for row in rows.split()])


# (a mask of 5 queries and 5 keys, its grid for each row of the batch)
MASKS = {
    "causal": (visibility.causal(5, 5), ["10000 11000 11100 11110 11111"] * 2),
    "continued": (visibility.causal(3, 5, first_query=2), ["11100 11110 11111"] * 2),
    "window": (visibility.window(5, 5, before=1, after=1), ["11000 11100 01110 00111 00011"] * 2),
    "real": (visibility.real(VALID), ["11110 " * 5, "11111 " * 5]),
    "lengths": (visibility.real(jnp.asarray([2, 0]), 5), ["11000 " * 5, "00000 " * 5]),
    "causal lengths": (
        visibility.causal(3, 3) & visibility.real(jnp.asarray([2, 3]), 3),
        ["100 110 110", "100 110 111"],
    ),
    "late": (
        visibility.causal(3, 3) & visibility.real_from(jnp.asarray([1, 0]), 3),
        ["000 010 011", "100 110 111"],
    ),
    "documents": (
        visibility.causal(5, 5) & visibility.same_segment(SEGMENTS, SEGMENTS),
        ["10000 11000 00100 00110 00001", "10000 01000 01100 01110 01111"],
    ),
    "real documents": (
        visibility.same_segment(SEGMENTS, SEGMENTS) & visibility.real(VALID),
        ["11000 11000 00110 00110 00000", "10000 01111 01111 01111 01111"],
    ),
}


def kernel_grid(form, queries, keys):
    """Return the grid that a kernel computes from its form of a mask."""
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    visible = np.ones((2, queries, keys), bool)
    if form.lowest is not None:
        visible &= distance >= form.lowest
    if form.highest is not None:
        visible &= distance <= form.highest
    if form.query_segments is not None:
        visible &= np.asarray(form.query_segments)[:, :, None] == np.asarray(form.key_segments)[:, None, :]
    return visible


@pytest.mark.parametrize("name", MASKS)
def test_a_kernels_form_of_a_mask_shows_what_the_grid_shows(name):
    mask, rows = MASKS[name]
    expected = np.stack([grid(row) for row in rows])
    _, queries, keys = expected.shape
    form = KernelMask.from_visibility(mask, queries, keys)
    np.testing.assert_array_equal(kernel_grid(form, queries, keys), expected)
    np.testing.assert_array_equal(np.broadcast_to(form.dense()[:, 0], expected.shape), expected)
    if form.sees_any is not None:
        np.testing.assert_array_equal(np.broadcast_to(form.sees_any, expected.shape[:2]), expected.any(axis=-1))
    if "lengths" in name:
        # cuDNN reads the lengths instead of an array; a row without keys gets length 1 and output zero.
        np.testing.assert_array_equal(form.key_lengths, np.maximum(expected.any(axis=1).sum(axis=1), 1))
        assert form.with_additive("bfloat16") is form
        return
    if name == "late":
        np.testing.assert_array_equal(form.first_keys, [1, 0])
        assert form.with_additive("bfloat16") is form
        return
    assert form.key_lengths is None
    additive = form.with_additive("bfloat16").additive
    if form.query_segments is not None:
        same = np.asarray(form.query_segments)[:, :, None] == np.asarray(form.key_segments)[:, None, :]
        np.testing.assert_array_equal(np.asarray(additive[:, 0] == 0), same)
        assert bool(jnp.isfinite(additive).all())


def test_masks_that_no_kernel_has_a_form_for():
    positions, documents = jnp.arange(5)[None], visibility.same_segment(SEGMENTS, SEGMENTS)
    for mask in (
        visibility.Visibility((visibility.Relation(positions, positions, 0, 3),)),
        documents & documents,
        visibility.causal(5, 5, first_query=jnp.arange(2)),
        visibility.causal(5, 5, first_query=-1),  # the first query sees nothing
    ):
        assert KernelMask.from_visibility(mask, 5, 5) is None


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        ("cudnn", {}, "dtype float32"),
        ("cudnn", {"dtype": "bfloat16", "width": 12}, "head width 12"),
        ("cudnn", {"dtype": "bfloat16", "width": 256}, "head width 256"),
        ("cudnn", {"dtype": "bfloat16", "length": 129}, None),
        ("cudnn", {"dtype": "bfloat16", "length": 129, "mask": visibility.real(jnp.full(2, 99), 129)}, None),
        ("cudnn", {"dtype": "bfloat16", "length": 129, "mask": ODD_DOCUMENTS}, "129 queries"),
        (
            "cudnn",
            {"dtype": "bfloat16", "length": 129, "mask": visibility.window(129, 129, before=3, after=3)},
            "129 queries",
        ),
        ("cudnn", {"dtype": "bfloat16", "length": 130, "ring": 2}, "65 queries and 65"),
        ("cudnn", {"dtype": "bfloat16"}, None),
        ("splash", {"dtype": "float16"}, "dtype float16"),
        ("splash", {"length": 100}, "128 or more"),
        ("splash", {"length": 197}, None),
        ("splash", {}, None),
        ("cudnn", {"dtype": "bfloat16", "dropout": True}, None),
        ("cudnn", {"dtype": "bfloat16", "length": 129, "mask": ODD_DOCUMENTS, "dropout": True}, None),
        ("cudnn", {"dropout": True}, "dtype float32"),
        ("cudnn", {"dtype": "bfloat16", "length": 127, "dropout": True}, "127 queries"),
        ("splash", {"length": 197, "dropout": True}, None),
        ("splash", {"length": 2048, "dropout": True}, "2048 queries"),
        ("splash", {"length": 2048, "dtype": "bfloat16", "dropout": True}, None),
    ],
)
def test_what_a_kernel_takes(kernel, changes, reason):
    case = dict(dtype="float32", width=64, length=128, ring=1, dropout=False) | changes
    x = jax.ShapeDtypeStruct((2, case["length"], 4, case["width"]), case["dtype"])
    mask = case.get("mask", visibility.causal(case["length"], case["length"]))
    reason_given = refusal(kernel, x, x, x, mask, None, ring=case["ring"], has_dropout=case["dropout"])
    assert reason_given is None if reason is None else reason in reason_given
    assert "bias" in refusal(kernel, x, x, x, None, jnp.zeros(()))
    assert "array" in refusal(kernel, x, x, x, jnp.ones((1, 1, 1, 1), bool), None)


def test_lengths_beside_a_band_are_part_of_the_gpu_kernels_array(monkeypatch):
    """The kernel combines its own form of lengths only with a causal band, or with no band."""
    seen = visibility.window(6, 6, before=2, after=1) & visibility.real(jnp.asarray([3, 6]), 6)
    arrays = []
    monkeypatch.setattr(
        attention_kernels, "_cudnn_with_array", lambda q, k, v, array, *_, **__: arrays.append(array) or q
    )
    x = jnp.zeros((2, 6, 4, 8), jnp.bfloat16)
    kernel_attention("cudnn", x, x, x, mask=seen, scale=1.0)
    np.testing.assert_array_equal(arrays[0] == 0, np.broadcast_to(seen.dense(), (2, 1, 6, 6)))


@pytest.mark.parametrize("before", [None, 2])
@pytest.mark.parametrize("T", [6, 7])
def test_rows_that_begin_late_are_turned_for_the_gpu_kernel(monkeypatch, rng, before, T):
    """After rolling, the kernel needs only its causal band; here the plain form replaces the kernel."""
    plain = jax.nn.dot_product_attention
    calls = []

    def kernel(*arrays, implementation, **options):
        calls.append(options)
        return plain(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    query, key, value = (jnp.asarray(rng.normal(size=(3, T, 4, 8)), jnp.float32) for _ in range(3))
    seen = visibility.window(T, T, before=before) & visibility.real_from(jnp.asarray([0, 2, T]), T)

    def total(query, key, value, attend):
        return (attend(query, key, value) * jnp.arange(8)).sum()

    by_kernel = functools.partial(kernel_attention, "cudnn", mask=seen, scale=8**-0.5)
    exact = functools.partial(dot_product_attention, mask=seen)
    np.testing.assert_allclose(by_kernel(query, key, value), exact(query, key, value), atol=1e-5)
    gradients, expected = (
        jax.grad(total, argnums=(0, 1, 2))(query, key, value, attend) for attend in (by_kernel, exact)
    )
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert all(options["is_causal"] and options["key_value_seq_lengths"] is None for options in calls)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [None, (5, 3)])
def test_odd_numbers_are_filled_up_for_the_gpu_kernel(rng, causal, lengths):
    """No query sees the padding: the plain form with padding equals the plain form without it."""
    query, key, value = (jnp.asarray(rng.normal(size=(2, 5, 4, 8)), jnp.float32) for _ in range(3))

    def attend(query, key, value, lengths):
        seen = visibility.causal(query.shape[1], key.shape[1]) if causal else visibility.Visibility(())
        seen = seen if lengths is None else seen & visibility.real(lengths, key.shape[1])
        return dot_product_attention(query, key, value, mask=seen if seen.relations else None)

    lengths = None if lengths is None else jnp.asarray(lengths)
    given = pad_to_even(query, key, value, lengths, causal=causal)
    assert [x.shape[1] for x in given[:3]] == [6, 6, 6]
    np.testing.assert_allclose(attend(*given)[:, :5], attend(query, key, value, lengths), atol=1e-6)


@pytest.mark.parametrize(
    ("capability", "takes"), [("7.5", False), ("8.0", True), ("9.0", True), ("gfx90a", False)]
)
def test_the_gpu_kernel_needs_a_device_that_has_it(capability, takes, monkeypatch):
    device = types.SimpleNamespace(device_kind="a card", compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)
    reason = refusal("cudnn", x, x, x, None, None)
    assert (reason is None) == takes
    assert takes or f"a card ({capability})" in reason


def cases():
    T = 128
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(1, 4, (2, T)), axis=1))
    valid = jnp.arange(T) < jnp.asarray([[100], [T]])
    return {
        "all": None,
        "causal": visibility.causal(T, T),
        "window": visibility.window(T, T, before=20),
        "documents": visibility.causal(T, T) & visibility.same_segment(segments, segments),
        "padding": visibility.real(valid),
        "lengths": visibility.real(jnp.asarray([100, 0]), T),
        "unseen": visibility.same_segment(jnp.where(valid, 1, 2), jnp.ones_like(segments)),
    }


def check_equals_plain(attend, mask, inputs, cotangent, mesh=None):
    """Check that a form of attention, jitted on a mesh, equals the plain form; return (output, gradients)."""

    def total(attend, *inputs):
        output = attend(*inputs, mask=mask, scale=0.3)
        return (output * cotangent).sum(), output

    plain = functools.partial(dot_product_attention, implementation="plain")
    derivative = jax.value_and_grad(total, argnums=(1, 2, 3), has_aux=True)
    with on_mesh(mesh):
        (_, output), gradients = jax.jit(derivative, static_argnums=0)(attend, *inputs)
    (_, expected), theirs = derivative(plain, *inputs)
    # In bfloat16 the two forms round at different steps.
    tolerance = 1e-5 if inputs[0].dtype == jnp.float32 else 0.02
    pairs = [(output, expected), *zip(gradients, theirs, strict=True)]
    for ours, reference in pairs:
        ours, reference = (np.asarray(x, np.float32) for x in (ours, reference))
        np.testing.assert_allclose(ours, reference, atol=tolerance * max(1.0, float(np.abs(reference).max())))
    return output, gradients


@pytest.mark.parametrize(
    ("name", "groups"),
    others_soak(
        [(name, groups) for groups in (4, 2) for name in cases()],
        *((name, (4, 2)[number % 2]) for number, name in enumerate(cases())),
    ),
)
def test_the_tpu_kernel_equals_the_plain_form(rng, name, groups):
    inputs = [jnp.asarray(rng.normal(size=(2, 128, heads, 16)), jnp.float32) for heads in (4, groups, groups)]
    cotangent = jnp.asarray(rng.normal(size=(2, 128, 4, 16)), jnp.float32)
    splash = functools.partial(kernel_attention, "splash", interpret=True)
    output, gradients = check_equals_plain(splash, cases()[name], inputs, cotangent)
    if name == "unseen":
        np.testing.assert_array_equal(output[0, 100:], 0.0)
        np.testing.assert_array_equal(gradients[0][0, 100:], 0.0)


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_the_tpu_kernel_in_bfloat16_equals_the_plain_form(rng, name):
    inputs = [jnp.asarray(rng.normal(size=(2, 128, heads, 16)), jnp.bfloat16) for heads in (4, 2, 2)]
    cotangent = jnp.asarray(rng.normal(size=(2, 128, 4, 16)), jnp.bfloat16)
    check_equals_plain(
        functools.partial(kernel_attention, "splash", interpret=True), cases()[name], inputs, cotangent
    )


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        (197, 197, None),
        (150, 150, visibility.causal(150, 150)),
        (130, 140, visibility.window(130, 140, before=9, after=3)),
        (150, 150, visibility.causal(150, 150) & visibility.real(jnp.asarray([40, 150]), 150)),
    ],
    ids=["all", "causal", "window", "lengths"],
)
def test_the_tpu_kernel_pads_other_lengths(rng, queries, keys, mask):
    shapes = (2, queries, 2, 8), (2, keys, 2, 8), (2, keys, 2, 8)
    inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    cotangent = jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)
    check_equals_plain(functools.partial(kernel_attention, "splash", interpret=True), mask, inputs, cotangent)


def test_each_device_runs_the_kernel_on_its_rows_and_heads(rng):
    inputs = [jnp.asarray(rng.normal(size=(2, 128, 4, 16)), jnp.float32) for _ in range(3)]
    mask = cases()["documents"]
    splash = functools.partial(kernel_attention, "splash", mask=mask, scale=0.3, interpret=True)
    with on_mesh(make_mesh("data=2,tensor=2")):
        compiled = jax.jit(splash).lower(*inputs).compile()
        output = compiled(*inputs)
    np.testing.assert_allclose(output, jax.jit(splash)(*inputs), atol=1e-6)


def ring_cases():
    """Return masks of 512 tokens, of which a ring of four has parts of 128."""
    T = 512
    segments = jnp.asarray(np.sort(np.random.default_rng(2).integers(1, 6, (2, T)), axis=1))
    valid = jnp.arange(T) < jnp.asarray([[100], [T]])
    return {
        "all": None,
        "causal": visibility.causal(T, T),
        "window": visibility.window(T, T, before=150),
        "both sides": visibility.window(T, T, before=20, after=140),
        "documents": visibility.causal(T, T) & visibility.same_segment(segments, segments),
        "unseen": visibility.same_segment(jnp.where(valid, 1, 2), jnp.ones_like(segments)),
    }


@pytest.mark.parametrize("name", others_soak(ring_cases(), "documents"))
def test_the_tpu_kernel_over_a_ring_equals_the_plain_form(rng, name):
    inputs = [jnp.asarray(rng.normal(size=(2, 512, heads, 8)), jnp.float32) for heads in (4, 2, 2)]
    cotangent = jnp.asarray(rng.normal(size=(2, 512, 4, 8)), jnp.float32)
    ring = functools.partial(ring_kernel_attention, "splash", interpret=True)
    mesh = make_mesh("sequence=4,tensor=2")
    output, gradients = check_equals_plain(ring, ring_cases()[name], inputs, cotangent, mesh)
    if name == "unseen":
        np.testing.assert_array_equal(output[0, 100:], 0.0)
        np.testing.assert_array_equal(gradients[0][0, 100:], 0.0)


def test_a_ring_of_packed_rows_over_two_axes(rng):
    """The documents of one row apply to all rows, which are sharded over data."""
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (1, 256)), axis=1))
    mask = visibility.causal(256, 256) & visibility.same_segment(segments, segments)
    inputs = [jnp.asarray(rng.normal(size=(4, 256, 2, 8)), jnp.float32) for _ in range(3)]
    with on_mesh(make_mesh("data=2,sequence=2,tensor=2")):
        output = jax.jit(
            functools.partial(ring_kernel_attention, "splash", mask=mask, scale=0.3, interpret=True)
        )(*inputs)
    expected = dot_product_attention(*inputs, mask=mask, scale=0.3, implementation="plain")
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize("band", [(None, 0), (-5, 0), (-3, 2), (None, None), (-20, 9)])
def test_bands_of_a_rings_turns_are_those_of_the_mask(band):
    """With 4 parts of 4 tokens, the kernel's mask in each turn is a part of the mask of all 16 tokens."""
    parts, T = 4, 4
    settings = _Static(_Cudnn(1.0), Ring("sequence", parts), band)
    query = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.bfloat16)
    distance = np.arange(parts * T)[None, :] - np.arange(parts * T)[:, None]
    lowest, highest = (-99 if band[0] is None else band[0]), (99 if band[1] is None else band[1])
    expected = (distance >= lowest) & (distance <= highest)
    local = np.arange(T)[None, :] - np.arange(T)[:, None]
    for device in range(parts):
        for turn in range(parts):
            part = (device - turn) % parts
            local_band = settings.local_bands(turn, T, T)[0 if device >= turn else 1]
            visible = np.zeros((T, T), bool)
            if local_band is not None:
                mask = _Cudnn(1.0)._mask(query, query, local_band, None)
                visible = np.ones((T, T), bool)
                if mask["bias"] is not None:
                    visible &= np.asarray(mask["bias"][0, 0] == 0)
                if "CAUSAL" in mask["mask_type"].name:
                    visible &= local <= 0
                if mask["sliding_window_length"] is not None:
                    visible &= local > -mask["sliding_window_length"]
            queries, keys = slice(device * T, device * T + T), slice(part * T, part * T + T)
            np.testing.assert_array_equal(visible, expected[queries, keys])


def test_a_ring_takes_kernels_by_the_lengths_of_its_parts():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), "bfloat16")
    mask = visibility.causal(512, 512)
    assert refusal("splash", x, x, x, mask, None, ring=4) is None
    assert "64 queries" in refusal("splash", x, x, x, mask, None, ring=8)
    shorter = jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16")
    band = visibility.causal(512, 256)
    assert "a band of 512 queries and 256 keys" in refusal("cudnn", x, shorter, shorter, band, None, ring=2)
    assert "dropout" in refusal("cudnn", x, x, x, mask, None, has_dropout=True, ring=2)


def test_operations_of_kernels_follow_the_band(rng):
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.float32)

    def count(mask):
        attend = functools.partial(kernel_attention, "splash", mask=mask, scale=1.0, interpret=True)
        forward = program_flops(jax.make_jaxpr(attend)(x, x, x))
        total = jax.grad(lambda *inputs: attend(*inputs).sum(), argnums=(0, 1, 2))
        return forward, program_flops(jax.make_jaxpr(total)(x, x, x))

    pairs = 2 * 4 * 256 * 256
    # Besides its products, the backward pass has sums over the output, which cost one column of a product.
    np.testing.assert_allclose(count(None), (2 * 2 * pairs * 64, 9 * 2 * pairs * 64), rtol=1e-3)
    causal = 2 * 4 * 256 * 257 / 2
    counts = count(visibility.causal(256, 256))
    np.testing.assert_allclose(counts, (2 * 2 * causal * 64, 9 * 2 * causal * 64), rtol=1e-3)


def test_the_form_that_replaces_a_kernel_is_reported_once(monkeypatch, rng):
    monkeypatch.setattr("transformer_jax.layers.attention.dispatch.platform", lambda: "gpu")
    attention_kernels.report_refusal.cache_clear()
    x = jnp.asarray(rng.normal(size=(1, 300, 2, 12)), jnp.bfloat16)
    with pytest.warns(
        UserWarning, match="cudnn does not support head width 12 .* the chunked form is used"
    ) as warnings:
        dot_product_attention(x, x, x, mask=visibility.causal(300, 300))
    # A second warning would be an error here.
    dot_product_attention(x, x, x, mask=visibility.causal(300, 300))
    assert len(warnings) == 1
    # Reasons that no other size avoids are reported if the user asked for a kernel.
    causal_window = visibility.window(300, 300, before=8, after=8) & visibility.causal(300, 300)
    with pytest.warns(UserWarning, match="cudnn does not support the mask; the windowed form is used"):
        dot_product_attention(x, x, x, mask=causal_window, implementation="fused")
