"""Learning-rate schedules: functions of the step, counted from 0."""

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("inverse_sqrt", "cosine", "linear", "constant")


def inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """Linear warm-up to `peak` at step `warmup`, then peak * sqrt(warmup / step).

    With peak = (D * warmup)^-0.5 this is the paper's schedule (Vaswani et al. 2017, equation 3).
    """

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32) + 1.0  # the paper counts from 1
        return peak * jnp.minimum(step / warmup, jnp.sqrt(warmup / step))

    return schedule


def make_schedule(name: str, *, peak: float, warmup: int, steps: int) -> optax.Schedule:
    """A schedule by name.

    Args:
      name: one of `SCHEDULES`; all warm up linearly, cosine ends at 1% of the peak and linear at 0.
      peak: the largest learning rate.
      warmup: number of warm-up steps.
      steps: number of steps in all; only "cosine" and "linear" depend on it.

    Raises:
      ValueError: an unknown name.
    """
    warmup = max(1, warmup)
    if name == "inverse_sqrt":
        return inverse_sqrt(peak, warmup)
    if name == "cosine":
        warmup = min(warmup, max(1, steps - 1))
        return optax.warmup_cosine_decay_schedule(
            peak / warmup, peak, warmup, max(steps, warmup + 1), peak / 100
        )
    if name == "linear":
        warmup = min(warmup, max(1, steps - 1))
        falling = optax.linear_schedule(peak, 0.0, max(1, steps - warmup))
        return optax.join_schedules(
            [optax.linear_schedule(peak / warmup, peak, warmup - 1), falling], [warmup - 1]
        )
    if name == "constant":
        return optax.join_schedules(
            [optax.linear_schedule(peak / warmup, peak, warmup - 1), optax.constant_schedule(peak)],
            [warmup - 1],
        )
    raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")


def growing_weight_decay(first: float, growth: float, steps: int) -> optax.Schedule | float:
    """Weight decay that goes from `first` to `growth` times it along a cosine (Caron et al. 2021, section 3.2).

    Args:
      first: of the first step.
      growth: factor of the last step; 1 is a constant.
      steps: number of steps in all.
    """
    return first if growth == 1 else optax.cosine_decay_schedule(first, steps, alpha=growth)


def extends(name: str) -> bool:
    """Whether a run of this schedule may be given more steps after it ended."""
    return name not in ("cosine", "linear")
