"""A tokenizer of the `tokenizers` library in a file: what every tokenizer here shares."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import ClassVar, Self

from tokenizers import Tokenizer

from transformer_jax.errors import UserError


def read_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """A tokenizer from the library's JSON format.

    Raises:
      UserError: no such file, or not a tokenizer.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer file ({error})") from None


class TokenizerFile:
    """A tokenizer that can be read from a file and written to one; a `Processor` of tasks."""

    FILES: ClassVar[tuple[str, ...]] = ("tokenizer.json",)

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Reads what `save` wrote.

        Raises:
          UserError: no such file, or not a tokenizer.
        """
        return cls(read_tokenizer(path))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """The tokenizer of what `files` gave.

        Raises:
          UserError: not a tokenizer.
        """
        try:
            return cls(Tokenizer.from_str(files[cls.FILES[0]].decode("utf-8")))
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            raise UserError(f"{cls.FILES[0]}: not a tokenizer file ({error})") from None

    def files(self) -> dict[str, bytes]:
        """Its file by name, in the library's JSON format."""
        return {self.FILES[0]: self.text.encode("utf-8")}

    @property
    def text(self) -> str:
        """The tokenizer in the library's JSON format."""
        return self._tokenizer.to_str(pretty=True)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the tokenizer in the library's JSON format, atomically.

        Raises:
          UserError: the folder cannot be written, or the disk is full.
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
        """V: one more than the largest id, so that ids without a token count as well."""
        return max(self._tokenizer.get_vocab().values()) + 1
