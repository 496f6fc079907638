"""Train and score a translator, and translate with it."""

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
from transformer_jax.data.corpora.text_files import split_lines
from transformer_jax.decoding.translator import MAX_SENTENCES, bucket_length, max_target_length
from transformer_jax.distributed.processes import broadcast_from_first, is_first
from transformer_jax.errors import UserError
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.tasks import TASKS, load
from transformer_jax.tasks.translators.translation import ENTRY, TrainedTranslator, default_recipe
from transformer_jax.training.run_folder import read_run

DESCRIPTION = "Train a translator, score it on unseen sentences, and translate with it."


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. None: runs/CORPUS-MODEL, or runs/CORPUS-MODEL-PRESET with
    --preset."""
    text: str | None = None
    """Translate this sentence with the run in --run-dir and print the translation; no training."""
    stdin: bool = False
    """Translate the lines of standard input with the run in --run-dir; an empty line remains empty."""
    plot_attention: str | None = None
    """With --text: draw the cross-attention of the translation, heads side by side, to this picture."""
    plot_layer: int = -1
    """With --plot-attention: the decoder layer to draw, counted from 0, or negative from the end."""
    html: str | None = None
    """With --text: write the attention of the translation, every layer and head, as an interactive page."""
    json: bool = False
    """With --dry-run --topology: print a JSON object last."""


def check(flags: Arguments) -> None:
    """Check the flags against each other.

    Raises:
      UserError: Flags contradict each other, or the text is empty or not UTF-8.
    """
    if flags.plot_attention is not None and flags.text is None:
        raise UserError("`plot_attention` draws the sentence of `text`: add it")
    if flags.html is not None and flags.text is None:
        raise UserError("`html` shows the sentence of `text`: add it")
    if flags.html is not None:
        from transformer_jax.plotting.page import check_writable

        if flags.plot_attention is not None:
            raise UserError("`html` and `plot_attention` contradict each other: use one of them")
        check_writable(flags.html)
    if flags.text is not None and flags.stdin:
        raise UserError("`text` and `stdin` contradict each other: use one of them")
    if flags.text is None:
        return
    if not flags.text.strip():
        raise UserError("`text` is empty: write a sentence")
    try:
        flags.text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("`text` is not UTF-8: convert it first") from None


def read_lines() -> list[str]:
    """Return the lines of standard input, divided as the lines of training files.

    Raises:
      UserError: Standard input is not UTF-8, or a line is too long.
    """
    return [line for _, line in split_lines(sys.stdin.buffer.read(), "standard input")]


def translate(parsed: Parsed, run_dir: pathlib.Path, mesh: Any) -> None:
    """Print the translation of `text` or standard input by a run or a published folder, on a mesh or None."""
    flags: Arguments = parsed.flags
    run = load(run_dir, mesh=mesh, compute=parsed.execution.compute)
    if not isinstance(run, TrainedTranslator):
        raise UserError(f"{run_dir} holds a {type(run.model).__name__}, not a translator")
    # Values that no flag names are the run's.
    task, named = parsed.config.task, parsed.named
    search: dict[str, Any] = dict(
        beam_size=task.beam_size if "beam_size" in named else None,
        alpha=task.length_penalty if "length_penalty" in named else None,
    )
    if flags.stdin:
        for line in run.translate(broadcast_from_first(read_lines), **search):
            print(line)
        return
    assert flags.text is not None
    if flags.html is not None:
        show_page(flags, run, search)
    elif flags.plot_attention is not None:
        draw_alignment(flags, run, search)
    else:
        print(run.translate([flags.text], **search)[0])


def draw_alignment(flags: Arguments, run: TrainedTranslator, search: dict[str, Any]) -> None:
    """Draw the picture of `plot_attention` and print the translation."""
    from transformer_jax.plotting.attention import plot_alignment

    assert flags.text is not None
    assert flags.plot_attention is not None
    alignment = run.align(flags.text, **search)
    layers = len(alignment.weights)
    if not -layers <= flags.plot_layer < layers:
        raise UserError(f"`plot_layer` {flags.plot_layer}: the model has layers 0 to {layers - 1}")
    if not is_first():
        return
    try:
        plot_alignment(
            alignment.weights[flags.plot_layer],
            alignment.source_tokens,
            alignment.target_tokens,
            flags.plot_attention,
            title=f"{flags.text} → {alignment.text}",
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{flags.plot_attention}: the picture cannot be written ({error})") from None
    print(alignment.text)


def show_page(flags: Arguments, run: TrainedTranslator, search: dict[str, Any]) -> None:
    """Write the page of `html` and print the translation."""
    from transformer_jax.interpretability.sentence import attention_of_translation
    from transformer_jax.plotting.attention_page import AttentionPage

    assert flags.text is not None
    assert flags.html is not None
    alignment = run.align(flags.text, **search)
    print(alignment.text)
    maps = attention_of_translation(run.model, run.tokenizer, flags.text, alignment.target_ids)
    if is_first():
        AttentionPage(maps, title=f"{flags.text} → {alignment.text}").save(flags.html)


def show_plan(parsed: Parsed) -> None:
    """Print the plan of a translation by the trained run for `topology`.

    Raises:
      UserError: Flags are missing, or see `show_decoding`.
    """
    flags: Arguments = parsed.flags
    if flags.topology is None or flags.run_dir is None:
        raise UserError("the plan of a translation needs `run_dir` and `topology`")
    stored = read_run(flags.run_dir, TASKS)
    config = stored.model_config
    if type(config) not in {entry.config for entry in TRANSLATORS.values()}:
        raise UserError(
            f"{flags.run_dir} has a {type(config).__name__}, which is not the config of a translator"
        )
    task = parsed.config.task if "beam_size" in parsed.named else stored.run.task
    topology, rows = target(flags.topology), 1 if flags.text is not None else MAX_SENTENCES
    show_chips(topology, parsed.execution.mesh, rows)
    source = bucket_length(TOKENS, config.max_length)
    values = show_decoding(
        config,
        topology=topology,
        mesh=parsed.execution.mesh,
        compute=parsed.execution.compute,
        rows=rows,
        prompt=source,
        length=max_target_length(source, config.max_length),
        beams=task.beam_size,
        dtype=config.dtype,
        parameters="float32",  # the parameters of a run, for every compute dtype
    )
    if flags.json:
        print(json.dumps(values))


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax translate") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=default_recipe
    )
    flags: Arguments = parsed.flags
    check(flags)
    uses = flags.text is not None or flags.stdin
    if uses and flags.dry_run:
        show_plan(parsed)
        return
    if planned(ENTRY, parsed):
        return
    parsed.execution.processes.join()
    config = parsed.config
    run_dir = pathlib.Path(flags.run_dir or default_run_dir(ENTRY, parsed, corpus_name(parsed)))
    if uses:
        keep_programs()
        with parsed.execution.on_mesh() as mesh:
            translate(parsed, run_dir, mesh)
    else:
        train(ENTRY, config, run_dir, parsed.execution)


def corpus_name(parsed: Parsed) -> str:
    """Return the corpus in the name of a run folder, which is the recipe if that determines the corpus."""
    task = parsed.config.task
    if "recipe" in parsed.named and "corpus" not in parsed.named:
        return parsed.config.recipe
    return "files" if task.train else task.corpus
