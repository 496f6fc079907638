"""What the commands of text encoders share: a run is trained, or answers texts, a line or an object each."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformer_jax.commands.parsing import Parsed, parse_run
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.encoders.trained import TrainedEncoder
from transformer_jax.training.task import TaskEntry

# Lines of standard input that go through the model together.
_BATCH = 512
# Characters of each text in the title of a page.
_TITLE = 200


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of these commands alone."""

    run_dir: str | None = None
    """Folder of the run; a run that exists there is resumed. With --text or --stdin a published folder may
    stand here too. None: runs/FOLDER-COMMAND-MODEL, FOLDER being that of the training file."""
    text: str | None = None
    """A text for the trained run in --run-dir; no training. Two columns have a tab between them."""
    stdin: bool = False
    """Read texts for the trained run from standard input, a line each; two columns have a tab between them."""
    html: str | None = None
    """With --text: write all attention over it, every layer and head, as an interactive page; of a text that
    `answer` reads in windows over the one with the answer."""
    json: bool = False
    """With --text or --stdin: print one JSON object a line. With --dry-run --topology: one object last."""


class Use(NamedTuple):
    """How a trained encoder answers texts.

    Attributes:
      kind: of the object that `load` gives, or several.
      does: in a word, for messages.
      read: from a line to an item.
      answer: from a run and items to an object each.
      line: an object as a person reads it.
      fields: of a run's config that it reads, whose flags go with texts too.
      shown: from a run and an item to what a page shows: the model, and what it reads.
    """

    kind: Any
    does: str
    read: Callable[[TrainedEncoder, str], Any]
    answer: Callable[[Any, list[Any]], Sequence[Any]]
    line: Callable[[Any], str]
    fields: tuple[str, ...] = ()
    shown: Callable[[Any, Any], tuple[Any, Any]] = lambda run, item: (run.model, item)


def check(own: Any, text: str | None, name: str = "text") -> None:
    """Checks the flags that contradict each other.

    Args:
      own: flags of the command.
      text: that a trained run is given, or None.
      name: of its flag.

    Raises:
      UserError: they do.
    """
    if text is not None and own.stdin:
        raise UserError(f"`{name}` and `stdin` contradict each other: give one of them")
    if own.dry_run and (text is not None or own.stdin):
        raise UserError(
            f"`dry_run` plans a training, and `{name}` or `stdin` is for a trained run: give one of them"
        )
    if own.html is not None and text is None:
        raise UserError(f"`html` shows the text of `{name}`: give one")
    if own.html is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(own.html)
    if text is not None:
        if not text.strip():
            raise UserError(f"`{name}` is empty: a text of no tokens has nothing to read")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"`{name}` is not UTF-8: convert it first") from None


def lines_of_stdin() -> Iterator[str]:
    """The lines of standard input without their ends.

    Raises:
      UserError: not UTF-8, or an empty line.
    """
    for number, content in enumerate(sys.stdin.buffer, 1):
        try:
            line = content.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"standard input, line {number}: not UTF-8; convert it first") from None
        if not line.strip():
            raise UserError(f"standard input, line {number} is empty: a text of no tokens has nothing to read")
        yield line


