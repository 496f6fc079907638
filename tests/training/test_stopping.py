"""SIGTERM, the signal of a preemption, in every phase of a run."""

import contextlib
import itertools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.training.test_guards import loss
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.loop import Stopped, fit
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.step import create_state, make_train_step
from transformer_jax.training.totals import Totals

STEPS = 12


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def train(folder, phase=None):
    """Start or resume a run, send SIGTERM in the phase, and return the final state."""
    optimizer = optax.adam(0.1)
    state = create_state({"w": jnp.ones(3)}, optimizer, jax.random.key(0))
    compiled = make_train_step(loss, optimizer)
    calls = itertools.count(1)

    def train_step(state, batch):
        if (phase, next(calls)) in (("compilation", 1), ("step", 4)):
            terminate()
        return compiled(state, batch)

    def evaluate(state):
        if phase == "evaluation":
            terminate()
        return [("score", 1.0)]

    class InterruptedCheckpoints(Checkpoints):
        def _check_room(self, parts):
            if phase == "save":
                terminate()
            super()._check_room(parts)

    folder.mkdir(exist_ok=True)
    with InterruptedCheckpoints(folder / "checkpoints", save_every=5) as checkpoints:
        state, totals = checkpoints.restore(state) or (state, Totals())
        step = int(state.step)
        with contextlib.closing(MetricsLog(folder, step)) as log:
            state, _ = fit(
                state,
                train_step,
                (np.full(3, 0.1 * n, np.float32) for n in range(step, STEPS)),
                steps=STEPS,
                schedule=optax.constant_schedule(0.1),
                log=log,
                checkpoints=checkpoints,
                save_every=5,
                evaluate=evaluate,
                evaluate_every=6,
                best="score",
                totals=totals,
            )
    return state


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("uninterrupted") / "run")


@pytest.mark.parametrize(("phase", "saved"), [("compilation", 1), ("step", 4), ("evaluation", 7), ("save", 6)])
def test_sigterm_ends_with_a_checkpoint_within_one_step(tmp_path, uninterrupted, phase, saved):
    with pytest.raises(Stopped, match=f"stopped after step {saved}, which is saved"):
        train(tmp_path / "run", phase)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        assert checkpoints.steps()[-1] == saved
        assert checkpoints.is_complete(saved)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = train(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, resumed.trained, uninterrupted.trained)
    jax.tree.map(np.testing.assert_array_equal, resumed.optimizer_state, uninterrupted.optimizer_state)
