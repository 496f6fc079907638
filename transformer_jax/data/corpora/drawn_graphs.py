"""Random graphs whose targets are known exactly: the number of triangles, or the diameter."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csgraph

from transformer_jax.data.corpora.graphs import Graph, GraphSet
from transformer_jax.data.corpora.tables import Table

DRAWN_TARGETS = ("triangles", "diameter")
_MIN_NODES, _MAX_NODES = 8, 20


def adjacency(graph: Graph) -> np.ndarray:
    """Return the adjacency matrix (n, n) of 0 and 1."""
    matrix = np.zeros((len(graph), len(graph)), np.int64)
    matrix[graph.edges[:, 0], graph.edges[:, 1]] = matrix[graph.edges[:, 1], graph.edges[:, 0]] = 1
    return matrix


def triangles(graph: Graph) -> int:
    """Return the number of triangles."""
    matrix = adjacency(graph)
    return int(np.trace(matrix @ matrix @ matrix)) // 6


def diameter(graph: Graph) -> int:
    """Return the length of the longest shortest path of a connected graph."""
    return int(csgraph.shortest_path(adjacency(graph), unweighted=True).max())


def draw_graph(rng: np.random.Generator) -> Graph:
    """Sample a connected random graph: a tree with extra edges, a share of which close triangles.

    The share differs between graphs, so that node counts and degrees do not determine the number of triangles.
    The tree ranges from a path to a random recursive tree, so that diameters differ.

    Args:
      rng: Source of the randomness.
    """
    count = int(rng.integers(_MIN_NODES, _MAX_NODES + 1))
    # The parent of a node is one of the last `reach` nodes: 1 makes a path.
    reach = int(rng.integers(1, count))
    matrix = np.zeros((count, count), bool)
    for node in range(1, count):
        parent = int(rng.integers(max(0, node - reach), node))
        matrix[node, parent] = matrix[parent, node] = True
    share, extra = rng.random(), int(rng.integers(0, count // 2 + 1))
    for _ in range(extra):
        paths = matrix.astype(np.int64) @ matrix
        closes = rng.random() < share
        free = ~matrix & ((paths > 0) == closes) & np.triu(np.ones_like(matrix), 1)
        pairs = np.argwhere(free)
        if len(pairs):
            first, second = pairs[rng.integers(len(pairs))]
            matrix[first, second] = matrix[second, first] = True
    edges = np.argwhere(np.triu(matrix)).astype(np.int32)
    # Shuffle the numbers of the nodes, so that they carry no information.
    edges = rng.permutation(count).astype(np.int32)[edges]
    return Graph(np.zeros((count, 1), np.int32), edges, np.zeros((len(edges), 1), np.int32))


def drawn_graphs(target: str, count: int, seed: int = 0) -> GraphSet:
    """Draw graphs with a target.

    Args:
      target: One of `DRAWN_TARGETS`.
      count: Number of graphs.
      seed: Seed of the graphs.
    """
    rng = np.random.default_rng(seed)
    graphs = [draw_graph(rng) for _ in range(count)]
    measure = {"triangles": triangles, "diameter": diameter}[target]
    scores = [str(measure(graph)) for graph in graphs]
    return GraphSet(graphs, Table(f"drawn graphs ({target})", {"score": scores}))
