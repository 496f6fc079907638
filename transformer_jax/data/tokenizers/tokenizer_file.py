"""Base class of tokenizers, stored in the JSON format of the `tokenizers` library."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer, models

from transformer_jax.errors import UserError


def read_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Read a tokenizer in the library's JSON format.

    Raises:
      UserError: The file does not exist or is not a tokenizer.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer file ({error})") from None


def read_bpe(vocabulary: pathlib.Path, merges: pathlib.Path, **options: Any) -> models.BPE:
    """Read the BPE model of a `vocab.json` and a `merges.txt` file.

    Raises:
      UserError: A file does not exist or is damaged.
    """
    try:
        return models.BPE.from_file(str(vocabulary), str(merges), **options)
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{vocabulary}, {merges}: not a vocabulary and its merges ({error})") from None


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a published `config.json` that name the classes, {} without classes."""
    if not labels:
        return {}
    return {
        "id2label": {str(n): label for n, label in enumerate(labels)},
        "label2id": {label: n for n, label in enumerate(labels)},
    }


class TokenizerFile:
    """A tokenizer that is stored in a file, a `Processor` of tasks."""

    FILES: ClassVar[tuple[str, ...]] = ("tokenizer.json",)

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Read a file of `save`.

        Raises:
          UserError: The file does not exist or is not a tokenizer.
        """
        return cls(read_tokenizer(path))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the tokenizer from the result of `files`.

        Raises:
          UserError: The file is not a tokenizer.
        """
        try:
            return cls(Tokenizer.from_str(files[cls.FILES[0]].decode("utf-8")))
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            raise UserError(f"{cls.FILES[0]}: not a tokenizer file ({error})") from None

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer's file by name, in the library's JSON format."""
        return {self.FILES[0]: self.text.encode("utf-8")}

    @property
    def text(self) -> str:
        """The tokenizer in the library's JSON format."""
        return self._tokenizer.to_str(pretty=True)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the tokenizer in the library's JSON format, completely or not at all.

        Raises:
          UserError: The folder cannot be written, or the disk is full.
        """
        path = pathlib.Path(path)
        draft = path.with_name(path.name + ".draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(self.text, encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); free some space or choose another `run_dir`"
            ) from None

    @property
    def vocab_size(self) -> int:
        """V, the largest id plus 1, which includes ids without a token."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def check_fits(self, vocab_size: int) -> None:
        """Check that all ids are in a model's vocabulary.

        Raises:
          UserError: The tokenizer has larger ids.
        """
        if self.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has ids up to {self.vocab_size - 1} and the model a vocabulary of "
                f"{vocab_size}: they do not belong together"
            )
