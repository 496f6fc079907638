"""Train a translator, score it, and translate with it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from transformer_jax.commands.parsing import Parsed, parse_run
from transformer_jax.commands.plan_decoding import TOKENS, show_chips, show_decoding, target
from transformer_jax.commands.train import PlanFlags, default_run_dir, keep_programs, planned, train
from transformer_jax.decoding.translator import SENTENCES, bucket_length, longest_target
from transformer_jax.distributed.processes import broadcast_from_first, is_first
from transformer_jax.errors import UserError
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.tasks import TASKS, load
from transformer_jax.tasks.translators.translation import ENTRY, TrainedTranslator, default_recipe
from transformer_jax.training.run_folder import read_run

DESCRIPTION = "Train a translator, score it on unseen sentences, and translate with it."


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. None: runs/CORPUS-MODEL, with -PRESET if one is
    named."""
    text: str | None = None
    """Translate this sentence with the trained run in --run-dir and print it; no training."""
    stdin: bool = False
    """Translate the lines of standard input with the trained run; an empty line stays empty."""
    plot_attention: str | None = None
    """With --text: draw the cross-attention of its translation, heads side by side, to this picture."""
    plot_layer: int = -1
    """With --plot-attention: the decoder layer to draw, counted from 0; negative from the end."""
    html: str | None = None
    """With --text: write all attention of its translation, every layer and head, as an interactive page."""
    json: bool = False
    """With --dry-run --topology: print one JSON object last."""


def check(own: Arguments) -> None:
    """Checks the flags that contradict each other.

    Raises:
      UserError: they do.
    """
    if own.plot_attention is not None and own.text is None:
        raise UserError("`plot_attention` draws the sentence of `text`: give one")
    if own.html is not None and own.text is None:
        raise UserError("`html` shows the sentence of `text`: give one")
    if own.html is not None:
        from transformer_jax.plotting.page import check_writable

        if own.plot_attention is not None:
            raise UserError("`html` and `plot_attention` contradict each other: give one of them")
        check_writable(own.html)
    if own.text is not None and own.stdin:
        raise UserError("`text` and `stdin` contradict each other: give one of them")
    if own.text is None:
        return
    if not own.text.strip():
        raise UserError("`text` is empty: give a sentence")
    try:
        own.text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("`text` is not UTF-8: convert it first") from None


def read_lines() -> list[str]:
    """The lines of standard input.

    Raises:
      UserError: it is not UTF-8.
    """
    try:
        lines = sys.stdin.buffer.read().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 at byte {error.start + 1}; convert it first") from None
    return lines[:-1] if lines[-1] == "" else lines


def translate(parsed: Parsed, run_dir: pathlib.Path, mesh: Any) -> None:
    """Translates `text` or standard input with a run or a published folder, on a mesh or None."""
    own: Arguments = parsed.own
    run = load(run_dir, mesh=mesh, compute=parsed.execution.compute)
    if not isinstance(run, TrainedTranslator):
        raise UserError(f"{run_dir} holds a {type(run.model).__name__}, no translator")
    # What is not named is the run's own.
    task, named = parsed.config.task, parsed.named
    search: dict[str, Any] = dict(
        beam_size=task.beam_size if "beam_size" in named else None,
        alpha=task.length_penalty if "length_penalty" in named else None,
    )
    if own.stdin:
        for line in run.translate(broadcast_from_first(read_lines), **search):
            print(line)
        return
    assert own.text is not None
    if own.html is not None:
        show_page(own, run, search)
    elif own.plot_attention is not None:
        draw_alignment(own, run, search)
    else:
        print(run.translate([own.text], **search)[0])


def draw_alignment(own: Arguments, run: TrainedTranslator, search: dict[str, Any]) -> None:
    """Draws `plot_attention` and prints the translation."""
    from transformer_jax.plotting.attention import plot_alignment

    assert own.text is not None
    assert own.plot_attention is not None
    alignment = run.align(own.text, **search)
    layers = len(alignment.weights)
    if not -layers <= own.plot_layer < layers:
        raise UserError(f"`plot_layer` {own.plot_layer}: the model has layers 0 to {layers - 1}")
    if not is_first():
        return
    try:
        plot_alignment(
            alignment.weights[own.plot_layer],
            alignment.source_tokens,
            alignment.target_tokens,
            own.plot_attention,
            title=f"{own.text} → {alignment.text}",
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{own.plot_attention}: the picture cannot be written ({error})") from None
    print(alignment.text)


def show_page(own: Arguments, run: TrainedTranslator, search: dict[str, Any]) -> None:
    """Writes `html` and prints the translation that it shows."""
    from transformer_jax.interpretability.sentence import attention_of_translation
    from transformer_jax.plotting.attention_page import AttentionPage

    assert own.text is not None
    assert own.html is not None
    made = run.align(own.text, **search)
    print(made.text)
    maps = attention_of_translation(run.model, run.tokenizer, own.text, made.target_ids)
    if is_first():
        AttentionPage(maps, title=f"{own.text} → {made.text}").save(own.html)


def show_plan(parsed: Parsed) -> None:
    """Prints what the compiler for `topology` says of one translation by the trained run.

    Raises:
      UserError: flags that are missing, or see `show_decoding`.
    """
    own: Arguments = parsed.own
    if own.topology is None or own.run_dir is None:
        raise UserError("the plan of a translation needs `run_dir` and `topology`")
    stored = read_run(own.run_dir, TASKS)
    config = stored.model_config
    if type(config) not in {entry.config for entry in TRANSLATORS.values()}:
        raise UserError(f"{own.run_dir} has a {type(config).__name__}, which is of no translator")
    task = parsed.config.task if "beam_size" in parsed.named else stored.run.task
    topology, rows = target(own.topology), 1 if own.text is not None else SENTENCES
    show_chips(topology, parsed.execution.mesh, rows)
    source = bucket_length(TOKENS, config.max_length)
    found = show_decoding(
        config,
        topology=topology,
        mesh=parsed.execution.mesh,
        compute=parsed.execution.compute,
        rows=rows,
        prompt=source,
        length=longest_target(source, config.max_length),
        beams=task.beam_size,
        dtype=config.dtype,
        parameters="float32",  # a run's stay so whatever it computes in
    )
    if own.json:
        print(json.dumps(found))


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax translate") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=default_recipe
    )
    own: Arguments = parsed.own
    check(own)
    uses = own.text is not None or own.stdin
    if uses and own.dry_run:
        show_plan(parsed)
        return
    if planned(ENTRY, parsed):
        return
    parsed.execution.processes.join()
    config = parsed.config
    run_dir = pathlib.Path(own.run_dir or default_run_dir(ENTRY, parsed, corpus_name(parsed)))
    if uses:
        keep_programs(run_dir)
        with parsed.execution.on_mesh() as mesh:
            translate(parsed, run_dir, mesh)
    else:
        train(ENTRY, config, run_dir, parsed.execution)


def corpus_name(parsed: Parsed) -> str:
    """What a run folder calls its corpus: the recipe if it decides the corpus, else the corpus itself."""
    task = parsed.config.task
    if "recipe" in parsed.named and "corpus" not in parsed.named:
        return parsed.config.recipe
    return "files" if task.train else task.corpus
