"""What the loop does with a step that went wrong: not finite, far off, or too large for the memory."""

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
    """A parabola around the batch; a batch of NaN or of infinity spoils it."""
    total = jnp.square(model["w"] - batch).sum()
    return {"loss": total}, {"loss": jnp.float32(1)}


def trained(folder, batches, **others):
    optimizer = optax.adam(0.1)
    state = create_state({"w": jnp.ones(3)}, optimizer, jax.random.key(0), with_ema=True)
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints", save_every=100)
    with contextlib.closing(MetricsLog(folder)) as log, checkpoints:
        state, _ = fit(
            state,
            others.pop("train_step", None) or make_train_step(loss, optimizer, ema_decay=0.5),
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
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, bad):
    spoiled = np.full(3, bad, np.float32)
    expected = trained(tmp_path / "good", GOOD)
    found = trained(tmp_path / "bad", [*GOOD[:2], spoiled, *GOOD[2:4], spoiled, *GOOD[4:]])
    assert int(found.step) == len(GOOD) + 2
    for name in ("trained", "optimizer_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(expected, name))
    rows = [row for row in read_metrics(tmp_path / "bad") if "loss" in row]
    assert rows[-1]["skipped_steps"] == 2
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["target_tokens"] == len(GOOD), "what was skipped was not learned from"
    # The count goes on where the run does.
    with contextlib.closing(MetricsLog(tmp_path / "bad", len(GOOD) + 2)) as log:
        assert log.last["skipped_steps"] == 2
    assert "skipped_steps" not in read_metrics(tmp_path / "good")[0]


def test_too_many_in_a_row_end_the_run(tmp_path):
    spoiled = [np.full(3, np.nan, np.float32)] * MOST_SKIPPED
    with pytest.raises(
        Diverged, match=rf"step {MOST_SKIPPED + 2}: the loss or its gradient is nan, as in the 9 steps"
    ):
        trained(tmp_path / "run", [*GOOD[:2], *spoiled, *GOOD])
    # With a good one between them they are not in a row.
    trained(tmp_path / "other", [*spoiled[1:], GOOD[0], *spoiled[1:], GOOD[1]])


def test_a_spike_is_reported():
    rng = np.random.default_rng(0)
    watch = SpikeWatch()
    steady = [4.0 - 0.01 * n + 0.1 * rng.normal() for n in range(150)]
    assert not any(watch.is_spike(value) for value in steady)
    assert watch.is_spike(9.0)
    assert watch.is_spike(9.0), "the one before widened little what is usual"
    assert not watch.is_spike(2.4)
    # A level that lasts is not one spike after another.
    assert sum(watch.is_spike(6.0 + 0.1 * rng.normal()) for _ in range(300)) < 30
    flat = SpikeWatch()
    assert not any(flat.is_spike(1.0 + 1e-6 * n) for n in range(100)), "of no size"
    assert not SpikeWatch().is_spike(1e9), "nothing is known yet"


def test_spikes_stand_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SpikeWatch", lambda: SpikeWatch(first=3))
    rng = np.random.default_rng(0)
    usual = [np.float32(1 + 0.1 * rng.normal(size=3)) for _ in range(8)]
    trained(tmp_path, [*usual, np.full(3, 50.0, np.float32), *usual])
    assert [row for row in read_metrics(tmp_path) if "loss" in row][-1]["loss_spikes"] == 1


def test_out_of_memory_is_answered_with_the_need_and_the_options(tmp_path):
    real = make_train_step(loss, optax.adam(0.1), ema_decay=0.5)

    class Full:
        lower = staticmethod(real.lower)

        def __call__(self, state, batch):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")

    with pytest.raises(
        UserError, match=r"out of memory: a step needs about .* GiB on each device; split the batch"
    ) as e:
        trained(tmp_path, GOOD, train_step=Full())
    for dial in ("`accumulation`", "`remat`", "`mesh`"):
        assert dial in str(e.value)

    def broken(state, batch):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        trained(tmp_path / "other", GOOD, train_step=broken)
