"""Shared parts of the commands of text encoders: train a run, or answer texts with a trained one."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from transformer_jax.commands.parsing import Parsed, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, default_run_dir, planned, train
from transformer_jax.data.corpora.text_files import split_lines
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.encoders.trained import TrainedEncoder
from transformer_jax.training.task import TaskEntry

# Lines of standard input that are answered together.
_BATCH = 512
# Maximum characters of each text in the title of a page.
_MAX_TITLE = 200


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of these commands."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. With --text or --stdin also a published folder. None:
    runs/FOLDER-COMMAND-MODEL with the folder of the training file."""
    text: str | None = None
    """Answer this text with the run in --run-dir; no training. A tab separates two columns."""
    stdin: bool = False
    """Answer each line of standard input with the run in --run-dir; a tab separates two columns."""
    html: str | None = None
    """With --text: write the attention over the text, every layer and head, as an interactive page; for
    `answer` the window with the answer."""
    allow_nonfinite: bool = False
    """With --text or --stdin: use a published folder although some of its weights are NaN or infinite."""
    json: bool = False
    """With --text or --stdin: print a JSON object per line. With --dry-run --topology: print an object last."""


class Use(NamedTuple):
    """How a command answers texts with a trained encoder.

    Attributes:
      run_type: Type that `load` must return, or a tuple of types.
      verb: What the run must be able to do, for error messages.
      read: Function from a run and a line to an item.
      answer: Function from a run and items to a JSON object for each.
      line: Function from an object to its line of text.
      fields: Fields of the run's config that answers read, whose flags are therefore allowed.
      page_input: Function from a run and an item to the model and the text that a page shows.
      reads_empty: Whether a line may be empty.
      draw: Function of a run and the first item that writes a picture, or None.
    """

    run_type: Any
    verb: str
    read: Callable[[TrainedEncoder, str], Any]
    answer: Callable[[Any, list[Any]], Sequence[Any]]
    line: Callable[[Any], str]
    fields: tuple[str, ...] = ()
    page_input: Callable[[Any, Any], tuple[Any, Any]] = lambda run, item: (run.model, item)
    reads_empty: bool = False
    draw: Callable[[Any, Any], None] | None = None


def check(flags: Any, text: str | None, name: str = "text") -> None:
    """Check the flags against each other.

    Args:
      flags: Flags of the command.
      text: The text to answer, or None.
      name: Name of the text's flag.

    Raises:
      UserError: Flags contradict each other, or the text is empty or not UTF-8.
    """
    if text is not None and flags.stdin:
        raise UserError(f"`{name}` and `stdin` contradict each other: use one of them")
    if flags.dry_run and (text is not None or flags.stdin):
        raise UserError(
            f"`dry_run` plans a training, but `{name}` and `stdin` use a trained run: use one of them"
        )
    if flags.html is not None and text is None:
        raise UserError(f"`html` shows the text of `{name}`: add it")
    if flags.html is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(flags.html)
    if text is not None:
        if not text.strip():
            raise UserError(f"`{name}` is empty: write a text with at least one word")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"`{name}` is not UTF-8: convert it first") from None


def lines_of_stdin(*, allow_empty: bool = False) -> Iterator[str]:
    """Yield the lines of standard input without their line ends.

    Args:
      allow_empty: Accept lines without a word.

    Raises:
      UserError: A line is empty, too long or not UTF-8.
    """
    count = 0
    for content in sys.stdin.buffer:  # each part is answered while the next one is written
        for number, line in split_lines(content, "standard input", first=count + 1):
            if not (allow_empty or line.strip()):
                raise UserError(
                    f"standard input, line {number} is empty: each line must have at least one word"
                )
            yield line
            count = number


