"""Trained graph models: their predictions and attention weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.data.batches.graph_batches import padded, padded_size
from transformer_jax.data.corpora.graphs import Graph, parse_graph
from transformer_jax.errors import UserError
from transformer_jax.tasks.encoders.trained_heads import classified
from transformer_jax.training.task import Trained

# Arrays of a batch that a model reads.
INPUTS = ("nodes", "degrees", "distances", "paths", "is_node")
# Largest number of graphs, and of pairs of nodes, of a batch for predictions.
_ROWS, _PAIRS = 32, 2**16


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a batch that a model reads, by the names of its arguments."""
    return {name: batch[name] for name in INPUTS}


@functools.partial(jax.jit, static_argnames="return_weights")
def predictions_of(model: Any, batch: dict[str, jax.Array], *, return_weights: bool = False) -> Any:
    """Return the predictions of a model for a batch of graphs, see `Graphormer`."""
    return model(**batch, return_weights=return_weights)


@dataclasses.dataclass(frozen=True)
class TrainedGraphModel(Trained):
    """A model of graphs from a run."""

    def graph(self, graph: Any, place: str = "graph") -> Graph:
        """Convert a graph that a user wrote, see `predict`.

        Args:
          graph: The graph.
          place: Description of the graph, for messages.

        Raises:
          UserError: It is invalid, or its features are not those of the training data.
        """
        parsed = graph if isinstance(graph, Graph) else parse_graph(graph, place)
        self.processor.check(parsed, place)
        return parsed

    def outputs(self, graphs: Sequence[Any]) -> np.ndarray:
        """Compute the model's outputs (n, C) float32 for graphs: class logits, or a normalized score.

        Args:
          graphs: See `predict`.

        Raises:
          UserError: See `predict`.
        """
        if isinstance(graphs, str | Mapping):
            raise UserError("graphs must be a list; pass [graph] for a single graph")
        parsed = [self.graph(graph, f"graph {n}") for n, graph in enumerate(graphs, 1)]
        hops = self.model.config.edge_hops
        # Graphs of similar sizes share a batch.
        order = sorted(range(len(parsed)), key=lambda n: -len(parsed[n]))
        outputs: list[Any] = [None] * len(parsed)
        while order:
            # The largest graphs come first, and decide how many fit.
            size = padded_size(len(parsed[order[0]]))
            row_count = max(1, min(_ROWS, _PAIRS // size**2))
            indices, order = order[:row_count], order[row_count:]
            rows = [padded(self.processor.arrays(parsed[n], hops), size) for n in indices]
            rows += [rows[-1]] * (row_count - len(rows))
            batch = {name: np.stack([row[name] for row in rows]) for name in INPUTS}
            predictions = np.asarray(predictions_of(self.model, batch))
            for index, prediction in zip(indices, predictions, strict=False):
                outputs[index] = prediction
        return np.stack(outputs) if outputs else np.zeros((0, len(self.processor.labels)), np.float32)

    def predict(self, graphs: Sequence[Any]) -> Any:
        """Predict a number or a class for each graph.

        Args:
          graphs: List of SMILES texts, of objects with `nodes` and `edges` as in a .jsonl file (`EdgeList`),
            or of `Graph`.

        Returns:
          (n,) float64 if the model predicts a number, else a list of `Classified`.

        Raises:
          UserError: A graph is invalid, or its features are not those of the training data; or `graphs` is a
            single graph.
        """
        outputs = self.outputs(graphs)
        if self.processor.target == "score":
            return self.processor.to_scores(outputs[:, 0])
        return [classified(logits, self.processor.labels, "label") for logits in outputs]

    def attention(self, graph: Any) -> np.ndarray:
        """Return the attention weights of a graph.

        Args:
          graph: See `predict`.

        Returns:
          (L, H, 1 + n, 1 + n) float32, in which the virtual node is the first.

        Raises:
          UserError: See `predict`.
        """
        parsed = self.graph(graph)
        arrays = padded(self.processor.arrays(parsed, self.model.config.edge_hops), padded_size(len(parsed)))
        batch = {name: array[None] for name, array in arrays.items()}
        _, weights = predictions_of(self.model, batch, return_weights=True)
        count = 1 + len(parsed)
        return np.asarray(weights[0, :, :, :count, :count])
