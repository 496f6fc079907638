"""Recordings with transcripts: a table with its sound files, and sets of TensorFlow Datasets."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from transformer_jax.data.corpora.audio_files import is_audio_name, read_audio, resample
from transformer_jax.data.corpora.captioned_images import numbers_by_name
from transformer_jax.data.corpora.image_archives import Expected
from transformer_jax.data.corpora.image_sets import Subset
from transformer_jax.data.corpora.images import read_files
from transformer_jax.data.corpora.tables import fingerprint, read_table
from transformer_jax.errors import UserError

COLUMNS = ("file", "transcript", "speaker")
_FILES = Expected(
    (), labeled=False, has_classes=False, is_member=is_audio_name,
    missing="no recordings; their names must end in .wav, .flac, .mp3, .ogg ...",
)  # fmt: skip


class Sounds(Protocol):
    """Sequence of samples (n,) float32 at 16 kHz."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Recordings:
    """Recordings with transcripts.

    Attributes:
      path: Path or name of the set, for messages.
      sounds: The samples of each recording.
      transcripts: The transcripts.
      speakers: The speaker of each recording, or () if they are not known.
      unused: Number of sound files without a transcript.
      conversions: Number of recordings for each conversion, such as "stereo".
    """

    path: str
    sounds: Sounds
    transcripts: Sequence[str]
    speakers: Sequence[str] = ()
    unused: int = 0
    conversions: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.transcripts)

    def select(self, numbers: np.ndarray) -> Recordings:
        """Return these recordings, in this order."""
        return dataclasses.replace(
            self,
            sounds=Subset(self.sounds, numbers),
            transcripts=[self.transcripts[n] for n in numbers],
            speakers=[self.speakers[n] for n in numbers] if self.speakers else (),
        )

    def hold_out(self, share: float) -> tuple[Recordings, Recordings]:
        """Return (training recordings, held-out recordings), drawn with seed 0.

        Args:
          share: Share of the recordings to hold out, but at least one.

        Raises:
          UserError: There is only one recording.
        """
        if len(self) < 2:
            raise UserError(f"{self.path}: a single recording cannot be split for validation: name `valid`")
        order = np.random.default_rng(0).permutation(len(self))
        count = min(len(self) - 1, max(1, round(share * len(self))))
        return self.select(np.sort(order[count:])), self.select(np.sort(order[:count]))

    def fingerprint(self) -> str:
        """Return a digest of the transcripts, the speakers and the samples of about a hundred recordings."""
        some = range(0, len(self), max(1, len(self) // 100))
        samples = [hashlib.sha256(np.asarray(self.sounds[n]).tobytes()).hexdigest() for n in some]
        return fingerprint([list(self.transcripts), list(self.speakers), samples])


def open_recordings(source: Sequence[str], *, split: str, data_dir: str | None = None) -> Recordings:
    """Open recordings with transcripts; all are read into memory.

    Args:
      source: (table,) with paths relative to the table's folder, (table, folder or archive), see
        `read_recordings`, or ("tfds:NAME",), a set of TensorFlow Datasets with sound and a text or label.
      split: Split of a TFDS set.
      data_dir: Folder of TFDS's sets.

    Raises:
      UserError: `source` is none of these, or see `read_recordings`.
    """
    if len(source) == 1 and source[0].startswith("tfds:"):
        return _tfds(source[0], split, data_dir)
    if len(source) == 1:
        return read_recordings(source[0], str(pathlib.Path(source[0]).parent))
    if len(source) != 2:
        raise UserError(
            f"{' '.join(source)}: recordings are a table, a table and a folder or archive of sound files, or "
            "tfds:NAME"
        )
    return read_recordings(*source)


def read_recordings(table: str, files: str) -> Recordings:
    """Read transcripts from a table, and the sound files that it names.

    Args:
      table: TSV, CSV or JSONL file with the columns `file` and `transcript`, and maybe `speaker`.
      files: Folder or archive. A file is named by its path in it, or by its file name if that is unique.

    Raises:
      UserError: A file cannot be read, the table lacks a column, a transcript has no letters, or its file is
        missing.
    """
    rows = read_table(table, COLUMNS)
    for name in COLUMNS[:2]:
        if name not in rows.columns:
            raise UserError(f"{table}: no column {name}")
    stored = read_files(pathlib.Path(files), _FILES)
    numbers = numbers_by_name(stored.names)
    sounds, conversions = [], collections.Counter[str]()
    for row, (name, transcript) in enumerate(
        zip(rows.columns["file"], rows.columns["transcript"], strict=True)
    ):
        if not any(character.isalnum() for character in transcript):
            raise UserError(f"{rows.location(row)}: the transcript of {name} has no letters or digits")
        if name not in numbers:
            raise UserError(f"{rows.location(row)}: no sound file {name!r} in {files}")
        content: Any = stored.source[numbers[name]]
        samples, conversion = read_audio(content, f"{files}/{name}")
        sounds.append(samples)
        conversions.update([conversion] if conversion else [])
    texts = [" ".join(text.split()) for text in rows.columns["transcript"]]
    unused = len(stored) - len(set(rows.columns["file"]))
    return Recordings(table, sounds, texts, rows.columns.get("speaker", ()), unused, dict(conversions))


def _tfds(name: str, split: str, data_dir: str | None) -> Recordings:
    from transformer_jax.data.corpora import tfds_sources  # imports tensorflow-datasets, an extra

    def choose(builder: Any) -> tuple[str, str]:
        features = builder.info.features
        sounds = [n for n, feature in sorted(features.items()) if type(feature).__name__ == "Audio"]
        texts = [n for n in ("text", "transcript", "sentence", "label") if n in features]
        if not sounds or not texts:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(sorted(features))}, but needs sound and "
                "a transcript"
            )
        return sounds[0], texts[0]

    builder = tfds_sources.prepared_builder(name.removeprefix("tfds:"), data_dir, check=choose)
    sound, text = choose(builder)
    features = builder.info.features
    rate = features[sound].sample_rate or 16_000
    speaker = next((n for n in ("speaker", "speaker_id") if n in features), None)
    columns = (sound, text) if speaker is None else (sound, text, speaker)
    # TFDS keeps the integers of a sound file, by default 16 bits in an int64.
    is_integer = np.issubdtype(features[sound].np_dtype, np.integer)
    scale = np.iinfo(np.int16).max + 1 if is_integer else 1
    sounds: list[np.ndarray] = []
    texts: list[str] = []
    speakers: list[str] = []
    for example in tfds_sources.TfdsExamples(builder, split, columns):
        samples = np.asarray(example[sound], np.float32)
        if not len(samples):
            raise UserError(f"{name}:{split}: recording {len(texts) + 1} is empty")
        sounds.append(resample(samples / scale, rate))
        value = example[text]
        texts.append(_spoken(_text(features[text].int2str(int(value)) if text == "label" else value)))
        if speaker is not None:
            speakers.append(_text(example[speaker]))
    conversions = {} if rate == 16_000 else {f"{rate:,} Hz": len(texts)}
    return Recordings(f"{name}:{split}", sounds, texts, speakers, 0, conversions)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _spoken(text: str) -> str:
    """Return a transcript with the digits of a label as words: "7" -> "seven"."""
    from transformer_jax.data.corpora.synthetic_speech import DIGITS

    return DIGITS[int(text)] if text.isdecimal() and len(text) == 1 else " ".join(text.split())
