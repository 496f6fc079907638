import math

import numpy as np
import pytest

from transformer_jax.training.schedules import extends, inverse_sqrt, make_schedule


def test_inverse_sqrt_is_the_papers_schedule():
    D, warmup = 512, 4000
    schedule = inverse_sqrt((D * warmup) ** -0.5, warmup)
    for step in (1, 100, 4000, 4001, 100_000):
        paper = D**-0.5 * min(step**-0.5, step * warmup**-1.5)
        np.testing.assert_allclose(schedule(step - 1), paper, rtol=1e-6)


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_warm_up_rises_to_the_peak(name, warmup):
    schedule = make_schedule(name, peak=0.5, warmup=warmup, steps=100)
    values = [float(schedule(step)) for step in range(100)]
    assert max(values) == pytest.approx(0.5)
    assert all(math.isfinite(v) and v > 0 for v in values)
    assert values[: max(1, warmup)] == sorted(values[: max(1, warmup)])


def test_cosine_ends_low():
    schedule = make_schedule("cosine", peak=1.0, warmup=10, steps=100)
    assert float(schedule(100)) == pytest.approx(0.01)
    assert float(schedule(55)) == pytest.approx(0.5, abs=0.02)


def test_which_schedules_extend():
    assert extends("inverse_sqrt")
    assert extends("constant")
    assert not extends("cosine")
    assert not extends("linear")


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown schedule 'square': choose one of"):
        make_schedule("square", peak=1.0, warmup=1, steps=2)
