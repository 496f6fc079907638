"""The loop's response to a failed step: a loss that is not finite, a spike, or too little memory."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.errors import UserError
from transformer_jax.training import loop
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.loop import MOST_SKIPPED, Diverged, fit
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.spikes import SpikeWatch
from transformer_jax.training.step import create_state, make_train_step


def loss(model, extra, batch, key):
    """Return a parabola around the batch, which is not finite for a batch of NaN or infinity."""
    total = jnp.square(model["w"] - batch).sum()
    return {"loss": total}, {"loss": jnp.float32(1)}


def train(folder, batches, train_step=None):
    optimizer = optax.adam(0.1)
    state = create_state({"w": jnp.ones(3)}, optimizer, jax.random.key(0), with_ema=True)
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints", save_every=100)
    with contextlib.closing(MetricsLog(folder)) as log, checkpoints:
        state, _ = fit(
            state,
            train_step or make_train_step(loss, optimizer, ema_decay=0.5),
            iter(batches),
            steps=len(batches),
            schedule=optax.constant_schedule(0.1),
            log=log,
            checkpoints=checkpoints,
            save_every=100,
            evaluate=lambda state: [("score", 1.0)],
            evaluate_every=100,
            best="score",
            unit="target_tokens",
        )
    return state


GOOD = [np.full(3, 0.1 * n, np.float32) for n in range(6)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, bad):
    bad_batch = np.full(3, bad, np.float32)
    expected = train(tmp_path / "good", GOOD)
    state = train(tmp_path / "bad", [*GOOD[:2], bad_batch, *GOOD[2:4], bad_batch, *GOOD[4:]])
    assert int(state.step) == len(GOOD) + 2
    for name in ("trained", "optimizer_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(expected, name))
    rows = [row for row in read_metrics(tmp_path / "bad") if "loss" in row]
    assert rows[-1]["skipped_steps"] == 2
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["target_tokens"] == len(GOOD), "skipped tokens are not counted"
    # A resumed run continues the count.
    with contextlib.closing(MetricsLog(tmp_path / "bad", len(GOOD) + 2)) as log:
        assert log.last["skipped_steps"] == 2
    assert "skipped_steps" not in read_metrics(tmp_path / "good")[0]


def test_too_many_consecutive_skipped_steps_end_the_run(tmp_path):
    bad_batches = [np.full(3, np.nan, np.float32)] * MOST_SKIPPED
    with pytest.raises(
        Diverged, match=rf"step {MOST_SKIPPED + 2}: the loss or its gradient is nan, as in the 9 previous steps"
    ):
        train(tmp_path / "run", [*GOOD[:2], *bad_batches, *GOOD])
    # A good step between them resets the count.
    train(tmp_path / "other", [*bad_batches[1:], GOOD[0], *bad_batches[1:], GOOD[1]])


def test_a_spike_is_reported():
    rng = np.random.default_rng(0)
    watch = SpikeWatch()
    steady = [4.0 - 0.01 * n + 0.1 * rng.normal() for n in range(150)]
    assert not any(watch.is_spike(value) for value in steady)
    assert watch.is_spike(9.0)
    assert watch.is_spike(9.0), "one spike barely widens the usual range"
    assert not watch.is_spike(2.4)
    # A lasting new level is not an endless series of spikes.
    assert sum(watch.is_spike(6.0 + 0.1 * rng.normal()) for _ in range(300)) < 30
    flat = SpikeWatch()
    assert not any(flat.is_spike(1.0 + 1e-6 * n) for n in range(100)), "changes are negligible"
    assert not SpikeWatch().is_spike(1e9), "no history yet"


def test_spikes_are_counted_in_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SpikeWatch", lambda: SpikeWatch(first=3))
    rng = np.random.default_rng(0)
    batches = [np.float32(1 + 0.1 * rng.normal(size=3)) for _ in range(8)]
    train(tmp_path, [*batches, np.full(3, 50.0, np.float32), *batches])
    assert [row for row in read_metrics(tmp_path) if "loss" in row][-1]["loss_spikes"] == 1


def test_the_error_for_too_little_memory_names_the_need_and_the_options(tmp_path):
    step = make_train_step(loss, optax.adam(0.1), ema_decay=0.5)

    class StepWithoutMemory:
        lower = staticmethod(step.lower)

        def __call__(self, state, batch):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")

    with pytest.raises(
        UserError, match=r"out of memory: a step needs about .* GiB on each device; split the batch"
    ) as error:
        train(tmp_path, GOOD, train_step=StepWithoutMemory())
    for option in ("`accumulation`", "`remat`", "`mesh`"):
        assert option in str(error.value)

    def failing_step(state, batch):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        train(tmp_path / "other", GOOD, train_step=failing_step)
