"""Runs that must equal another one: resumed, on several devices, in micro-batches; for the tests of tasks."""

import numpy as np
import pytest

from transformer_jax import tasks
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.metrics import read_metrics


def losses(folder):
    """Return the training losses of a run."""
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def check_devices_and_micro_batches(train, config_of, complete_folder, folder, **changes):
    """Check that eight devices, and micro-batches, have the losses of one device and of one batch.

    Args:
      train: Function (config, folder, mesh=None), which trains a run.
      config_of: Function (**changes) -> config of a run.
      complete_folder: Folder of the run on one device.
      folder: Folder of the new runs.
      **changes: Changes of the config for micro-batches, such as no dropout.
    """
    train(config_of(), folder / "eight", mesh="data=2,fsdp=2,tensor=2")
    np.testing.assert_allclose(losses(folder / "eight"), losses(complete_folder), rtol=2e-3)
    train(config_of(accumulation=2, steps=4, **changes), folder / "two")
    train(config_of(steps=4, **changes), folder / "one")
    np.testing.assert_allclose(losses(folder / "two"), losses(folder / "one"), rtol=2e-3)


def resumed_results(train, task_type, complete_folder, folder, monkeypatch):
    """Interrupt a run at its first evaluation, resume it, compare its parameters, and return its results.

    Args:
      train: Function (folder) -> results, which trains or resumes the run.
      task_type: Class of the task.
      complete_folder: Folder of the same run without an interruption.
      folder: Folder of the interrupted run.
      monkeypatch: The fixture.
    """

    def halt(*_):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(task_type, "validate", halt)
        with pytest.raises(InterruptedError):
            train(folder)
    results = train(folder)
    expected, resumed = (named_leaves(tasks.load(path).model) for path in (complete_folder, folder))
    assert expected.keys() == resumed.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    return results
