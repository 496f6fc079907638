"""Processor of graphs: the features and targets of the training data, and the arrays that a model reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

import msgspec
import numpy as np
from scipy.sparse import csgraph

from transformer_jax.data.corpora import molecules
from transformer_jax.data.corpora.graphs import Graph, GraphSet
from transformer_jax.data.corpora.tables import concatenate
from transformer_jax.data.corpora.targets import labels_of, target_of, targets_of
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

FILE = "graphs.json"
_FORMS = {"smiles": "SMILES", "edges": "lists of edges"}
Count = Annotated[int, msgspec.Meta(ge=1)]


class GraphSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The settings of a `GraphProcessor`, stored as `graphs.json` in a run folder.

    Attributes:
      form: "smiles" or "edges".
      node_values: Number of values of each feature of a node.
      edge_values: Number of values of each feature of an edge.
      labels: Names of the classes, or ("score",) for scores.
      mean: Mean of the scores in the training data; 0 for classes.
      deviation: Standard deviation of these scores; 1 for classes.
    """

    form: Literal["smiles", "edges"]
    node_values: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    edge_values: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    labels: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    mean: float = 0.0
    deviation: Annotated[float, msgspec.Meta(gt=0)] = 1.0


def shortest_paths(graph: Graph, hops: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of the shortest paths between all nodes, and the features of their edges.

    Args:
      graph: The graph.
      hops: Number of edges, counted from the start of each path, to return features of.

    Returns:
      Distances (n, n) int16, -1 without a path; and features (n, n, hops, features) int16 of the edges on a
      shortest path, -1 after its end.
    """
    n = len(graph)
    matrix = np.zeros((n, n))
    edge_indices = np.zeros((n, n), np.int64)
    for pairs in (graph.edges, graph.edges[:, ::-1]):
        matrix[pairs[:, 0], pairs[:, 1]] = 1
        edge_indices[pairs[:, 0], pairs[:, 1]] = np.arange(len(pairs))
    lengths, previous = csgraph.shortest_path(matrix, unweighted=True, return_predecessors=True)
    distances = np.where(np.isfinite(lengths), lengths, -1).astype(np.int16)
    features = np.full((n, n, hops, graph.edge_features.shape[1]), -1, np.int16)
    starts, ends = np.nonzero(distances > 0)
    nodes, hop_numbers = ends, distances[starts, ends].astype(np.int64) - 1
    # Every path is followed back from its end, all paths at once.
    while len(starts):
        predecessors = previous[starts, nodes]
        is_stored = hop_numbers < hops
        edges = edge_indices[predecessors[is_stored], nodes[is_stored]]
        features[starts[is_stored], ends[is_stored], hop_numbers[is_stored]] = graph.edge_features[edges]
        continues = hop_numbers > 0
        starts, ends, nodes, hop_numbers = (
            starts[continues], ends[continues], predecessors[continues], hop_numbers[continues] - 1,
        )  # fmt: skip
    return distances, features


@dataclasses.dataclass(frozen=True)
class GraphProcessor:
    """Conversion of graphs to arrays.

    Attributes:
      settings: The settings.
    """

    settings: GraphSettings

    FILES: ClassVar[tuple[str, ...]] = (FILE,)

    @classmethod
    def of(cls, graphs: GraphSet, target: str = "auto", *, held_out: Sequence[GraphSet] = ()) -> Self:
        """Return the processor for training graphs.

        Args:
          graphs: The graphs.
          held_out: Graphs held out of the same file, whose labels and feature values are included.
          target: Column to predict, "label" or "score"; "auto" takes the first of them that is present.

        Raises:
          UserError: There is no target, every target is the same, or a score is not a number.
        """
        column = target_of(graphs.table, target)
        labels = labels_of(concatenate([split.table for split in (graphs, *held_out)]), column)
        mean, deviation = 0.0, 1.0
        if labels == ("score",):
            scores = np.array(targets_of(graphs.table, column, labels), np.float64)
            mean, deviation = float(scores.mean()), float(scores.std()) or 1.0
        node_values: Sequence[int] = molecules.ATOM_VALUES
        edge_values: Sequence[int] = molecules.BOND_VALUES
        if not graphs.is_molecules:
            node_values, edge_values = (
                _value_counts(
                    [getattr(graph, name) for split in (graphs, *held_out) for graph in split.graphs],
                    f"{graphs.table.path}: {what}",
                )
                for name, what in (("nodes", "nodes"), ("edge_features", "edges"))
            )
        form: Literal["smiles", "edges"] = "smiles" if graphs.is_molecules else "edges"
        return cls(GraphSettings(form, tuple(node_values), tuple(edge_values), labels, mean, deviation))

    def with_features_of(self, start: GraphProcessor) -> Self:
        """Return a copy with the feature values of the processor that belongs to the start of a training.

        Raises:
          UserError: The model was trained on graphs of another form.
        """
        if self.settings.form != start.settings.form:
            raise UserError(
                f"the start was trained on {_FORMS[start.settings.form]}, but the data are "
                f"{_FORMS[self.settings.form]}: name others with `data`"
            )
        values = {name: getattr(start.settings, name) for name in ("node_values", "edge_values")}
        return dataclasses.replace(self, settings=msgspec.structs.replace(self.settings, **values))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, or ("score",) for a number."""
        return self.settings.labels

    @property
    def target(self) -> str:
        """Column that is predicted, "label" or "score"."""
        return "score" if self.labels == ("score",) else "label"

    def check(self, graph: Graph, place: str) -> None:
        """Check that the features of a graph are those of the run's data.

        Args:
          graph: The graph.
          place: Description of the graph, for messages.

        Raises:
          UserError: It is a molecule and they are lists of edges, or the reverse; the number of features
            differs; or a value is larger than any in the data.
        """
        if graph.is_molecule != (self.settings.form == "smiles"):
            form = "SMILES" if graph.is_molecule else "a list of edges"
            raise UserError(f"{place}: {form}, but the model was trained on {_FORMS[self.settings.form]}")
        for what, features, counts in (
            ("nodes", graph.nodes, self.settings.node_values),
            ("edges", graph.edge_features, self.settings.edge_values),
        ):
            if len(features) and features.shape[1] != len(counts):
                raise UserError(
                    f"{place}: {what} have {features.shape[1]} features, but the model's have {len(counts)}"
                )
            outside = np.argwhere(features >= np.array(counts)[: features.shape[1]])
            if len(outside):
                row, column = outside[0]
                raise UserError(
                    f"{place}: feature {column + 1} of {what} is {features[row, column]}, but the model takes "
                    f"0 to {counts[column] - 1}"
                )

    def targets(self, graphs: GraphSet) -> np.ndarray:
        """Return the targets (n,): int32 classes, or float32 numbers with mean 0 and deviation 1 in training.

        Raises:
          UserError: See `targets_of`.
        """
        values = np.array(targets_of(graphs.table, self.target, self.labels))
        if self.target == "label":
            return values.astype(np.int32)
        return ((values - self.settings.mean) / self.settings.deviation).astype(np.float32)

    def to_scores(self, predictions: np.ndarray) -> np.ndarray:
        """Return predictions (n,) in the unit of the scores, float64."""
        return predictions.astype(np.float64) * self.settings.deviation + self.settings.mean

    def arrays(self, graph: Graph, hops: int) -> dict[str, np.ndarray]:
        """Return the arrays of a graph of n nodes, see `Graphormer`.

        Args:
          graph: The graph.
          hops: The model's `edge_hops`.

        Returns:
          `nodes` (n, features), `degrees` (n,), `distances` (n, n), `paths` (n, n, hops, features) and
          `is_node` (n,).
        """
        distances, paths = shortest_paths(graph, hops)
        if not len(graph.edges):
            # Without edges, the number of edge features is known only from the settings.
            paths = np.full((*paths.shape[:3], len(self.settings.edge_values)), -1, np.int16)
        return {
            "nodes": graph.nodes,
            "degrees": (distances == 1).sum(axis=1).astype(np.int32),
            "distances": distances,
            "paths": paths,
            "is_node": np.ones(len(graph), bool),
        }

    def files(self) -> dict[str, bytes]:
        """Return the processor's file by name, as it is stored in a run folder."""
        text = json.dumps(msgspec.to_builtins(self.settings), ensure_ascii=False)
        return {FILE: (text + "\n").encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the processor from the result of `files`.

        Raises:
          UserError: The file is damaged.
        """
        return cls(parse_json(files[FILE], GraphSettings, FILE))


def _value_counts(features: Sequence[np.ndarray], place: str) -> tuple[int, ...]:
    """Return the number of values of each feature, one more than its largest value.

    Raises:
      UserError: Graphs have different numbers of features.
    """
    # A graph without edges has no number of features.
    features = [array for array in features if len(array)] or [np.zeros((1, 1), np.int32)]
    counts = sorted({array.shape[1] for array in features})
    if len(counts) > 1:
        raise UserError(
            f"{place} have {' and '.join(map(str, counts))} features; give all graphs the same number"
        )
    return tuple((1 + np.max([array.max(axis=0) for array in features], axis=0)).tolist())
