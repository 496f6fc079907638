"""What a run learns: a loss, extra state, and which model the run is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

# Each metric as a sum over the batch, and the weight that divides it; the one called "loss" is minimised.
Sums = Mapping[str, jax.Array]
Loss = Callable[[Any, Any, Any, jax.Array], tuple[Sums, Sums]]


class Objective:
    """What is learned, without data: a plan, a resume and `load` need no corpus.

    Attributes:
      additive: whether the loss is a sum over rows, so that a batch may be cut into micro-batches and filled up
        with rows of weight 0.
    """

    additive = True

    def loss(self, model: Any, extra: Any, batch: Any, key: jax.Array) -> tuple[Sums, Sums]:
        """Sums and weights of one batch.

        Args:
          model: the module with its parameters.
          extra: state in addition to the parameters; it is read, never changed.
          batch: arrays that lead with B.
          key: for everything random.

        Returns:
          (sums, weights), with the same names. An array of several numbers is kept for `after_update` and not
          logged.
        """
        raise NotImplementedError

    def initial_extra(self, model: Any, key: jax.Array) -> Any:
        """The extra state before the first step; made under `jax.jit`."""
        return None

    def after_update(self, model: Any, extra: Any, means: Mapping[str, jax.Array], step: jax.Array) -> Any:
        """The extra state after an optimizer step.

        Args:
          model: with its updated parameters.
          extra: the state that the loss has read.
          means: sums of the complete batch divided by their weights, once.
          step: number of steps before this one.
        """
        return extra

    def kept(self, model: Any, extra: Any) -> Any:
        """The model that the run is for: averaged, scored, loaded and exported."""
        return model


class FunctionObjective(Objective):
    """The objective of a loss function alone."""

    def __init__(self, loss: Loss):
        self._loss = loss

    def loss(self, model: Any, extra: Any, batch: Any, key: jax.Array) -> tuple[Sums, Sums]:
        return self._loss(model, extra, batch, key)
