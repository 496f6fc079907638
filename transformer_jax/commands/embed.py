"""Vectors of texts from any trained text encoder; and an encoder trained on pairs of texts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from transformer_jax.commands import encoder_use
from transformer_jax.commands.encoder_use import Use, cut_text, lines_of_stdin, use
from transformer_jax.commands.parsing import parse_run
from transformer_jax.commands.train import planned, train
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.encoders.sentence_embedding import ENTRY
from transformer_jax.tasks.encoders.trained import TrainedEncoder

DESCRIPTION = "Vectors of texts, from a published folder or a run; with --train, an encoder for them."


@dataclasses.dataclass(frozen=True)
class Arguments(encoder_use.Arguments):
    """The flags of this command alone."""

    weights: str | None = None
    """Folder that vectors are made with: a published one, or a run of any text encoder."""
    normalise: bool | None = None
    """Vectors of length 1; None: what the folder says, else no."""
    similarity: str | None = None
    """With --stdin: draw the cosines of all pairs of the texts to this picture."""


def _use(own: Arguments, pooling: str | None) -> Use:
    def answer(run: TrainedEncoder, items: list[str]) -> list[dict[str, Any]]:
        vectors = run.embed(items, pooling=pooling, normalise=own.normalise)
        return [
            {"text": text, "embedding": vector.tolist()} for text, vector in zip(items, vectors, strict=True)
        ]

    def line(found: dict[str, Any]) -> str:
        return " ".join(f"{x:.6f}" for x in found["embedding"])

    def shown(run: TrainedEncoder, text: str) -> tuple[Any, EncodedText]:
        return run.model, cut_text(run.processor, text, run.vector_limit)

    return Use(TrainedEncoder, "embed", lambda run, line: line, answer, line, shown=shown)


def draw_similarity(folder: str, path: str, pooling: str | None) -> None:
    """Draws the cosines of the lines of standard input.

    Raises:
      UserError: fewer than two texts, or a picture that cannot be written.
    """
    from transformer_jax.plotting.similarity import plot_similarity

    texts = list(lines_of_stdin())
    if len(texts) < 2:
        raise UserError("`similarity` compares texts: give two or more lines")
    run = load(folder)
    if not isinstance(run, TrainedEncoder):
        raise UserError(f"{folder} holds a {type(run.model).__name__}, which does not embed")
    try:
        plot_similarity(run.embed(texts, pooling=pooling), texts, path, what="text")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the picture cannot be written ({error})") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax embed") -> None:
    """The command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION)
    own: Arguments = parsed.own
    encoder_use.check(own, own.text)
    if planned(ENTRY, parsed, answers=own.text is not None or own.stdin):
        return
    if own.similarity is not None and not own.stdin:
        raise UserError("`similarity` draws the texts of `stdin`: give it too")
    if own.similarity is not None and own.json:
        raise UserError("`similarity` draws a picture and prints nothing: leave `json` out")
    if own.normalise is not None and (own.similarity is not None or (own.text is None and not own.stdin)):
        raise UserError("`normalise` is for the vectors of `text` or `stdin`; cosines need none")
    task = parsed.config.task
    if own.text is not None or own.stdin:
        folder = own.weights or own.run_dir
        if own.weights is not None and own.run_dir is not None:
            raise UserError("`weights` and `run_dir` both name the model: give one of them")
        if folder is None:
            raise UserError("name the model with `weights`")
        parsed.check_no_training(read=("pooling",))
        pooling = task.pooling if "pooling" in parsed.named else None
        if own.similarity is not None:
            draw_similarity(folder, own.similarity, pooling)
            return
        use(parsed, _use(own, pooling), folder, own.text)
        return
    if own.weights is not None:
        raise UserError(
            "`weights` makes vectors of `text` or `stdin`; to train from a folder name it with `start`"
        )
    parsed.execution.processes.join()
    train(ENTRY, parsed.config, encoder_use.run_dir_of(ENTRY, parsed, "embed"), parsed.execution)
