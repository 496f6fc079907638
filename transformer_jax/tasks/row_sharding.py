"""Mesh check for tasks whose batches are rows of fixed shape: images, sounds, episodes, graphs."""

from __future__ import annotations

from typing import Any

from transformer_jax.distributed.mesh import SEQUENCE, check_rows
from transformer_jax.errors import UserError
from transformer_jax.training.config import RunConfig


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Check that the mesh can shard the rows of a batch.

    Raises:
      UserError: The mesh shards sequences, or does not divide the rows.
    """
    if mesh.shape.get(SEQUENCE, 1) > 1:
        raise UserError(
            "`sequence` of `mesh` shards the tokens of texts, which these batches do not have; remove it"
        )
    check_rows(config.task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)