def in_batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield items in lists, so that a stream of any length is answered while it is read."""
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def columns(line: str, names: str) -> tuple[str, str]:
    """Return the two tab-separated columns of a line.

    Raises:
      UserError: The line does not have two columns.
    """
    parts = line.split("\t")
    if len(parts) != 2:
        raise UserError(f"{len(parts)} column(s) in {line[:60]!r}: separate {names} by a tab")
    return parts[0], parts[1]


def use(parsed: Parsed, usage: Use, folder: str, text: str | None) -> None:
    """Print the answers for `text`, or for the lines of standard input, by the model of a folder.

    Raises:
      UserError: The folder holds another kind of model, or the model cannot read a text.
    """
    flags, run = parsed.flags, load(folder, allow_nonfinite=parsed.flags.allow_nonfinite)
    if not isinstance(run, usage.run_type):
        raise UserError(f"{folder} holds a {type(run.model).__name__}, which cannot {usage.verb}")
    config = getattr(run.model.config, "encoder", run.model.config)
    if "model" in parsed.named and type(config) is not type(parsed.config.model):
        raise UserError(f"{folder} holds a {type(run.model).__name__}, which is not the `model` named")

    def items() -> Iterator[Any]:
        if text is not None:
            yield usage.read(run, text)
            return
        for number, line in enumerate(lines_of_stdin(allow_empty=usage.reads_empty), 1):
            try:
                item = usage.read(run, line)
            except UserError as error:
                raise UserError(f"standard input, line {number}: {error}") from None
            yield item

    for number, batch in enumerate(in_batches(items())):
        try:
            answers = usage.answer(run, batch)
        except UserError as error:
            if text is not None:
                raise
            first = number * _BATCH + 1
            raise UserError(f"standard input, lines {first} to {first + len(batch) - 1}: {error}") from None
        if flags.html is not None:
            model, page_text = usage.page_input(run, batch[0])
            write_page(model, run.processor, page_text, flags.html, title=title_of(batch[0]))
        if usage.draw is not None and number == 0:
            usage.draw(run, batch[0])
        for answer in answers:
            line = json.dumps(answer, ensure_ascii=False) if flags.json else usage.line(answer)
            print(one_line(line), flush=True)


def title_of(item: str | tuple[str, str] | list[str]) -> str:
    """Return the first characters of a text, a pair of texts, or a list of words."""
    parts = item if isinstance(item, tuple) else (item if isinstance(item, str) else " ".join(item),)
    return " | ".join(textwrap.shorten(part, _MAX_TITLE, placeholder=" ...") for part in parts)


def write_page(model: Any, tokenizer: EncoderTokenizer, text: Any, path: str, *, title: str) -> None:
    """Write the interactive page of the attention over a text; see `attention_of_encoder`.

    A text above the model's limit is truncated to the part that the model reads.

    Raises:
      UserError: A page cannot hold so many weights, or the file cannot be written.
    """
    from transformer_jax.interpretability.sentence import attention_of_encoder
    from transformer_jax.plotting.attention_page import AttentionPage

    if not isinstance(text, EncodedText):
        text = truncate(tokenizer, text, model.config.max_length)
    AttentionPage(attention_of_encoder(model, tokenizer, text), title=title).save(path)


def truncate(tokenizer: EncoderTokenizer, text: str | tuple[str, str] | list[str], limit: int) -> EncodedText:
    """Encode a text, a pair of texts or a list of words in at most `limit` tokens."""
    (encoding,) = tokenizer.encode_batch([text], max_length=limit, words=isinstance(text, list))
    return encoding


def run_dir_of(entry: TaskEntry, parsed: Parsed, command: str) -> pathlib.Path:
    """Return the folder of a run to train: `run_dir`, or a name from the data and the command."""
    task = parsed.config.task
    data = pathlib.Path(task.train[0]).absolute().parent.name if task.train else task.corpus or "run"
    return pathlib.Path(parsed.flags.run_dir or default_run_dir(entry, parsed, f"{data}-{command}"))


def main(
    entry: TaskEntry,
    usage_of: Callable[[Parsed], Use],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    flag_type: type[Arguments] = Arguments,
) -> None:
    """Run a command that fine-tunes an encoder, or answers texts with a trained one.

    Args:
      entry: The task's entry.
      usage_of: Function from the command line to how texts are answered; it may reject the command line.
      argv: Arguments of the command line; None reads those of the process.
      prog: Name of the command in `--help`.
      description: Description in `--help`.
      flag_type: Dataclass of the command's flags.
    """
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(entry, argv, flag_type, prog=prog, description=description)
    flags: Arguments = parsed.flags
    check(flags, flags.text)
    if planned(entry, parsed, answers=flags.text is not None or flags.stdin):
        return
    usage = usage_of(parsed)
    if flags.text is not None or flags.stdin:
        if flags.run_dir is None:
            raise UserError("name the trained run with `run_dir`")
        parsed.check_no_training(used=usage.fields)
        if is_first():
            use(parsed, usage, flags.run_dir, flags.text)
        return
    parsed.execution.processes.join()
    command = prog.split()[-1].rpartition(".")[
        2
    ]  # "tag" in "transformer-jax tag" and "python -m experiments.tag"
    train(entry, parsed.config, run_dir_of(entry, parsed, command), parsed.execution)
