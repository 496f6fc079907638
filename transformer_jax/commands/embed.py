"""Compute vectors of texts with any text encoder, and train an encoder on pairs of texts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use, lines_of_stdin, truncate, use
from transformer_jax.commands.parsing import parse_run
from transformer_jax.commands.train import planned, train
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.encoders.sentence_embedding import ENTRY
from transformer_jax.tasks.encoders.trained import TrainedEncoder

DESCRIPTION = (
    "Compute vectors of texts with a published folder or a run; with --train, train an encoder for them."
)


@dataclasses.dataclass(frozen=True)
class Arguments(encoder_use.Arguments):
    """The flags of this command."""

    weights: str | None = None
    """Folder of the model: a published folder, or a run of any text encoder."""
    normalize: bool | None = None
    """Scale vectors to length 1. None: the setting of the folder, else no."""
    prompt: str | None = None
    """Text to put before each text. None: that of --prompt-name."""
    prompt_name: str | None = None
    """One of the prompts of the folder. None: the default of the folder, if it has one."""
    similarity: str | None = None
    """With --stdin: draw the cosine similarities of all pairs of texts to this picture."""


def _use(flags: Arguments, pooling: str | None) -> Use:
    def answer(run: TrainedEncoder, items: list[str]) -> list[dict[str, Any]]:
        vectors = run.embed(
            items,
            pooling=pooling,
            normalize=flags.normalize,
            prompt=flags.prompt,
            prompt_name=flags.prompt_name,
        )
        if flags.json and not np.isfinite(vectors).all():
            raise UserError("a vector has NaN or infinite values, which JSON cannot represent")
        return [
            {"text": text, "embedding": vector.tolist()} for text, vector in zip(items, vectors, strict=True)
        ]

    def line(answer: dict[str, Any]) -> str:
        return " ".join(f"{x:.6f}" for x in answer["embedding"])

    def page_input(run: TrainedEncoder, text: str) -> tuple[Any, EncodedText]:
        return run.model, truncate(run.processor, text, run.vector_limit)

    return Use(
        TrainedEncoder, "embed", lambda run, line: line, answer, line, page_input=page_input, reads_empty=True
    )


def draw_similarity(folder: str, path: str, **options: Any) -> None:
    """Draw the cosine similarities of the lines of standard input.

    Raises:
      UserError: There are fewer than two texts, or the picture cannot be written.
    """
    from transformer_jax.plotting.similarity import plot_similarity

    texts = list(lines_of_stdin(allow_empty=True))
    if len(texts) < 2:
        raise UserError("`similarity` compares texts: give two or more lines")
    run = load(folder)
    if not isinstance(run, TrainedEncoder):
        raise UserError(f"{folder} holds a {type(run.model).__name__}, which does not embed")
    try:
        plot_similarity(run.embed(texts, **options), texts, path, axis_label="text")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written ({error})") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax embed") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION)
    flags: Arguments = parsed.flags
    encoder_use.check(flags, flags.text)
    if planned(ENTRY, parsed, answers=flags.text is not None or flags.stdin):
        return
    if flags.similarity is not None and not flags.stdin:
        raise UserError("`similarity` draws the texts of `stdin`: add it")
    if flags.similarity is not None and flags.json:
        raise UserError("`similarity` draws a picture and prints nothing: leave `json` out")
    if flags.normalize is not None and (
        flags.similarity is not None or (flags.text is None and not flags.stdin)
    ):
        raise UserError("`normalize` scales the vectors of `text` or `stdin`; it does not change similarities")
    task = parsed.config.task
    if flags.text is not None or flags.stdin:
        folder = flags.weights or flags.run_dir
        if flags.weights is not None and flags.run_dir is not None:
            raise UserError("`weights` and `run_dir` both name the model: use one of them")
        if folder is None:
            raise UserError("name the model with `weights`")
        parsed.check_no_training(used=("pooling",))
        pooling = task.pooling if "pooling" in parsed.named else None
        if flags.similarity is not None:
            prompts = dict(prompt=flags.prompt, prompt_name=flags.prompt_name)
            draw_similarity(folder, flags.similarity, pooling=pooling, **prompts)
            return
        use(parsed, _use(flags, pooling), folder, flags.text)
        return
    if flags.weights is not None:
        raise UserError(
            "`weights` needs `text` or `stdin`; to start training from a folder, name it with `start`"
        )
    parsed.execution.processes.join()
    train(ENTRY, parsed.config, encoder_use.run_dir_of(ENTRY, parsed, "embed"), parsed.execution)
