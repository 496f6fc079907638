"""Creation of a model from its config, and loading of the trained model of a run folder."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.distributed.mesh import check_model
from transformer_jax.distributed.sharding import model_shardings, placed_shapes
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.run_folder import AVERAGED, CHECKPOINTS, Stored, checkpoint_names, models_of
from transformer_jax.training.task import TaskEntry


def module_of(entry: TaskEntry, config: Any) -> Any:
    """Return the module class of a model's config."""
    return next(model.module for model in models_of(entry).values() if model.config is type(config))


def make_model(
    module: Any,
    config: Any,
    *,
    seed: int = 0,
    compute: ComputeOptions = ComputeOptions(),
    mesh: Mesh | None = None,
) -> Any:
    """Initialize a model in one compiled program, with its parameters sharded over the mesh.

    Args:
      module: The model's class.
      config: The model's config.
      seed: Seed of the initial values.
      compute: Compute options of the model.
      mesh: The mesh; None means the default device.
    """

    def make(key: jax.Array) -> Any:
        return module(config, rngs=nnx.Rngs(key), compute=compute)

    key = jax.random.key(seed)
    shardings = None if mesh is None else model_shardings(jax.eval_shape(make, key), mesh)
    return jax.jit(make, out_shardings=shardings)(key)


def read_trained(
    folder: str | pathlib.Path,
    entry: TaskEntry,
    stored: Stored,
    *,
    weights: str | None = None,
    dtype: str | None = None,
    compute: ComputeOptions = ComputeOptions(),
    mesh: Mesh | None = None,
) -> tuple[Any, str]:
    """Load a run's final model with its trained parameters.

    Args:
      folder: The run's folder.
      entry: The task's entry.
      stored: The run's stored config.
      weights: "averaged", or the step of a checkpoint; None means the averaged parameters if the run is
        finished, else the newest checkpoint.
      dtype: Compute dtype; None means the run's.
      compute: Compute options of the model.
      mesh: The mesh over which the parameters are sharded; None means the default device.

    Returns:
      (the model, the name of the checkpoint of its parameters).

    Raises:
      UserError: The checkpoint does not exist, is damaged, or belongs to another model.
    """
    config = stored.model_config if dtype is None else dataclasses.replace(stored.model_config, dtype=dtype)
    objective = entry.objective(stored.run, config)
    if mesh is not None:
        check_model(config, mesh)

    def create() -> tuple[Any, Any]:
        model = module_of(entry, config)(config, rngs=nnx.Rngs(0), compute=compute)
        return model, objective.initial_extra(model, jax.random.key(0))

    def on_mesh(tree: Any) -> Any:
        return tree if mesh is None else placed_shapes(tree, model_shardings(tree, mesh))

    model, extra = jax.eval_shape(create)
    with Checkpoints(pathlib.Path(folder) / CHECKPOINTS, run=stored.identity) as checkpoints:
        if weights is None:
            weights = next(iter(checkpoint_names(checkpoints)), None)
        if weights is None:
            raise UserError(f"{folder}: no complete checkpoint yet: train first")
        if weights == AVERAGED:
            final = jax.eval_shape(objective.kept, model, extra)
            return checkpoints.restore_model(on_mesh(final), weights), weights
        final = checkpoints.restore_kept(objective, on_mesh(model), extra, weights)
        # A final model from the extra state (a teacher) was restored to the default device.
        return final if mesh is None else jax.device_put(final, model_shardings(final, mesh)), weights
