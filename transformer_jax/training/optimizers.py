"""Optimizers by name, from Optax, with masks from the name table."""

from collections.abc import Container
from typing import Any

import optax
import optax.contrib

from transformer_jax.distributed.sharding import decay_mask, muon_dimensions

OPTIMIZERS = ("adam", "muon")


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    model: Any,
    *,
    trained: Container[str] | None = None,
    weight_decay: float,
    clip: float,
    b1: float,
    b2: float,
    epsilon: float,
) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer, for parameters by canonical name.

    Args:
      name: "adam" (AdamW where `weight_decay` is not 0; Loshchilov & Hutter 2019) or "muon" (Jordan et
        al. 2024: matrices orthogonalised, with updates scaled to Adam's size; Adam for the rest).
      schedule: learning rate of a step.
      model: the module, or its abstract shape; only names and axes are read.
      trained: names of the parameters that are trained; None is all.
      weight_decay: decoupled decay of the matrices.
      clip: largest global norm of the gradient; 0 is no clipping.
      b1, b2, epsilon: Adam's constants; the paper's are 0.9, 0.98 and 1e-9. Muon's Adam shares them but
        for epsilon, which is 1e-8 there: it guards Muon's norms as well.

    Raises:
      ValueError: an unknown name.
    """
    decays, dimensions = decay_mask(model), muon_dimensions(model)
    if trained is not None:
        decays = {name: value for name, value in decays.items() if name in trained}
        dimensions = {name: value for name, value in dimensions.items() if name in trained}
    if name == "adam":
        optimizer = optax.adamw(schedule, b1, b2, epsilon, weight_decay=weight_decay, mask=decays)
    elif name == "muon":
        optimizer = optax.contrib.muon(
            schedule,
            weight_decay=weight_decay,
            weight_decay_mask=decays,
            adam_b1=b1,
            adam_b2=b2,
            eps=1e-8,
            muon_weight_dimension_numbers=lambda _: dimensions,
            # Update size of an Adam step (Liu et al. 2025), so that one learning rate serves both.
            consistent_rms=0.2,
        )
    else:
        raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    return optax.chain(optax.clip_by_global_norm(clip), optimizer) if clip else optimizer
