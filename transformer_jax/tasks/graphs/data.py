"""The graphs of a run: its data config, and its splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from transformer_jax.data.corpora.drawn_graphs import DRAWN_TARGETS, drawn_graphs
from transformer_jax.data.corpora.graphs import GraphSet, open_graphs
from transformer_jax.data.corpora.held_out import held_out
from transformer_jax.errors import UserError
from transformer_jax.training.config import RunConfig, check_at_least, choose


@dataclasses.dataclass(frozen=True)
class GraphPredictionConfig:
    """The graphs of a run, and its loss.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    data: str = ""
    """Graphs to train on: a .tsv, .csv or .jsonl file with a column smiles, or a .jsonl file with an object of
    nodes and edges per line; "" samples random graphs."""
    valid: str = ""
    """Graphs to validate on, as in `data`; "" holds out the share `held_out` of `data`."""
    test: str = ""
    """Graphs to score, as in `data`; "" holds out a second share."""
    target: Literal["auto", "label", "score"] = "auto"
    """Column to predict: label (a class) or score (a number); auto prefers label if `data` has both."""
    split: Literal["auto", "scaffold", "random"] = "auto"
    """How to hold out graphs: scaffold keeps molecules with the same scaffold in the same split; random ignores
    scaffolds; auto is scaffold for molecules, otherwise random."""
    held_out: float = 0.1
    """Share of `data` to hold out for the test set, and share of the rest for validation."""
    drawn: str = "triangles"
    """Target of the random graphs that replace `data`: triangles (their number) or diameter."""
    graphs: int = 6_000
    """Number of graphs to draw."""
    max_nodes: int = 0
    """Largest allowed number of nodes, which determines the padding; 0 uses the largest graph of the data."""
    batch_size: int = 64
    """Graphs per batch, B."""
    loss: Literal["squared", "absolute"] = "squared"
    """Training loss for scores: squared or absolute error."""

    def __post_init__(self) -> None:
        if (self.valid or self.test) and not self.data:
            raise UserError("`valid` and `test` need `data`")
        choose("target", self.target, ("auto", "label", "score"))
        choose("split", self.split, ("auto", "scaffold", "random"))
        choose("drawn", self.drawn, DRAWN_TARGETS)
        choose("loss", self.loss, ("squared", "absolute"))
        if not 0 < self.held_out < 0.5:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 0.5")
        check_at_least(self, graphs=10, batch_size=1, max_nodes=0)


def _hold_out(task: GraphPredictionConfig, graphs: GraphSet) -> tuple[GraphSet, GraphSet]:
    """Return (training graphs, held-out graphs).

    Raises:
      UserError: There is a single graph, or the split needs molecules of several scaffolds.
    """
    if task.split == "scaffold" and not graphs.is_molecules:
        raise UserError(f"`split` scaffold needs molecules, but {graphs.table.path} has no column smiles")
    if len(graphs) < 2:
        raise UserError(
            f"{graphs.table.path}: too few graphs to hold some out; add graphs, or set `valid` and `test`"
        )
    groups = np.arange(len(graphs))
    if graphs.is_molecules and task.split != "random":
        groups = graphs.scaffolds()
        if task.split == "scaffold" and len(set(groups)) < 3:
            raise UserError(
                f"{graphs.table.path}: fewer than 3 scaffolds cannot be split; set `split` to random"
            )
    rows, held = held_out(groups, task.held_out)
    return graphs.select(rows), graphs.select(held)


def open_splits(config: RunConfig, note: Callable[[str], None]) -> tuple[GraphSet, GraphSet, GraphSet]:
    """Return the training, validation and test graphs of a run.

    Raises:
      UserError: See `open_graphs`; sets of molecules and of edge lists are mixed; or a graph has more nodes
        than `max_nodes`.
    """
    task: GraphPredictionConfig = config.task
    train = open_graphs(task.data) if task.data else drawn_graphs(task.drawn, task.graphs)
    if task.test:
        test = open_graphs(task.test)
    else:
        train, test = _hold_out(task, train)
    if task.valid:
        valid = open_graphs(task.valid)
    else:
        train, valid = _hold_out(task, train)
    for split in (train, valid, test):
        if split.is_molecules != train.is_molecules:
            raise UserError(
                f"{split.table.path} and {train.table.path}: only one of them has a column smiles; "
                "use files of molecules only, or of edge lists only"
            )
        for row, graph in enumerate(split.graphs):
            if task.max_nodes and len(graph) > task.max_nodes:
                raise UserError(
                    f"{split.table.location(row)}: a graph of {len(graph)} nodes, above `max_nodes` "
                    f"{task.max_nodes}"
                )
    note(
        f"{len(train):,} graphs ({sum(map(len, train.graphs)):,} nodes) for training, {len(valid):,} for "
        f"validation, {len(test):,} to score"
    )
    return train, valid, test
