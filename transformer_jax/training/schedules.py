"""Learning-rate schedules: functions of the step, counted from 0."""

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("inverse_sqrt", "cosine", "linear", "constant")


def inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
    """Return a linear warm-up to `peak` at step `warmup`, then peak * sqrt(warmup / step).

    With peak = (D * warmup)^-0.5 this is the paper's schedule (Vaswani et al. 2017, equation 3).
    """

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32) + 1.0  # the paper counts from 1
        return peak * jnp.minimum(step / warmup, jnp.sqrt(warmup / step))

    return schedule


def make_schedule(name: str, *, peak: float, warmup: int, steps: int) -> optax.Schedule:
    """Return a schedule by name.

    Args:
      name: One of `SCHEDULES`; all warm up linearly, cosine ends at 1% of the peak and linear at 0.
      peak: The maximum learning rate.
      warmup: Number of warm-up steps.
      steps: Total number of steps; only "cosine" and "linear" depend on it.

    Raises:
      ValueError: The name is unknown.
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
    """Return a weight decay that grows along a cosine (Caron et al. 2021, section 3.2).

    Args:
      first: Weight decay of the first step.
      growth: Factor of the last step; 1 keeps it constant.
      steps: Total number of steps.
    """
    return first if growth == 1 else optax.cosine_decay_schedule(first, steps, alpha=growth)


def extends(name: str) -> bool:
    """Return whether a finished run with this schedule may be extended to more steps."""
    return name not in ("cosine", "linear")
