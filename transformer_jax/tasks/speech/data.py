"""The recordings of a speech task: its data config, and its splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from transformer_jax.data.corpora.recordings import Recordings, open_recordings
from transformer_jax.data.corpora.synthetic_speech import spoken_digits
from transformer_jax.errors import UserError
from transformer_jax.training.config import FREE, RunConfig, check_at_least, check_below_one, choose

_SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class SpeechRecognitionConfig:
    """The recordings of a speech recognizer's run, their augmentation, its losses and its search.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    data: tuple[str, ...] = ()
    """Recordings to train on: a table (TSV, CSV or JSONL with the columns file, transcript and maybe speaker),
    a table and a folder or archive of sound files, or tfds:NAME. Defaults to synthesized digits."""
    valid: tuple[str, ...] = ()
    """Recordings to validate on, as in `data`; defaults to `valid_speaker`, or to the share `held_out` of
    `data`. A tfds: set is read from its test split."""
    test: tuple[str, ...] = ()
    """Recordings to score the trained model on; defaults to the test split of a tfds: set, or to the validation
    recordings."""
    splits: tuple[str, str] = _SPLITS
    """Training and test split of a tfds: set."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS data sets; None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    held_out: float = 0.1
    """Share of the recordings to hold out for validation, unless `valid` or `valid_speaker` is set."""
    valid_speaker: str = ""
    """Speaker whose recordings are held out for validation."""
    join: int = 1
    """Maximum number of recordings that are joined to an example, in training and scoring; of one speaker if
    the table has speakers."""
    batch_size: int = 32
    """Examples per batch, B."""
    speed: float = 0.0
    """Largest random change of the speed: 0.1 draws factors of 0.9 to 1.1."""
    pitch: float = 0.0
    """Largest random change of the pitch and the formants."""
    noise: float = 0.0
    """Largest loudness of random noise, relative to the speech."""
    masks: int = 0
    """Number of random bands of the spectrogram that are hidden, in frequency and in time."""
    ctc_weight: float = 0.5
    """Weight of the CTC loss of the encoder, for a model with `ctc`; the decoder's loss has the rest."""
    label_smoothing: float = 0.0
    """Probability to spread over the vocabulary."""
    language: str = ""
    """Code of the language of the recordings, for a start with several languages."""
    workers: int = dataclasses.field(default=0, metadata=FREE)
    """Processes that change recordings; 0 uses a thread."""
    search: Literal["ctc", "attention"] = dataclasses.field(default="ctc", metadata=FREE)
    """Read transcripts from the CTC head of the encoder, or search them with the decoder."""
    beam_size: int = dataclasses.field(default=1, metadata=FREE)
    """Number of beams after training; 1 is greedy search. More than one beam needs the decoder."""
    length_penalty: float = dataclasses.field(default=0.0, metadata=FREE)
    """Exponent of the length penalty of beams; larger values prefer longer transcripts."""

    def __post_init__(self) -> None:
        if (self.valid or self.test or self.valid_speaker) and not self.data:
            raise UserError("`valid`, `test` and `valid_speaker` need `data`")
        if self.valid and self.valid_speaker:
            raise UserError("`valid` and `valid_speaker` contradict each other: leave one out")
        is_tfds = self.data[:1] and self.data[0].startswith("tfds:")
        if not is_tfds and (self.data_dir is not None or self.splits != _SPLITS):
            raise UserError("`data_dir` and `splits` need a `data` tfds:NAME")
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        check_at_least(
            self, join=1, batch_size=1, speed=0, pitch=0, noise=0, masks=0, ctc_weight=0, label_smoothing=0,
            workers=0, beam_size=1,
        )  # fmt: skip
        check_below_one(self, "speed", "pitch", "label_smoothing", "ctc_weight")
        choose("search", self.search, ("ctc", "attention"))
        if self.length_penalty and self.beam_size == 1:
            raise UserError("`length_penalty` compares beams: set `beam_size` above 1")


def open_splits(config: RunConfig, note: Callable[[str], None]) -> tuple[Recordings, ...]:
    """Return the training, validation and test recordings of a run.

    Raises:
      UserError: See `open_recordings`; or the speaker to validate on is unknown.
    """
    task: SpeechRecognitionConfig = config.task
    if not task.data:
        return spoken_digits()

    def open_split(source: Sequence[str], split: str) -> Recordings:
        recordings = open_recordings(source, split=split, data_dir=task.data_dir)
        if recordings.unused > 0:
            note(f"{recordings.unused:,} sound files of {recordings.path} have no transcript and are left out")
        for conversion, count in recordings.conversions.items():
            note(f"{count:,} recordings of {recordings.path} are {conversion}: converted to mono at 16,000 Hz")
        return recordings

    train = open_split(task.data, task.splits[0])
    if task.valid:
        valid = open_split(task.valid, task.splits[1])
    elif task.valid_speaker:
        chosen = np.array([speaker == task.valid_speaker for speaker in train.speakers], bool)
        if not chosen.any() or chosen.all():
            known = ", ".join(sorted(set(train.speakers))[:12]) or "none: the table has no column speaker"
            raise UserError(f"`valid_speaker` {task.valid_speaker!r} is not one of the speakers, {known}")
        train, valid = train.select(np.flatnonzero(~chosen)), train.select(np.flatnonzero(chosen))
    else:
        train, valid = train.hold_out(task.held_out)
    is_tfds = task.data[0].startswith("tfds:")
    test = open_split(task.test or task.data, task.splits[1]) if task.test or is_tfds else valid
    return train, valid, test
