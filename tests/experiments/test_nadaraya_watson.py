"""Kernel regression as the experiment runs it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments.nadaraya_watson import Arguments, compare, curve
from tests.cases import others_long
from transformer_jax.distributed.sharding import rule_of
from transformer_jax.errors import UserError
from transformer_jax.models.regression.kernel_regression import KernelRegression, KernelRegressionConfig
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.regression.kernel_width import best_width, learn_width


@pytest.fixture
def examples(rng):
    key = rng.uniform(0, 5, (60, 1))
    return jnp.asarray(key, jnp.float32), jnp.asarray(curve(key) + rng.normal(scale=0.3, size=key.shape))


def loss_at(config, examples, width):
    """Compute the leave-one-out error, one example at a time."""
    key, value = (np.asarray(a, np.float64)[:, 0] for a in examples)
    errors = []
    for n in range(len(key)):
        weights = np.exp(-(((key - key[n]) / width) ** 2) / 2)
        weights[n] = 0
        errors.append((weights @ value / weights.sum() - value[n]) ** 2)
    return np.mean(errors)


def test_the_learned_width_has_the_lowest_leave_one_out_error(examples):
    config = KernelRegressionConfig("gaussian", width=0.8)
    model, losses = learn_width(KernelRegression(config), *examples, steps=300)
    np.testing.assert_allclose(losses[0], loss_at(config, examples, 0.8), rtol=1e-4)
    assert losses[-1] < 0.7 * losses[0]
    width = float(model.width)
    for other_width in (0.8 * width, 1.25 * width):
        assert loss_at(config, examples, width) < loss_at(config, examples, other_width)


def test_a_search_finds_the_best_width(examples):
    config = KernelRegressionConfig("gaussian")
    widths = np.geomspace(0.05, 3, 30)
    expected = widths[np.argmin([loss_at(config, examples, width) for width in widths])]
    assert best_width(config, *examples, widths.tolist()) == pytest.approx(expected)


def test_widths_per_coordinate_learn_which_coordinate_matters(rng):
    key = rng.uniform(0, 5, (80, 2))
    examples = jnp.asarray(key, jnp.float32), jnp.asarray(curve(key[:, :1]), jnp.float32)
    config = KernelRegressionConfig("gaussian", inputs=2, each_coordinate=True)
    model, _ = learn_width(KernelRegression(config), *examples, steps=200)
    first, second = np.asarray(model.width)
    assert second > 3 * first, "the second coordinate has no effect"


def test_its_parameter_has_a_sharding_rule():
    assert rule_of(next(iter(named_leaves(KernelRegression(KernelRegressionConfig("boxcar"))))))


@pytest.mark.parametrize("task", others_long(["regression", "classification"], "classification"))
def test_the_table_and_the_picture(task, tmp_path):
    rows = compare(Arguments(task=task, examples=40, steps=20, out_dir=str(tmp_path)))
    assert json.loads((tmp_path / "table.json").read_text()) == rows
    by_kernel = {(row["kernel"], row["fit"]): row for row in rows}
    assert set(by_kernel) == {("constant", "fixed")} | {
        (kernel, fit) for kernel in ("gaussian", "boxcar", "epanechnikov") for fit in ("fixed", "learned")
    }
    if task == "regression":
        assert by_kernel["gaussian", "learned"]["error"] < by_kernel["constant", "fixed"]["error"] / 3
    else:
        assert by_kernel["gaussian", "learned"]["accuracy"] > by_kernel["constant", "fixed"]["accuracy"] + 25
    with Image.open(tmp_path / f"{task}.png") as picture:
        assert picture.size[0] > 1_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(width=0.0), "`width` 0.0 must be above 0"),
        (dict(width=-1.0), "`width` -1.0 must be above 0"),
        (dict(kernels=("cosine",)), "unknown kernel 'cosine': choose one of .*gaussian"),
        (dict(examples=1), "`examples` 1 must be at least 2"),
        (dict(noise=-0.1), "`noise` -0.1 must be at least 0"),
        (dict(steps=0), "`steps` 0 must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        compare(Arguments(**arguments))


def test_wrong_configs():
    with pytest.raises(ValueError, match="width of 0 must be above 0"):
        KernelRegressionConfig("gaussian", width=0)
    with pytest.raises(ValueError, match="kernel 'cosine' is not one of"):
        KernelRegressionConfig("cosine")
    with pytest.raises(ValueError, match="inputs=0 must be at least 1"):
        KernelRegressionConfig("gaussian", inputs=0)
