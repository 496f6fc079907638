"""Rotary positions against complex multiplication in float64 and against transformers' frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.positions.rotary import RotaryScaling, rotary_frequencies, rotate, rotation

B, T, H, K = 2, 7, 3, 10
SCALINGS = {
    "linear": RotaryScaling("linear", 4.0),
    "llama3": RotaryScaling("llama3", 8.0, original_length=512, low_factor=1.0, high_factor=4.0),
    "yarn": RotaryScaling("yarn", 4.0, original_length=256, beta_fast=32.0, beta_slow=1.0),
}


def by_complex_numbers(x, positions, theta, width):
    """Multiply each pair of dimensions, as a complex number, by exp(i * position * frequency)."""
    half = width // 2
    frequencies = np.array([theta ** (-2 * i / width) for i in range(half)])
    rotations = np.exp(1j * positions[..., None] * frequencies)
    rotated = (x[..., :half] + 1j * x[..., half:width]) * rotations[..., :, None, :]
    return np.concatenate([rotated.real, rotated.imag, x[..., width:]], axis=-1)


@pytest.mark.parametrize("width", [K, 6])
@pytest.mark.parametrize("per_row", [False, True])
def test_it_is_a_complex_multiplication(rng, width, per_row):
    x = rng.normal(size=(B, T, H, K))
    positions = rng.integers(0, 90, (B, T)) if per_row else np.arange(T) + 5
    rotations = rotation(jnp.asarray(positions), rotary_frequencies(width, theta=100.0))
    ours = rotate(jnp.asarray(x, jnp.float32), rotations)
    np.testing.assert_allclose(ours, by_complex_numbers(x, positions, 100.0, width), atol=3e-5)


def test_products_depend_on_the_distance_alone(rng):
    query, key = (jnp.asarray(rng.normal(size=(1, 1, H, K)), jnp.float32) for _ in range(2))
    frequencies = rotary_frequencies(K, theta=10_000.0)

    def product(i, j):
        rotated = (rotate(x, rotation(jnp.array([p]), frequencies)) for x, p in ((query, i), (key, j)))
        return jnp.einsum("bthk,bshk->h", *rotated)

    np.testing.assert_allclose(product(3, 1), product(103, 101), atol=1e-4)
    assert jnp.abs(product(3, 1) - product(1, 3)).max() > 1e-3


def test_dtype_and_magnitude(rng):
    x = jnp.asarray(rng.normal(size=(B, T, H, K)), jnp.bfloat16)
    rotated = rotate(x, rotation(jnp.arange(T), rotary_frequencies(K, theta=100.0), magnitude=2.0))
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.linalg.norm(np.float32(rotated), axis=-1), 2 * np.linalg.norm(np.float32(x), axis=-1), rtol=0.02
    )


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_keeps_the_fast_and_slows_the_slow(kind):
    plain, scaled = (rotary_frequencies(64, theta=10_000.0, scaling=s) for s in (None, SCALINGS[kind]))
    ratio = plain / scaled
    assert ratio[-1] == pytest.approx(SCALINGS[kind].factor, rel=1e-5)
    assert (np.diff(ratio) > -1e-5).all()
    assert ratio[0] == pytest.approx(SCALINGS[kind].factor if kind == "linear" else 1.0, rel=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["default", *SCALINGS])
@pytest.mark.parametrize("head_width", [16, 64])
def test_frequencies_equal_transformers(kind, head_width):
    transformers = pytest.importorskip("transformers", reason="a second implementation where installed")
    pytest.importorskip("torch", reason="transformers computes with torch")
    rope = {"rope_type": kind, "rope_theta": 10_000.0}
    scaling = SCALINGS.get(kind)
    if scaling is not None:
        rope["factor"] = scaling.factor
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = scaling.original_length
    if kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
    config = transformers.LlamaConfig(
        hidden_size=2 * head_width, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=rope
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    ours = rotary_frequencies(head_width, theta=10_000.0, scaling=scaling)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-5)
    assert theirs.attention_scaling == pytest.approx(1.0 if scaling is None else scaling.magnitude)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rotary_frequencies(7, theta=1e4), "the width 7 is odd"),
        (lambda: RotaryScaling("dynamic", 2.0), "'dynamic' is not one of linear, llama3, yarn"),
        (lambda: RotaryScaling("linear", 0.5), "factor of 0.5 is below 1"),
        (lambda: RotaryScaling("yarn", 2.0), "needs original_length"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
