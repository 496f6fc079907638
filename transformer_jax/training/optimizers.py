"""Optax optimizers by name, with masks from the table of parameter names."""

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
    """Return an optimizer of parameters by canonical name, after clipping by the global norm.

    Args:
      name: "adam" (AdamW if `weight_decay` is not 0; Loshchilov & Hutter 2019) or "muon" (Jordan et al. 2024:
        orthogonalized updates of matrices, scaled to the size of Adam's; Adam for the other parameters).
      schedule: Learning rate of a step.
      model: The module, or its abstract shape; only names and axes are read.
      trained: Names of the parameters to train; None trains all.
      weight_decay: Decoupled decay of the matrices, or its schedule.
      clip: Maximum global norm of the gradient; 0 disables clipping.
      b1: Decay of Adam's first moment; 0.9 in the Transformer paper.
      b2: Decay of Adam's second moment; 0.98 in the Transformer paper.
      epsilon: Adam's epsilon; 1e-9 in the Transformer paper. Muon uses 1e-8, which also guards its norms.
      layer_decay: Factor of the learning rate from each block to the block below (Clark et al. 2020, appendix
        B): layer l of L has the factor layer_decay^(L - 1 - l), embeddings layer_decay^L, other parameters 1.
      shard_optimizer: See `ComputeOptions`.

    Raises:
      ValueError: The name is unknown.
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
            # The update size of an Adam step (Liu et al. 2025), so that both share one learning rate.
            consistent_rms=0.2,
        )
        matrices = {name for name, axes in dimensions.items() if axes}
        optimizer = _with_unsharded_matrices(optimizer, model, matrices, shard_optimizer)
    else:
        raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    parts = [optax.clip_by_global_norm(clip)] if clip else []
    scaling = [_scale_by_layer(model, layer_decay)] if layer_decay != 1 else []
    return optax.chain(*parts, optimizer, *scaling) if parts or scaling else optimizer


def _with_unsharded_matrices(
    optimizer: optax.GradientTransformation, model: Any, names: Container[str], shard_optimizer: bool
) -> optax.GradientTransformation:
    """Wrap an optimizer so that each device computes with complete matrices.

    Each iteration of Muon multiplies a matrix with itself, for which the compiler would gather a sharded matrix
    every time. Here the layers of a stack are sharded instead, padded with zeros if the mesh does not divide
    their number.

    Args:
      optimizer: An optimizer of parameters by canonical name, whose moments have the same names.
      model: See `make_optimizer`.
      names: Names of the parameters whose matrices must be complete.
      shard_optimizer: See `make_optimizer`.
    """
    leaves = named_leaves(model)

    def reshard(tree: Any, *, back: bool = False) -> Any:
        mesh = jax.sharding.get_abstract_mesh()

        def reshard_leaf(path: str, leaf: Any) -> Any:
            name = path.split("/mu/", 1)[-1]
            if name not in names:
                return leaf
            shape = leaves[name].shape
            stages, multiple = matrix_stages(name, shape, mesh, model, shard_optimizer=shard_optimizer)
            if not back:
                leaf = jnp.pad(leaf, [(0, -shape[0] % multiple), *[(0, 0)] * (leaf.ndim - 1)])
            for axes in reversed(stages) if back else stages:
                leaf = constrained(leaf, axes)
            return leaf[: shape[0]] if back else leaf

        return tree if mesh.empty else map_names(reshard_leaf, tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = optimizer.update(reshard(updates), reshard(state), reshard(params))
        return reshard(updates, back=True), reshard(state, back=True)

    return optax.GradientTransformation(optimizer.init, update)


def _scale_by_layer(model: Any, decay: float) -> optax.GradientTransformation:
    """Return a transformation that scales each update by the depth of its parameter."""
    leaves = named_leaves(model)
    layers = max((x.shape[0] for name, x in leaves.items() if "blocks/" in name), default=0)
    # Parameters before the first block: tables, patches, and the projection of ELECTRA's embeddings.
    encoder = "encoder/" if any(name.startswith("encoder/") for name in leaves) else ""
    lowest = ("embedding", "patches/", f"{encoder}projection/")

    def scale(name: str, update: Any) -> Any:
        if "blocks/" in name:
            depth = jnp.arange(layers - 1, -1, -1, dtype=update.dtype)
            return update * (decay**depth).reshape(-1, *[1] * (update.ndim - 1))
        return update * decay**layers if any(part in name for part in lowest) else update

    def apply(updates: Any, params: Any = None) -> Any:
        del params
        return {name: scale(name, update) for name, update in updates.items()}

    return optax.stateless(apply)
