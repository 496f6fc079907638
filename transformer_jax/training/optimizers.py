"""Optimizers by name, from Optax, with masks from the name table."""

from collections.abc import Container
from typing import Any

import jax.numpy as jnp
import optax
import optax.contrib

from transformer_jax.distributed.sharding import decay_mask, muon_dimensions
from transformer_jax.parameter_names import named_leaves

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
    layer_decay: float = 1.0,
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

      layer_decay: factor of the learning rate from each block to the one below it (Clark et al. 2020, appendix
        B): blocks/... of layer l of L take layer_decay^(L - 1 - l), embeddings layer_decay^L, all else 1.

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
    parts = [optax.clip_by_global_norm(clip)] if clip else []
    decayed = [_scaled_by_layer(model, layer_decay)] if layer_decay != 1 else []
    return optax.chain(*parts, optimizer, *decayed) if parts or decayed else optimizer


def _scaled_by_layer(model: Any, decay: float) -> optax.GradientTransformation:
    """Scales each update by the depth of its parameter."""
    leaves = named_leaves(model)
    layers = max((x.shape[0] for name, x in leaves.items() if "blocks/" in name), default=0)
    # In front of the first block: tables, patches, and what widens ELECTRA's embeddings.
    encoder = "encoder/" if any(name.startswith("encoder/") for name in leaves) else ""
    lowest = ("embedding", "patches/", f"{encoder}projection/")

    def scaled(name: str, update: Any) -> Any:
        if "blocks/" in name:
            depth = jnp.arange(layers - 1, -1, -1, dtype=update.dtype)
            return update * (decay**depth).reshape(-1, *[1] * (update.ndim - 1))
        return update * decay**layers if any(part in name for part in lowest) else update

    def apply(updates: Any, params: Any = None) -> Any:
        del params
        return {name: scaled(name, update) for name, update in updates.items()}

    return optax.stateless(apply)
