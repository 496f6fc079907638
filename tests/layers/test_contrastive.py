"""The contrastive losses against their formulas in NumPy, in parts and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.distributed.mesh import ROWS, make_mesh, on_mesh
from transformer_jax.layers.contrastive import pairwise_sigmoid_loss, symmetric_cross_entropy

B, E = 24, 7
SCALE, BIAS = 9.0, -3.0


def vectors(rng, rows=B):
    x = rng.normal(size=(2, rows, E))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def softmax_oracle(images, texts):
    """Return the loss pair by pair, in float64."""
    total = 0.0
    for i in range(len(images)):
        row = [SCALE * images[i] @ text for text in texts]
        column = [SCALE * image @ texts[i] for image in images]
        for logits in (row, column):
            total += (np.log(np.sum(np.exp(logits))) - logits[i]) / 2
    return total


def sigmoid_oracle(images, texts):
    """Return the loss pair by pair, in float64."""
    total = 0.0
    for i, image in enumerate(images):
        for j, text in enumerate(texts):
            sign = 1 if i == j else -1
            total += np.log1p(np.exp(-sign * (SCALE * image @ text + BIAS)))
    return total


LOSSES = {
    "softmax": (lambda x, y, **o: symmetric_cross_entropy(x, y, jnp.float32(SCALE), **o), softmax_oracle),
    "sigmoid": (
        lambda x, y, **o: pairwise_sigmoid_loss(x, y, jnp.float32(SCALE), jnp.float32(BIAS), **o),
        sigmoid_oracle,
    ),
}
losses = pytest.mark.parametrize("name", LOSSES)


@losses
def test_losses_equal_their_formulas(name, rng):
    loss, oracle = LOSSES[name]
    images, texts = vectors(rng)
    np.testing.assert_allclose(loss(*map(jnp.float32, (images, texts))), oracle(images, texts), rtol=1e-5)


@losses
@pytest.mark.parametrize("parts", [2, 5, 24])
def test_losses_in_parts_are_the_same(name, parts, rng):
    loss, _ = LOSSES[name]
    inputs = [jnp.float32(x) for x in vectors(rng)]

    def mean(*inputs, **options):
        return loss(*inputs, **options) / B

    expected, gradients = jax.value_and_grad(mean, argnums=(0, 1))(*inputs)
    value, others = jax.jit(jax.value_and_grad(lambda *x: mean(*x, parts=parts), argnums=(0, 1)))(*inputs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for gradient, other in zip(gradients, others, strict=True):
        np.testing.assert_allclose(other, gradient, atol=1e-6)


@losses
@pytest.mark.parametrize("parts", [1, 3])
def test_eight_devices_compare_all_pairs(name, parts, rng):
    loss, _ = LOSSES[name]
    inputs = [jnp.float32(x) for x in vectors(rng)]
    mesh = make_mesh("data=4,fsdp=2")

    def function(*inputs):
        return loss(*inputs, parts=parts) / B

    expected = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*inputs)
    sharding = NamedSharding(mesh, PartitionSpec(ROWS))
    with on_mesh(mesh):
        sharded = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(
            *(jax.device_put(x, sharding) for x in inputs)
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sharded, expected)


@losses
def test_parts_hold_no_array_of_the_batch_squared(name):
    loss, _ = LOSSES[name]
    rows = 512
    shape = jax.ShapeDtypeStruct((rows, E), jnp.float32)

    def sizes(parts):
        gradient = jax.grad(lambda *x: loss(*x, parts=parts), argnums=(0, 1))
        program = jax.jit(gradient).lower(shape, shape).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert sizes(1) > 4 * rows * rows
    assert sizes(16) < rows * rows
