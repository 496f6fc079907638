"""Optimizers by name, from Optax, with masks from the name table."""

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from transformer_jax.distributed.mesh import constrained
from transformer_jax.distributed.sharding import decay_mask, matrix_stages, muon_dimensions
from transformer_jax.parameter_names import map_names, named_leaves

OPTIMIZERS = ("adam", "muon")


def make_optimizer(
    name: str,
    schedule: optax.Schedule,
    model: Any,
    *,
    trained: Container[str] | None = None,
    weight_decay: float | optax.Schedule,
    clip: float,
    b1: float,
    b2: float,
    epsilon: float,
    layer_decay: float = 1.0,
    shard_optimizer: bool = False,
) -> optax.GradientTransformation:
    """Clipping by the global norm, then the optimizer, for parameters by canonical name.

    Args:
      name: "adam" (AdamW where `weight_decay` is not 0; Loshchilov & Hutter 2019) or "muon" (Jordan et
        al. 2024: matrices orthogonalised, with updates scaled to Adam's size; Adam for the rest).
      schedule: learning rate of a step.
      model: the module, or its abstract shape; only names and axes are read.
      trained: names of the parameters that are trained; None is all.
      weight_decay: decoupled decay of the matrices, or that of a step.
      clip: largest global norm of the gradient; 0 is no clipping.
      b1, b2, epsilon: Adam's constants; the paper's are 0.9, 0.98 and 1e-9. Muon's Adam shares them but
        for epsilon, which is 1e-8 there: it guards Muon's norms as well.
      layer_decay: factor of the learning rate from each block to the one below it (Clark et al. 2020, appendix
        B): blocks/... of layer l of L take layer_decay^(L - 1 - l), embeddings layer_decay^L, all else 1.
      shard_optimizer: see `ComputeOptions`.

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
        matrices = {name for name, own in dimensions.items() if own}
        optimizer = _on_complete_matrices(optimizer, model, matrices, shard_optimizer)
    else:
        raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    parts = [optax.clip_by_global_norm(clip)] if clip else []
    decayed = [_scaled_by_layer(model, layer_decay)] if layer_decay != 1 else []
    return optax.chain(*parts, optimizer, *decayed) if parts or decayed else optimizer


def _on_complete_matrices(
    optimizer: optax.GradientTransformation, model: Any, names: Container[str], shard_optimizer: bool
) -> optax.GradientTransformation:
    """The same optimizer, given matrices that are complete on a device of the mesh.

    Each of Muon's iterations multiplies a matrix with itself, so a compiler gathers one that is sharded in each
    of them. Here the layers of a stack are sharded instead, filled up with zeros where the mesh does not divide
    their number.

    Args:
      optimizer: of a gradient by canonical name, with moments of the same names.
      model, shard_optimizer: see `make_optimizer`.
      names: of the parameters whose matrices are needed.
    """
    leaves = named_leaves(model)

    def moved(tree: Any, *, back: bool = False) -> Any:
        mesh = jax.sharding.get_abstract_mesh()

        def move(name: str, leaf: Any) -> Any:
            own = name.split("/mu/", 1)[-1]
            if own not in names:
                return leaf
            shape = leaves[own].shape
            stages, multiple = matrix_stages(own, shape, mesh, model, shard_optimizer=shard_optimizer)
            if not back:
                leaf = jnp.pad(leaf, [(0, -shape[0] % multiple), *[(0, 0)] * (leaf.ndim - 1)])
            for axes in reversed(stages) if back else stages:
                leaf = constrained(leaf, axes)
            return leaf[: shape[0]] if back else leaf

        return tree if mesh.empty else map_names(move, tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = optimizer.update(moved(updates), moved(state), moved(params))
        return moved(updates, back=True), moved(state, back=True)

    return optax.GradientTransformation(optimizer.init, update)


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
