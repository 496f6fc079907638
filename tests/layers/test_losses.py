import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.program_flops import program_flops
from transformer_jax.layers import losses
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.float32_product import float32_product
from transformer_jax.layers.losses import (
    cross_entropy_in_parts,
    sample_tokens,
    smoothed_cross_entropy,
    symmetric_divergence,
    token_keys,
    tokens_in_parts,
)

B, T, V = 3, 5, 11


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_the_formula(rng, smoothing):
    logits = rng.normal(size=(B, T, V)) * 3
    labels = rng.integers(0, V, (B, T))
    weights = (rng.random((B, T)) < 0.7).astype(float)
    loss = likelihood = 0.0
    for b in range(B):
        for t in range(T):
            log_p = logits[b, t] - np.log(np.exp(logits[b, t]).sum())
            expected = np.full(V, smoothing / V)
            expected[labels[b, t]] += 1 - smoothing
            loss -= weights[b, t] * (expected * log_p).sum()
            likelihood -= weights[b, t] * log_p[labels[b, t]]
    got = smoothed_cross_entropy(
        jnp.asarray(logits, jnp.float32), jnp.asarray(labels), jnp.asarray(weights), smoothing
    )
    np.testing.assert_allclose(got, (loss, likelihood, weights.sum()), rtol=1e-5)


def test_equals_torch(rng):
    torch = pytest.importorskip("torch", reason="a second implementation where torch is installed")
    logits, labels = rng.normal(size=(B * T, V)).astype(np.float32), rng.integers(0, V, B * T)
    theirs = torch.nn.functional.cross_entropy(
        torch.tensor(logits), torch.tensor(labels), label_smoothing=0.1, reduction="sum"
    )
    ours, _, _ = smoothed_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), jnp.ones(B * T), 0.1)
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)


def test_padding_has_no_gradient(rng):
    logits = jnp.asarray(rng.normal(size=(B, T, V)), jnp.float32)
    weights = jnp.zeros((B, T)).at[0, 0].set(1)
    labels = jnp.zeros((B, T), int)
    gradient = jax.grad(lambda x: smoothed_cross_entropy(x, labels, weights, 0.1)[0])(logits)
    assert (gradient[0, 0] != 0).any()
    assert (np.asarray(gradient).reshape(-1, V)[1:] == 0).all()


def test_divergence_equals_the_formula(rng):
    a, b = rng.normal(size=(2, B, T, V)) * 3
    weights = (rng.random((B, T)) < 0.7).astype(float)
    p, q = (np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True) for x in (a, b))
    expected = 0.5 * ((p * np.log(p / q) + q * np.log(q / p)).sum(axis=-1) * weights).sum()
    first, second = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    got = symmetric_divergence(first, second, jnp.asarray(weights))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    # Far-off logits neither overflow nor become NaN, and equal ones have no divergence and no gradient.
    assert jnp.isfinite(symmetric_divergence(first * 1e4, second, jnp.asarray(weights)))
    same, gradient = jax.value_and_grad(symmetric_divergence)(first, first, jnp.asarray(weights))
    assert same == 0
    np.testing.assert_array_equal(gradient, 0)


