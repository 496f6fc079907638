"""Undirected graphs with features of nodes and edges: edge lists and molecules, with their targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from transformer_jax.data.corpora import molecules
from transformer_jax.data.corpora.table_files import SUFFIXES
from transformer_jax.data.corpora.tables import Table, fingerprint, read_table
from transformer_jax.data.corpora.text_files import base_suffix, read_lines
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, parse_json
from transformer_jax.limits import FEATURE_VALUES, NODES

TARGET_COLUMNS = ("label", "score")


@dataclasses.dataclass(frozen=True)
class Graph:
    """An undirected graph.

    Attributes:
      nodes: (n, features) int32 features of each node, at least one.
      edges: (m, 2) int32 the two nodes of each edge, each pair once.
      edge_features: (m, features) int32 features of each edge, at least one.
      is_molecule: True if it was read from SMILES.
    """

    nodes: np.ndarray
    edges: np.ndarray
    edge_features: np.ndarray
    is_molecule: bool = False

    def __len__(self) -> int:
        return len(self.nodes)


@dataclasses.dataclass(frozen=True)
class GraphSet:
    """Graphs with their targets.

    Attributes:
      graphs: The graphs.
      table: One row per graph: columns `label` and `score` if the graphs have targets, and `smiles` if they are
        molecules; edge lists without targets have a placeholder column `graph`.
    """

    graphs: Sequence[Graph]
    table: Table

    def __len__(self) -> int:
        return len(self.graphs)

    @property
    def is_molecules(self) -> bool:
        """True if the graphs are molecules."""
        return "smiles" in self.table.columns

    def select(self, rows: Sequence[int] | np.ndarray) -> GraphSet:
        """Return the graphs of these rows, in this order."""
        return GraphSet([self.graphs[row] for row in rows], self.table.select(rows))

    def fingerprint(self) -> str:
        """Return a digest of all graphs and targets."""
        arrays = [a for graph in self.graphs for a in (graph.nodes, graph.edges, graph.edge_features)]
        parts = [f"{array.shape} {array.tobytes().hex()}" for array in arrays]
        return fingerprint([*parts, *(text for column in self.table.columns.values() for text in column)])

    def scaffolds(self) -> np.ndarray:
        """Return the scaffold index (n,) of each molecule; equal indices mean equal scaffolds."""
        names = [molecules.scaffold(smiles) for smiles in self.table.columns["smiles"]]
        return np.unique(names, return_inverse=True)[1]


class EdgeList(msgspec.Struct, forbid_unknown_fields=True):
    """A graph as a line of a .jsonl file.

    Attributes:
      nodes: Number of nodes, or for each node a feature or a list of features.
      edges: For each edge a list of its two nodes, counted from 0, and maybe features; an edge without features
        has the feature 0. Each pair of nodes is joined once, in any order.
      label: Class.
      score: Number.
    """

    nodes: int | list[int | list[int]]
    edges: list[list[int]]
    label: str | int | None = None
    score: float | None = None


def parse_graph(graph: Any, place: str) -> Graph:
    """Convert a graph that a user wrote.

    Args:
      graph: A SMILES text, or an object with the fields `nodes` and `edges` of an `EdgeList`, lists or arrays.
      place: Description of the graph, for messages.

    Raises:
      UserError: The SMILES is invalid; or the object has no nodes, an edge to a missing node or from a node to
        itself, the same edge twice, or different numbers of features; or the graph is too large.
    """
    if isinstance(graph, str):
        return Graph(*molecules.read_smiles(graph, place), is_molecule=True)
    if isinstance(graph, Mapping):
        lists = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in graph.items()}
        graph = convert(lists, EdgeList, place)
    if not isinstance(graph, EdgeList):
        raise UserError(f"{place}: a graph is a SMILES text, or an object with `nodes` and `edges`")
    count = graph.nodes if isinstance(graph.nodes, int) else len(graph.nodes)
    if count < 1:
        raise UserError(f"{place}: a graph without nodes")
    NODES.check(count, f"{place}: the number of nodes")
    nodes = [0] * count if isinstance(graph.nodes, int) else graph.nodes
    features = [node if isinstance(node, list) else [node] for node in nodes]
    pairs = [edge[:2] for edge in graph.edges]
    for edge, pair in zip(graph.edges, pairs, strict=True):
        if len(pair) < 2:
            raise UserError(f"{place}: the edge {edge} does not name two nodes")
        if missing := [node for node in pair if not 0 <= node < len(nodes)]:
            raise UserError(
                f"{place}: the edge {edge} names the node {missing[0]}, but the nodes are 0 to {len(nodes) - 1}"
            )
        if pair[0] == pair[1]:
            raise UserError(f"{place}: the edge {edge} joins a node to itself")
    unordered = [(min(pair), max(pair)) for pair in pairs]
    if len(set(unordered)) < len(unordered):
        repeated = next(pair for n, pair in enumerate(unordered) if pair in unordered[:n])
        raise UserError(
            f"{place}: two edges join the nodes {repeated[0]} and {repeated[1]}; edges have no direction, so "
            "write each of them once"
        )
    return Graph(
        _features(features, f"{place}: nodes"),
        np.array(pairs, np.int32).reshape(-1, 2),
        _features([edge[2:] or [0] for edge in graph.edges], f"{place}: edges"),
    )


def _features(features: Sequence[Sequence[int]], place: str) -> np.ndarray:
    """Return features as an array (count, features).

    Raises:
      UserError: Their numbers differ, there are none, or one is negative or above its limit.
    """
    counts = {len(values) for values in features} or {1}
    if len(counts) > 1 or counts == {0}:
        raise UserError(
            f"{place} have {' and '.join(map(str, sorted(counts)))} features; "
            "give each the same number, at least 1"
        )
    array = np.array(features, np.int64).reshape(len(features), *counts)
    if array.size:
        if array.min() < 0:
            raise UserError(f"{place} have the feature {array.min()}; features are numbered from 0")
        FEATURE_VALUES.check(int(array.max()), f"{place} have the feature")
    return array.astype(np.int32)


def open_graphs(path: str, *, labeled: bool = True) -> GraphSet:
    """Read graphs from a file.

    Args:
      path: A .tsv, .csv or .jsonl file with a column `smiles`, or a .jsonl file with an `EdgeList` per line,
        plain or compressed.
      labeled: Whether each graph needs a `label` or a `score`.

    Raises:
      UserError: The file cannot be read, or has neither form; or a graph is invalid, see `parse_graph`.
    """
    if base_suffix(path) not in SUFFIXES:
        raise UserError(f"{path}: graphs are a .tsv, .csv or .jsonl file")
    if base_suffix(path) == ".jsonl" and (lists := _edge_lists(path)) is not None:
        columns = {name: ["" if (x := getattr(line, name)) is None else str(x) for _, line in lists]
                   for name in TARGET_COLUMNS}  # fmt: skip
        columns = {name: texts for name, texts in columns.items() if any(texts)}
        table = Table(path, columns or {"graph": [""] * len(lists)}, [number - 2 for number, _ in lists])
        graphs = [parse_graph(line, table.location(row)) for row, (_, line) in enumerate(lists)]
        examples = GraphSet(graphs, table)
    else:
        table = read_table(path, ("smiles", *TARGET_COLUMNS))
        if "smiles" not in table.columns:
            raise UserError(f"{path}: no column smiles (in lower case)")
        texts = table.columns["smiles"]
        examples = GraphSet([parse_graph(s, table.location(row)) for row, s in enumerate(texts)], table)
    if labeled and not set(TARGET_COLUMNS) & set(examples.table.columns):
        raise UserError(f"{path}: no {' or '.join(TARGET_COLUMNS)} to predict")
    return examples


def _edge_lists(path: str) -> list[tuple[int, EdgeList]] | None:
    """Return the line number and the graph of each line, or None if the file has SMILES.

    Raises:
      UserError: A line is not an `EdgeList`, there are no lines, or the first has both forms.
    """
    lines = [(number, text) for number, text in enumerate(read_lines(path), 1) if text.strip()]
    if not lines:
        raise UserError(f"{path}: no graphs")
    first = parse_json(lines[0][1], dict[str, Any], f"{path}, line {lines[0][0]}")
    if "smiles" in first:
        if "nodes" in first:
            raise UserError(f"{path}, line {lines[0][0]}: both smiles and nodes; remove one of them")
        return None
    return [(number, parse_json(text, EdgeList, f"{path}, line {number}")) for number, text in lines]
