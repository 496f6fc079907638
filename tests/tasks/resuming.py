"""A run that is interrupted and continued, for the tests of tasks."""

import numpy as np
import pytest

from transformer_jax import tasks
from transformer_jax.parameter_names import named_leaves


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
