"""A graph with the attention of its nodes: on the graph, and as a matrix."""

from __future__ import annotations

import pathlib

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from transformer_jax.data.corpora import molecules
from transformer_jax.data.corpora.graphs import Graph
from transformer_jax.data.tokenizers.graph_processor import shortest_paths
from transformer_jax.plotting.figures import finish


def layout(graph: Graph) -> np.ndarray:
    """Return node positions (n, 2) whose pairwise distances approximate the lengths of shortest paths."""
    from sklearn.manifold import MDS

    if len(graph) == 1:
        return np.zeros((1, 2))
    distances, _ = shortest_paths(graph, 1)
    # Parts that no path connects are drawn next to each other.
    gap = 1.5 * max(1, int(distances.max()))
    lengths = np.where(distances < 0, gap, distances)
    return MDS(
        2, metric="precomputed", init="random", n_init=4, random_state=0, normalized_stress="auto"
    ).fit_transform(lengths)


def plot_graph(
    graph: Graph,
    weights: np.ndarray,
    *,
    smiles: str | None = None,
    path: str | pathlib.Path | None = None,
) -> Figure:
    """Draw a graph whose nodes are colored by the attention that they get, next to all attention weights.

    Args:
      graph: The graph.
      weights: (L, H, 1 + n, 1 + n), see `TrainedGraphModel.attention`.
      smiles: SMILES of the molecule, for its layout and atom symbols; None for other graphs.
      path: File to write; its extension selects the format.

    Raises:
      OSError: The file cannot be written.
      UserError: RDKit is not installed, and the graph is a molecule.
    """
    if smiles is None:
        positions, names = layout(graph), [str(number) for number in range(len(graph))]
    else:
        positions, names = molecules.layout(smiles)
    mean = weights.mean(axis=(0, 1))
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.add_collection(
        LineCollection(list(positions[graph.edges]), colors="#9aa0a6", linewidths=1.5, zorder=1)
    )
    points = left.scatter(
        *positions.T, c=mean[1:, 1:].mean(axis=0), cmap="YlOrRd", s=260, edgecolors="#5f6368", zorder=2
    )
    for (x, y), name in zip(positions, names, strict=True):
        left.text(x, y, name, ha="center", va="center", fontsize=8, zorder=3)
    left.set_aspect("equal")
    left.margins(0.1)
    left.axis("off")
    left.set_title("attention to each node, mean over attending nodes", fontsize=10)
    figure.colorbar(points, ax=left, shrink=0.8)
    image = right.imshow(mean, cmap="magma", vmin=0)
    if len(graph) <= 40:
        labels = ["virtual", *names]
        right.set_xticks(range(len(labels)), labels, fontsize=7, rotation=90)
        right.set_yticks(range(len(labels)), labels, fontsize=7)
    right.set(xlabel="attended node", ylabel="attending node")
    figure.colorbar(image, ax=right, label="attention, mean of layers and heads")
    return finish(figure, path, title=smiles or "")
