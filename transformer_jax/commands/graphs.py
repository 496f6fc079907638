"""Train a model of graphs, score it, and predict with it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformer_jax.commands.parsing import Parsed, flag_value, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, planned, run_dir_of, train
from transformer_jax.data.corpora.graphs import open_graphs
from transformer_jax.data.corpora.table_files import SUFFIXES
from transformer_jax.data.corpora.text_files import base_suffix
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.graphs.graph_prediction import ENTRY
from transformer_jax.tasks.graphs.trained import TrainedGraphModel

DESCRIPTION = (
    "Train a model that predicts a class or a number for each graph, such as a property of a molecule; score "
    "it, and predict with it. Without --data it learns to count the triangles of random graphs."
)


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. None: runs/DATA-MODEL."""
    predict: tuple[str, ...] = ()
    """Predict for these molecules in SMILES, or files of graphs, with the run in --run-dir; no training."""
    plot_attention: str | None = None
    """With --predict: write a picture of the first graph's attention to this file."""
    json: bool = False
    """With --predict: print a JSON object per line. With --dry-run --topology: print a JSON object last."""


def default_recipe(argv: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
    """Return the function that chooses "fine_tune" for a start, "graphs" for data, or else "drawn"."""

    def choose(keywords: Mapping[str, Any]) -> str:
        if keywords.get("start"):
            return "fine_tune"
        return "graphs" if flag_value(argv, "--data") else "drawn"

    return choose


def _check(parsed: Parsed) -> None:
    flags: Arguments = parsed.flags
    if "predict" in parsed.named and not flags.predict:
        raise UserError("`predict` names no graph: add molecules in SMILES, or files")
    if flags.plot_attention is not None:
        if not flags.predict:
            raise UserError("`plot_attention` needs `predict`")
        from transformer_jax.plotting.page import check_writable

        check_writable(flags.plot_attention, "plot_attention")
    if flags.predict and flags.run_dir is None:
        raise UserError("name the trained run with `run_dir`")


def _read_inputs(inputs: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (name, SMILES or graph) for each molecule, and for each graph of a file.

    Raises:
      UserError: A file cannot be read, see `open_graphs`.
    """
    named_graphs: list[tuple[str, Any]] = []
    for argument in inputs:
        if base_suffix(argument) not in SUFFIXES:
            if pathlib.Path(argument).is_file():
                raise UserError(f"{argument}: graphs are a .tsv, .csv or .jsonl file")
            named_graphs.append((argument, argument))
            continue
        graphs = open_graphs(argument, labeled=False)
        names = graphs.table.columns.get("smiles") or map(graphs.table.location, range(len(graphs)))
        named_graphs += zip(names, graphs.graphs, strict=True)
    return named_graphs


def use(parsed: Parsed) -> None:
    """Print predictions, and plot the attention of the first graph.

    Raises:
      UserError: The folder holds another kind of model, a graph is invalid, or the picture cannot be written.
    """
    flags: Arguments = parsed.flags
    assert flags.run_dir is not None
    trained = load(flags.run_dir, compute=parsed.execution.compute)
    if not isinstance(trained, TrainedGraphModel):
        raise UserError(f"{flags.run_dir} holds a {type(trained.model).__name__}, not a model of graphs")
    named_graphs = _read_inputs(flags.predict)
    graphs = [trained.graph(graph, name) for name, graph in named_graphs]
    for (name, _), prediction in zip(named_graphs, trained.predict(graphs), strict=True):
        if trained.processor.target == "score":
            record, text = {"graph": name, "score": float(prediction)}, f"{prediction:10.4f}  {name}"
        else:
            record = {"graph": name, "label": prediction.label, "probabilities": prediction.probabilities}
            text = f"{prediction.label} ({prediction.probabilities[prediction.label]:.3f})  {name}"
        print(json.dumps(record, ensure_ascii=False) if flags.json else one_line(text))
    if flags.plot_attention is None:
        return
    from transformer_jax.plotting.graphs import plot_graph

    smiles = named_graphs[0][0] if graphs[0].is_molecule else None
    try:
        plot_graph(graphs[0], trained.attention(graphs[0]), smiles=smiles, path=flags.plot_attention)
    except (OSError, ValueError) as error:
        raise UserError(f"{flags.plot_attention}: the picture cannot be written ({error})") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax graphs") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=default_recipe(argv)
    )
    flags: Arguments = parsed.flags
    if planned(ENTRY, parsed, answers=bool(flags.predict)):
        return
    _check(parsed)
    if flags.predict:
        parsed.check_no_training()
        if is_first():
            use(parsed)
        return
    parsed.execution.processes.join()
    run_dir = run_dir_of(ENTRY, parsed, embedded=parsed.config.task.drawn)
    train(ENTRY, parsed.config, pathlib.Path(run_dir), parsed.execution)
