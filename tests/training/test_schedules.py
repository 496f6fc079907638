import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.schedules import extends, growing_weight_decay, inverse_sqrt, make_schedule


def test_inverse_sqrt_equals_the_schedule_of_the_paper():
    D, warmup = 512, 4000
    schedule = inverse_sqrt((D * warmup) ** -0.5, warmup)
    for step in (1, 100, 4000, 4001, 100_000):
        paper = D**-0.5 * min(step**-0.5, step * warmup**-1.5)
        np.testing.assert_allclose(schedule(step - 1), paper, rtol=1e-6)


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warmup_rises_to_the_peak(name, warmup):
    schedule = make_schedule(name, peak=0.5, warmup=warmup, steps=100)
    values = [float(schedule(step)) for step in range(100)]
    assert max(values) == pytest.approx(0.5)
    assert all(math.isfinite(v) and v > 0 for v in values)
    assert values[: max(1, warmup)] == sorted(values[: max(1, warmup)])


def test_cosine_ends_low():
    schedule = make_schedule("cosine", peak=1.0, warmup=10, steps=100)
    assert float(schedule(100)) == pytest.approx(0.01)
    assert float(schedule(55)) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_weight_decay_grows_along_a_cosine(name):
    """A step with a gradient of zero changes a matrix only by weight decay."""
    decay, steps = growing_weight_decay(0.04, 10.0, 8), 8
    weights = {"query/kernel": jnp.full((3, 5), 2.0)}
    optimizer = make_optimizer(
        name, optax.constant_schedule(0.5), weights, weight_decay=decay, clip=0.0, b1=0.9, b2=0.99, epsilon=1e-8
    )
    state = optimizer.init(weights)
    for step in range(steps + 1):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, weights), state, weights)
        expected = 0.4 + (0.04 - 0.4) * (1 + np.cos(np.pi * step / steps)) / 2
        np.testing.assert_allclose(updates["query/kernel"], -0.5 * expected * 2.0, rtol=1e-5)
    assert growing_weight_decay(0.04, 1.0, 8) == 0.04


def test_schedules_that_can_be_extended():
    assert extends("inverse_sqrt")
    assert extends("constant")
    assert not extends("cosine")
    assert not extends("linear")


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown schedule 'square': choose one of"):
        make_schedule("square", peak=1.0, warmup=1, steps=2)
