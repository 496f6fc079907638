"""Processor of speech recognizers: the size of spectrograms, a tokenizer, and its control tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import msgspec
import numpy as np

from transformer_jax.data.corpora.audio_files import SAMPLE_RATE
from transformer_jax.data.tokenizers.image_text_processor import PaddedTexts
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

FILE = "speech.json"
# Spectrograms have this many frames a second.
FRAMES_PER_SECOND = 100
# Timestamps of transcripts are multiples of this many seconds.
TIMESTAMP_SECONDS = 0.02

Id = Annotated[int, msgspec.Meta(ge=0)]


class SpeechSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The settings of a `SpeechProcessor`, stored as `speech.json` in a run folder.

    Attributes:
      mel_bins: Number of mel bands of spectrograms.
      max_frames: Number of frames of spectrograms, 100 a second; longer recordings are read in windows.
      max_length: Maximum length of transcripts in tokens, with the control tokens.
      start: Id of the first token of every transcript.
      end: Id of the token after a transcript.
      pad: Id of the padding token.
      lowercase: Convert transcripts to lowercase before they are tokenized.
      languages: Ids of the languages' tokens by code; empty for a model of a single language.
      tasks: Ids of the tokens of "transcribe" and "translate".
      no_timestamps: Id of the token that announces a transcript without timestamps; the ids after it are the
        timestamps 0.00, 0.02, ... None means that the model has no timestamps.
      suppressed: Ids of tokens that are never generated.
      first_suppressed: Ids of tokens that no transcript starts with.
      last_initial: Largest number of the first timestamp, or None.
    """

    mel_bins: Annotated[int, msgspec.Meta(ge=1)]
    max_frames: Annotated[int, msgspec.Meta(ge=1)]
    max_length: Annotated[int, msgspec.Meta(ge=2)]
    start: Id
    end: Id
    pad: Id
    lowercase: bool = False
    languages: dict[str, Id] = {}
    tasks: dict[str, Id] = {}
    no_timestamps: Id | None = None
    suppressed: tuple[Id, ...] = ()
    first_suppressed: tuple[Id, ...] = ()
    last_initial: Id | None = None


@dataclasses.dataclass(frozen=True)
class SpeechProcessor:
    """The tokenizer and the settings of a speech recognizer.

    Attributes:
      tokenizer: The tokenizer.
      settings: The settings.
    """

    tokenizer: TextTokenizer
    settings: SpeechSettings

    FILES: ClassVar[tuple[str, ...]] = (*TextTokenizer.FILES, FILE)

    @classmethod
    def train(cls, texts: Sequence[str], vocab_size: int, **sizes: Any) -> Self:
        """Train byte-level BPE on transcripts in lowercase, see `TextTokenizer.byte_pairs`.

        Args:
          texts: The transcripts.
          vocab_size: Target number of tokens.
          **sizes: `mel_bins`, `max_frames` and `max_length` of the settings.
        """
        tokenizer = TextTokenizer.byte_pairs((_cleaned(text, lowercase=True) for text in texts), vocab_size)
        end = tokenizer.ends[0]
        settings = SpeechSettings(start=end, end=end, pad=end, lowercase=True, **sizes)
        return cls(tokenizer, settings)

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.tokenizer.vocab_size

    @property
    def samples(self) -> int:
        """Number of samples at 16 kHz that a spectrogram covers."""
        return SAMPLE_RATE // FRAMES_PER_SECOND * self.settings.max_frames

    def prefix(
        self, *, language: str | None = None, task: str = "transcribe", timestamps: bool = False
    ) -> tuple[int, ...]:
        """Return the control tokens before a transcript.

        Args:
          language: Code of the language, such as "en"; needed if the model has several.
          task: "transcribe", or "translate" to English.
          timestamps: Generate timestamps.

        Raises:
          UserError: The model lacks the language or the task, or has no timestamps.
        """
        settings = self.settings
        ids = [settings.start]
        if settings.languages:
            if language not in settings.languages:
                if language is None:
                    raise UserError("name the `language` of the recordings, such as en")
                known = ", ".join(sorted(settings.languages))
                raise UserError(f"`language` {language!r} is not one of the model's: {known}")
            ids.append(settings.languages[language])
            if task not in settings.tasks:
                raise UserError(f"`speech_task` {task!r} is not one of {', '.join(settings.tasks)}")
            ids.append(settings.tasks[task])
        elif language is not None or task != "transcribe":
            raise UserError("`language` and `speech_task` need a model of several languages")
        if timestamps and settings.no_timestamps is None:
            raise UserError("`timestamps`: the model was trained without them")
        if settings.no_timestamps is not None and not timestamps:
            ids.append(settings.no_timestamps)
        return tuple(ids)

    def clean(self, text: str) -> str:
        """Return a transcript as it is tokenized, in one line."""
        return _cleaned(text, lowercase=self.settings.lowercase)

    def encode(self, texts: Sequence[str], prefix: Sequence[int]) -> PaddedTexts:
        """Encode transcripts between control tokens and the end token, padded to `max_length`.

        Args:
          texts: The transcripts; one may be empty.
          prefix: The control tokens, see `prefix`.
        """
        settings = self.settings
        tokens = np.full((len(texts), settings.max_length), settings.pad, np.int32)
        lengths = np.zeros(len(texts), np.int32)
        limit, truncated = settings.max_length - len(prefix) - 1, 0
        for row, ids in enumerate(self.tokenizer.encode([self.clean(text) for text in texts])):
            truncated += len(ids) > limit
            framed = [*prefix, *ids[:limit], settings.end]
            tokens[row, : len(framed)], lengths[row] = framed, len(framed)
        return PaddedTexts(tokens, lengths, truncated)

    def seconds(self, token: int) -> float | None:
        """Return the time of a timestamp token, or None for another token."""
        first = self.settings.no_timestamps
        return None if first is None or token <= first else TIMESTAMP_SECONDS * (token - first - 1)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without control tokens and timestamps, in one line."""
        kept = [token for token in tokens if self.seconds(token) is None]
        return " ".join(self.tokenizer.decode([kept])[0].split())

    def files(self) -> dict[str, bytes]:
        """Return the processor's files by name, as they are stored in a run folder."""
        stored = json.dumps(msgspec.to_builtins(self.settings)) + "\n"
        return {**self.tokenizer.files(), FILE: stored.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the processor from the result of `files`.

        Raises:
          UserError: A file is damaged.
        """
        return cls(TextTokenizer.from_files(files), parse_json(files[FILE], SpeechSettings, FILE))

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (fields of `config.json`, contents of `preprocessor_config.json`) of a published folder."""
        settings = self.settings
        ids = {
            "decoder_start_token_id": settings.start,
            "eos_token_id": settings.end,
            "bos_token_id": settings.end,
            "pad_token_id": settings.pad,
        }
        frames = settings.max_frames
        seconds, remainder = divmod(frames, FRAMES_PER_SECOND)
        return ids, {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "processor_class": "WhisperProcessor",
            "feature_size": settings.mel_bins,
            "sampling_rate": SAMPLE_RATE,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": frames / FRAMES_PER_SECOND if remainder else seconds,
            "nb_max_frames": frames,
            "n_samples": self.samples,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        }


def _cleaned(text: str, *, lowercase: bool) -> str:
    # A space before the first word, so that a word has the same token at every place.
    text = " ".join(text.split())
    return f" {text.lower() if lowercase else text}" if text else ""
