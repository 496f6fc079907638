"""Train a speech recognizer on recordings with transcripts, score it, and transcribe recordings."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformer_jax.commands.parsing import Parsed, flag_value, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, planned, run_dir_of, train
from transformer_jax.data.corpora.audio_files import read_audio
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.speech.speech_recognition import ENTRY
from transformer_jax.tasks.speech.trained import TrainedRecognizer

DESCRIPTION = (
    "Train a speech recognizer on recordings with transcripts, score its transcripts of test recordings, and "
    "transcribe sound files. Without --data it learns synthesized digits."
)


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. With --audio also a published folder. None:
    runs/DATA-MODEL."""
    audio: tuple[str, ...] = ()
    """Transcribe these sound files with the run or published folder in --run-dir; no training."""
    timestamps: bool = False
    """With --audio: generate timestamps, for models that were trained with them."""
    speech_task: str = "transcribe"
    """With --audio: transcribe, or translate to English, for models that were trained to."""
    audio_batch_size: int = 16
    """With --audio: maximum number of windows that are decoded together; fewer need less memory."""
    plot_attention: str | None = None
    """With --audio: draw the spectrogram of the first file's first window and where each word attends, to this
    picture."""
    json: bool = False
    """With --audio: print a JSON object per line. With --dry-run --topology: print a JSON object last."""


def default_recipe(argv: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
    """Return the function that chooses "fine_tune" for a start, "recordings" for data, or else "digits"."""

    def choose(keywords: Mapping[str, Any]) -> str:
        if keywords.get("start"):
            return "fine_tune"
        return "recordings" if flag_value(argv, "--data") else "digits"

    return choose


def _check(parsed: Parsed) -> None:
    flags: Arguments = parsed.flags
    if "audio" in parsed.named and not flags.audio:
        raise UserError("`audio` names no sound file: add one or more files")
    if not flags.audio and (flags.plot_attention is not None or flags.timestamps):
        raise UserError("`plot_attention` and `timestamps` need `audio`")
    if not flags.audio and "speech_task" in parsed.named:
        raise UserError("`speech_task` needs `audio`")
    if not flags.audio and "audio_batch_size" in parsed.named:
        raise UserError("`audio_batch_size` needs `audio`: `batch_size` is that of training")
    if flags.audio_batch_size < 1:
        raise UserError(f"`audio_batch_size` {flags.audio_batch_size} is below 1")
    if flags.audio and flags.run_dir is None:
        raise UserError("name the trained run with `run_dir`")
    if flags.plot_attention is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(flags.plot_attention, "plot_attention")


def use(parsed: Parsed) -> None:
    """Print a transcript of each sound file, and draw where the words of the first one attend.

    Raises:
      UserError: The folder holds another kind of model, a file cannot be read, or one cannot be written.
    """
    flags: Arguments = parsed.flags
    assert flags.run_dir is not None
    run = load(flags.run_dir, compute=parsed.execution.compute)
    if not isinstance(run, TrainedRecognizer):
        raise UserError(f"{flags.run_dir} holds a {type(run.model).__name__}, not a speech recognizer")
    task = parsed.config.task
    options: dict[str, Any] = {
        "timestamps": flags.timestamps, "task": flags.speech_task, "rows": flags.audio_batch_size
    }  # fmt: skip
    names = {"search": "search", "beam_size": "beam_size", "length_penalty": "alpha", "language": "language"}
    options |= {name: getattr(task, field) for field, name in names.items() if field in parsed.named}
    recordings = [read_audio(file) for file in flags.audio]
    if conversions := collections.Counter(conversion for _, conversion in recordings if conversion):
        counts = ", ".join(f"{count} {conversion}" for conversion, count in conversions.items())
        print(f"converted to mono at 16,000 Hz: {counts}", file=sys.stderr)
    transcripts = run.transcripts([samples for samples, _ in recordings], **options)
    for file, transcript in zip(flags.audio, transcripts, strict=True):
        if flags.json:
            segments = [dataclasses.asdict(segment) for segment in transcript.segments]
            line = {"file": file, "text": transcript.text, "segments": segments}
            print(json.dumps(line, ensure_ascii=False))
        elif flags.timestamps:
            for segment in transcript.segments:
                print(one_line(f"{file}: {segment.start:7.2f} to {segment.end:7.2f} s  {segment.text}"))
        else:
            print(one_line(f"{file}: {transcript.text}"))
    if flags.plot_attention is not None:
        from transformer_jax.plotting.speech import plot_speech

        attention = run.align(recordings[0][0], **options)
        try:
            plot_speech(attention, path=flags.plot_attention)
        except (OSError, ValueError) as error:
            raise UserError(f"{flags.plot_attention}: the picture cannot be written ({error})") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax transcribe") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=default_recipe(argv)
    )
    flags: Arguments = parsed.flags
    if planned(ENTRY, parsed, answers=bool(flags.audio)):
        return
    _check(parsed)
    if flags.audio:
        parsed.check_no_training(used=("search", "beam_size", "length_penalty", "language"))
        if is_first():
            use(parsed)
        return
    parsed.execution.processes.join()
    train(ENTRY, parsed.config, pathlib.Path(run_dir_of(ENTRY, parsed, embedded="digits")), parsed.execution)