def test_divergence_equals_torch(rng):
    torch = pytest.importorskip("torch", reason="a second implementation where torch is installed")
    a, b = rng.normal(size=(2, B * T, V)).astype(np.float32)
    p, q = (torch.nn.functional.log_softmax(torch.tensor(x), -1) for x in (a, b))
    theirs = sum(
        torch.nn.functional.kl_div(x, y, log_target=True, reduction="sum") for x, y in ((p, q), (q, p))
    )
    ours = symmetric_divergence(jnp.asarray(a), jnp.asarray(b), jnp.ones(B * T))
    np.testing.assert_allclose(ours, theirs.item() / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "smoothing", "mesh", "length"),
    [
        (jnp.float32, 0.0, None, 6),
        (jnp.float32, 0.1, None, 7),
        (jnp.bfloat16, 0.1, None, 6),
        (jnp.float32, 0.1, "data=2,tensor=2,sequence=2", 6),
        (jnp.bfloat16, 0.0, "data=2,tensor=2,sequence=2", 6),
    ],
)
def test_in_parts_it_is_the_same_with_gradients(rng, dtype, smoothing, mesh, length):
    rows, width, V = 4, 7, 12
    states = jnp.asarray(rng.normal(size=(rows, length, width)), dtype)
    table = jnp.asarray(rng.normal(size=(V, width)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, V, (rows, length)))
    weights = jnp.asarray(rng.random((rows, length)) < 0.7)

    def total(states, table, parts):
        def logits_of(x):
            return float32_product("...d,vd->...v", x, table.astype(x.dtype))

        return cross_entropy_in_parts(logits_of, states, labels, weights, smoothing, parts=parts)

    def in_parts(parts):
        def loss(states, table):
            sums = total(states, table, parts)
            return sums[0], sums

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(states, table)

    (_, expected), expected_gradients = in_parts(1)
    with on_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
        if mesh:  # the vocabulary and the states are sharded as in a run
            table = jax.device_put(table, jax.NamedSharding(make_mesh(mesh), jax.P("tensor", None)))
            sharding = jax.NamedSharding(make_mesh(mesh), jax.P("data", "sequence", None))
            states = jax.device_put(states, sharding)
        (_, sums), gradients = in_parts(3)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    for ours, reference in zip(gradients, expected_gradients, strict=True):
        tolerance = (1e-5 if dtype == jnp.float32 else 0.02) * float(jnp.abs(reference).max())
        np.testing.assert_allclose(ours.astype(jnp.float32), reference.astype(jnp.float32), atol=tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("length", [6, 7])
def test_an_accelerator_computes_the_gradient_with_the_loss(rng, monkeypatch, smoothing, length):
    rows, width, V = 4, 7, 12
    states = jnp.asarray(rng.normal(size=(rows, length, width)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(V, width)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, V, (rows, length)))
    weights = jnp.asarray(rng.random((rows, length)) < 0.7)

    def outputs(parts):
        def loss(states, table):
            logits_of = functools.partial(float32_product, "...d,vd->...v", y=table)
            sums = cross_entropy_in_parts(logits_of, states, labels, weights, smoothing, parts=parts)
            return 3 * sums[0], sums

        def step(states, table):
            return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(states, table)

        return jax.jit(step)(states, table), program_flops(jax.make_jaxpr(step)(states, table))

    ((_, expected), expected_gradients), flops = outputs(1)
    monkeypatch.setattr(losses, "platform", lambda: "gpu")
    ((_, sums), gradients), flops_in_parts = outputs(3)
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, reference, atol=1e-5)
    padding = -(-length // 3) * 3 / length
    assert flops_in_parts == pytest.approx(flops * padding), "logits are computed once"


def test_what_is_drawn_does_not_depend_on_the_parts(rng):
    logits = jnp.asarray(rng.normal(size=(400, 7, 3)), jnp.float32)
    keys = token_keys(jax.random.key(0), (400, 7))
    at_once, in_parts = (tokens_in_parts(sample_tokens, (keys, logits), parts) for parts in (1, 3))
    np.testing.assert_array_equal(at_once, in_parts)
    # 2,800 draws of each token follow the softmax within four standard errors.
    expected = np.asarray(jax.nn.softmax(logits))
    shares = np.eye(3)[np.asarray(at_once)].mean(axis=(0, 1))
    np.testing.assert_allclose(shares, expected.mean(axis=(0, 1)), atol=4 * np.sqrt(0.25 / 2_800))


def test_in_parts_it_holds_a_part_of_the_logits():
    rows, length, width, vocab = 4, 256, 16, 4_096

    def loss(states, table, parts):
        labels = jnp.zeros((rows, length), jnp.int32)
        logits_of = functools.partial(float32_product, "...d,vd->...v", y=table)
        return cross_entropy_in_parts(logits_of, states, labels, labels == 0, parts=parts)[0]

    def temporaries(parts):
        shapes = (
            jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
            jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        )
        step = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        return step.lower(*shapes, parts).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * rows * length * vocab
    assert temporaries(1) > logits
    assert temporaries(16) < logits / 4


def test_the_number_of_parts_is_near_the_requested_one():
    assert ComputeOptions(loss_parts=6).loss_parts_of(1, 24, V) == 6
    assert ComputeOptions(loss_parts=5).loss_parts_of(1, 24, V) == 6
    # For a prime number of tokens, the next divisor would make 1,021 parts of one token.
    assert ComputeOptions(loss_parts=6).loss_parts_of(1, 1_021, V) == 6
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"loss_parts={value} is below 1"):
            ComputeOptions(loss_parts=value)
