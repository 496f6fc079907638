"""Processor of models that read images and texts: an image processor and a tokenizer."""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import msgspec
import numpy as np

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

FILE = "image_text.json"


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of `image_text.json` in a run folder."""

    max_length: Annotated[int, msgspec.Meta(ge=2)]
    pad: Annotated[int, msgspec.Meta(ge=0)]
    lowercase: bool
    remove_punctuation: bool = False


class PaddedTexts(NamedTuple):
    """Token ids of texts in one array.

    Attributes:
      tokens: (N, T) int32.
      lengths: (N,) int32, the number of real tokens.
      truncated: Number of texts that were truncated.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    truncated: int


@dataclasses.dataclass(frozen=True)
class ImageTextProcessor:
    """An image processor, and a tokenizer that adds an end token, and a begin token if it has one.

    Attributes:
      images: The image processor.
      tokenizer: The tokenizer.
      max_length: T, the length of texts with begin and end token; longer texts are truncated.
      pad: Id of the padding token.
      lowercase: Convert texts to lowercase before they are tokenized.
      remove_punctuation: Remove ASCII punctuation, as SigLIP does.
    """

    images: ImageProcessor
    tokenizer: TextTokenizer
    max_length: int
    pad: int
    lowercase: bool = False
    remove_punctuation: bool = False

    FILES: ClassVar[tuple[str, ...]] = (*ImageProcessor.FILES, *TextTokenizer.FILES, FILE)

    def __post_init__(self) -> None:
        if self.tokenizer.end is None:
            raise UserError("the tokenizer has no end token, which every text needs")

    @classmethod
    def of(
        cls,
        images: ImageProcessor,
        tokenizer: TextTokenizer,
        max_length: int,
        *,
        source: Any,
        pad: int | None = None,
        **cleaning: bool,
    ) -> Self:
        """Create the processor of a tokenizer that a folder provides.

        Args:
          images: The image processor.
          tokenizer: The tokenizer.
          max_length: See the class.
          source: Origin of the tokenizer, for the error.
          pad: Id of the padding token; None means the tokenizer's, or without one the end token.
          **cleaning: `lowercase` and `remove_punctuation`.

        Raises:
          UserError: The tokenizer has no end token.
        """
        pads = (pad, tokenizer.pad, tokenizer.end, 0)
        try:
            return cls(images, tokenizer, max_length, next(p for p in pads if p is not None), **cleaning)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None

    @classmethod
    def train(cls, images: ImageProcessor, texts: Sequence[str], vocab_size: int, max_length: int) -> Self:
        """Train byte-level BPE on captions in lowercase, see `TextTokenizer.byte_pairs`."""
        tokenizer = TextTokenizer.byte_pairs((text.lower() for text in texts), vocab_size)
        return cls(images, tokenizer, max_length, tokenizer.ends[0], lowercase=True)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of classes; always empty, because these models have no classes."""
        return ()

    @property
    def begin(self) -> tuple[int, ...]:
        """The begin token's id in a tuple; () if the tokenizer has no begin token."""
        return () if self.tokenizer.begin is None else (self.tokenizer.begin,)

    @property
    def start(self) -> int:
        """Id of a decoder's first input: the begin token, or the end token if there is no begin token."""
        return self.end if self.tokenizer.begin is None else self.tokenizer.begin

    @property
    def end(self) -> int:
        """Id of the token after a text."""
        return self.tokenizer.ends[0]

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.tokenizer.vocab_size

    def clean(self, text: str) -> str:
        """Return a text as it is tokenized, in one line."""
        text = text.lower() if self.lowercase else text
        if self.remove_punctuation:
            text = text.translate(str.maketrans("", "", string.punctuation))
        return " ".join(text.split())

    def encode(self, texts: Sequence[str], *, to_generate: bool = False) -> PaddedTexts:
        """Encode texts with an end token, and a begin token if there is one, padded to `max_length`.

        Args:
          texts: The texts.
          to_generate: Begin each text with `start`, for a decoder.

        Raises:
          UserError: A text is empty.
        """
        cleaned = [self.clean(text) for text in texts]
        for number, text in enumerate(cleaned, 1):
            if not text:
                raise UserError(f"text {number} is empty: write some words")
        begin = (self.start,) if to_generate else self.begin
        limit = self.max_length - len(begin) - 1
        tokens = np.full((len(texts), self.max_length), self.pad, np.int32)
        lengths = np.zeros(len(texts), np.int32)
        truncated = 0
        for row, ids in enumerate(self.tokenizer.encode(cleaned)):
            truncated += len(ids) > limit
            framed = [*begin, *ids[:limit], self.end]
            tokens[row, : len(framed)], lengths[row] = framed, len(framed)
        return PaddedTexts(tokens, lengths, truncated)

    def at_size(self, size: int) -> Self:
        """Return a copy for images of another size."""
        return dataclasses.replace(self, images=self.images.at_size(size))

    def files(self) -> dict[str, bytes]:
        """Return the processor's files by name, as they are stored in a run folder."""
        stored = {
            "max_length": self.max_length,
            "pad": self.pad,
            "lowercase": self.lowercase,
            "remove_punctuation": self.remove_punctuation,
        }
        return {
            **self.images.files(), **self.tokenizer.files(), FILE: (json.dumps(stored) + "\n").encode()
        }  # fmt: skip

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the processor from the result of `files`.

        Raises:
          UserError: A file is damaged.
        """
        stored = parse_json(files[FILE], _Stored, FILE)
        return cls(
            ImageProcessor.from_files(files), TextTokenizer.from_files(files), **msgspec.to_builtins(stored)
        )

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (fields of `config.json`, contents of `preprocessor_config.json`) of a published folder."""
        return {}, self.images.published()[1]

    def published_tokenizer(self) -> dict[str, Any]:
        """Return the files of the tokenizer in a published folder, by name, as bytes or JSON values."""
        tokenizer = self.tokenizer.framed(lowercase=self.lowercase, remove_punctuation=self.remove_punctuation)
        pad = self.tokenizer.tokens([self.pad])[0]
        settings = tokenizer.published()[1] | {"pad_token": pad, "model_max_length": self.max_length}
        return {"tokenizer.json": tokenizer.files()["tokenizer.json"], "tokenizer_config.json": settings}