def in_batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Items in lists, so that a stream of any length is answered as it comes."""
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def columns(line: str, names: str) -> tuple[str, str]:
    """The two tab-separated columns of a line.

    Raises:
      UserError: another number of them.
    """
    parts = line.split("\t")
    if len(parts) != 2:
        raise UserError(f"{len(parts)} column(s): give {names} with a tab between them: {line[:60]!r}")
    return parts[0], parts[1]


def use(parsed: Parsed, how: Use, folder: str, text: str | None) -> None:
    """Answers `text`, or the lines of standard input, with the model of a folder.

    Raises:
      UserError: a folder of another kind or model, or a text that the model does not take.
    """
    own, run = parsed.own, load(folder)
    if not isinstance(run, how.kind):
        raise UserError(f"{folder} holds a {type(run.model).__name__}, which does not {how.does}")
    config = getattr(run.model.config, "encoder", run.model.config)
    if "model" in parsed.named and type(config) is not type(parsed.config.model):
        raise UserError(f"{folder} holds a {type(run.model).__name__}, which is no `model` of that name")

    def items() -> Iterator[Any]:
        if text is not None:
            yield how.read(run, text)
            return
        for number, line in enumerate(lines_of_stdin(), 1):
            try:
                item = how.read(run, line)
            except UserError as error:
                raise UserError(f"standard input, line {number}: {error}") from None
            yield item

    for number, batch in enumerate(in_batches(items())):
        try:
            answers = how.answer(run, batch)
        except UserError as error:
            if text is not None:
                raise
            first = number * _BATCH + 1
            raise UserError(f"standard input, lines {first} to {first + len(batch) - 1}: {error}") from None
        if own.html is not None:
            model, read = how.shown(run, batch[0])
            write_page(model, run.processor, read, own.html, title=title_of(batch[0]))
        for found in answers:
            print(json.dumps(found, ensure_ascii=False) if own.json else how.line(found), flush=True)


def title_of(item: str | tuple[str, str] | list[str]) -> str:
    """The beginning of a text, of two, or of the words of one."""
    parts = item if isinstance(item, tuple) else (item if isinstance(item, str) else " ".join(item),)
    return " | ".join(textwrap.shorten(part, _TITLE, placeholder=" ...") for part in parts)


def write_page(model: Any, tokenizer: EncoderTokenizer, text: Any, path: str, *, title: str) -> None:
    """The interactive page of a text's attention; see `attention_of_encoder`.

    Of a text above the model's limit it shows the part that the model read.

    Raises:
      UserError: more weights than a page holds, or a file that cannot be written.
    """
    from transformer_jax.interpretability.sentence import attention_of_encoder
    from transformer_jax.plotting.attention_page import AttentionPage

    if not isinstance(text, EncodedText):
        text = cut_text(tokenizer, text, model.config.max_length)
    AttentionPage(attention_of_encoder(model, tokenizer, text), title=title).save(path)


def cut_text(tokenizer: EncoderTokenizer, text: str | tuple[str, str] | list[str], limit: int) -> EncodedText:
    """A text, two, or the words of one, of `limit` tokens at most."""
    (encoding,) = tokenizer.encode_batch([text], max_length=limit, words=isinstance(text, list))
    return encoding


def run_dir_of(entry: TaskEntry, parsed: Parsed, command: str) -> pathlib.Path:
    """The folder of a run that is trained: `run_dir`, or one that says from which data and by what command."""
    task = parsed.config.task
    data = pathlib.Path(task.train[0]).absolute().parent.name if task.train else task.corpus or "run"
    return pathlib.Path(parsed.own.run_dir or default_run_dir(entry, parsed, f"{data}-{command}"))


def main(
    entry: TaskEntry,
    how: Callable[[Parsed], Use],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    flags: type[Arguments] = Arguments,
) -> None:
    """A command that fine-tunes an encoder and uses a trained one.

    Args:
      entry: its task.
      how: from the command line, which it may refuse, to how a trained encoder answers.
      argv: arguments of the command line; None: those of the process.
      prog, description: for `--help`.
      flags: of the command alone.
    """
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(entry, argv, flags, prog=prog, description=description)
    own: Arguments = parsed.own
    check(own, own.text)
    if planned(entry, parsed, answers=own.text is not None or own.stdin):
        return
    used = how(parsed)
    if own.text is not None or own.stdin:
        if own.run_dir is None:
            raise UserError("name the trained run with `run_dir`")
        parsed.check_no_training(read=used.fields)
        if is_first():
            use(parsed, used, own.run_dir, own.text)
        return
    parsed.execution.processes.join()
    command = prog.split()[-1].rpartition(".")[2]  # of "transformer-jax tag" and "python -m experiments.tag"
    train(entry, parsed.config, run_dir_of(entry, parsed, command), parsed.execution)
