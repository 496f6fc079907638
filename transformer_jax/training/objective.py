"""Objectives: a loss, state beside the parameters, and the choice of the final model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

# Metrics by name, each a sum over the batch, and their weights, which divide the sums; "loss" is minimized.
Sums = Mapping[str, jax.Array]
Loss = Callable[[Any, Any, Any, jax.Array], tuple[Sums, Sums]]


class Objective:
    """Base class of objectives; they hold no data, so that plans and `load` need no corpus.

    Attributes:
      additive: True if the loss is a sum over rows, so that a batch may be split into micro-batches and padded
        with rows of weight 0.
    """

    additive = True

    def loss(self, model: Any, extra: Any, batch: Any, key: jax.Array) -> tuple[Sums, Sums]:
        """Compute the sums and weights of one batch.

        Args:
          model: The module with its parameters.
          extra: State beside the parameters; it is not changed here.
          batch: Arrays with leading axis B.
          key: Random key of the step.

        Returns:
          (sums, weights), with the same names. An array of more than one number is passed to `after_update` and
          not logged.
        """
        raise NotImplementedError

    def initial_extra(self, model: Any, key: jax.Array) -> Any:
        """Return the extra state before the first step; called under `jax.jit`."""
        return None

    def after_update(self, model: Any, extra: Any, means: Mapping[str, jax.Array], step: jax.Array) -> Any:
        """Return the extra state after an optimizer step.

        Args:
          model: The module with its updated parameters.
          extra: The state that the loss read.
          means: Sums over the complete batch, divided by their weights.
          step: Number of steps before this one.
        """
        return extra

    def kept(self, model: Any, extra: Any) -> Any:
        """Return the model that is averaged, scored, loaded and exported."""
        return model


class FunctionObjective(Objective):
    """An objective that consists of a loss function."""

    def __init__(self, loss: Loss):
        self._loss = loss

    def loss(self, model: Any, extra: Any, batch: Any, key: jax.Array) -> tuple[Sums, Sums]:
        """Compute the sums and weights of one batch."""
        return self._loss(model, extra, batch, key)
