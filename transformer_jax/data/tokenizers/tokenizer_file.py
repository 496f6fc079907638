"""Base class of tokenizers, stored in the JSON format of the `tokenizers` library."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self

import msgspec
from tokenizers import Tokenizer, models

from transformer_jax.errors import UserError
from transformer_jax.json_files import read_bytes, read_json, shown
from transformer_jax.limits import VOCABULARY, WORD_CHARACTERS


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TemplateToken(msgspec.Struct):
    ids: list[int]


class _PostProcessor(msgspec.Struct):
    type: str = ""
    special_tokens: dict[str, _TemplateToken] = {}
    sep: tuple[str, int] | None = None
    cls: tuple[str, int] | None = None
    processors: list[_PostProcessor] = []


class _Model(msgspec.Struct):
    type: str = ""
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    unk_token: str | None = None
    unk_id: int | None = None


class _File(msgspec.Struct):
    """The fields of a tokenizer's JSON that are checked; the library reads all of them."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    post_processor: _PostProcessor | None = None


def read_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Read a tokenizer in the library's JSON format.

    Raises:
      UserError: The file does not exist or is not a tokenizer; see `parse_tokenizer`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file")
    return parse_tokenizer(read_bytes(path), str(path))


def parse_tokenizer(content: bytes, source: str) -> Tokenizer:
    """Create a tokenizer from the library's JSON format.

    Args:
      content: The JSON text.
      source: Where it was read, for error messages.

    Raises:
      UserError: The text is not a tokenizer, the vocabulary is empty or has two tokens with one id, the unknown
        token is missing, or a template adds tokens that the vocabulary does not have.
    """
    try:
        _check(msgspec.json.decode(content, type=_File))
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001  the library raises Exception, and panics in Rust
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{source}: not a tokenizer file ({reason})") from None
    # Published files may enable truncation or padding, which the batches do here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check(file: _File) -> None:
    vocabulary = file.model.vocab
    if isinstance(vocabulary, list):  # of a unigram model, in the order of ids
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    ids = vocabulary | {token.content: token.id for token in file.added_tokens}
    if not ids:
        raise ValueError("its vocabulary is empty")
    for added in file.added_tokens:
        if vocabulary.get(added.content, added.id) != added.id:
            raise ValueError(f"{shown(added.content)} has the ids {vocabulary[added.content]} and {added.id}")
    numbers = set(ids.values())
    VOCABULARY.check(max(numbers), "the largest id")
    if len(numbers) != len(ids) or min(numbers) < 0:
        _refuse_ids(ids)
    unknown = file.model.unk_token
    # A vocabulary of characters has none: an unknown character is an error.
    is_words = file.model.type == "WordLevel" and any(len(token) > 1 for token in vocabulary)
    if file.model.type == "Unigram" and file.model.unk_id not in numbers:
        raise ValueError("its unigram model has no unknown token")
    if (is_words or file.model.type == "WordPiece") and unknown not in ids:
        raise ValueError(f"its vocabulary lacks the unknown token {shown(unknown)}")
    for token, number in _template_ids(file.post_processor):
        if number not in numbers:
            raise ValueError(f"its template adds {shown(token)} with the id {number}, which no token has")


def _refuse_ids(ids: Mapping[str, int]) -> NoReturn:
    tokens: dict[int, str] = {}
    for token, number in ids.items():
        if number < 0:
            raise ValueError(f"the id {number} of {shown(token)} is negative")
        if number in tokens:
            raise ValueError(f"the id {number} of {shown(token)} is that of {shown(tokens[number])}")
        tokens[number] = token
    raise AssertionError("all ids differ")


def _template_ids(processor: _PostProcessor | None) -> Iterator[tuple[str, int]]:
    if processor is None:
        return
    for token, template in processor.special_tokens.items():
        yield from ((token, number) for number in template.ids)
    yield from (pair for pair in (processor.sep, processor.cls) if pair is not None)
    for part in processor.processors:
        yield from _template_ids(part)


def read_bpe(vocabulary: pathlib.Path, merges: pathlib.Path, **options: Any) -> models.BPE:
    """Read the BPE model of a `vocab.json` and a `merges.txt` file.

    Raises:
      UserError: A file does not exist or is damaged.
    """
    try:
        ids = read_json(vocabulary, dict[str, int])
        if len(set(ids.values())) != len(ids) or not ids:
            raise UserError(f"{vocabulary}: two tokens have one id, or there are none")
        return models.BPE.from_file(str(vocabulary), str(merges), **options)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{vocabulary}, {merges}: not a vocabulary and its merges ({error})") from None


def check_text(text: str) -> None:
    """Check that a tokenizer can encode a text in bounded time.

    Raises:
      UserError: It has a word of more than `WORD_CHARACTERS`, or a lone surrogate, which is no character.
    """
    limit = WORD_CHARACTERS.value
    if len(text) > limit and (match := re.search(rf"\S{{{limit + 1}}}", text)):
        length = len(text[match.start() :].split(maxsplit=1)[0])
        WORD_CHARACTERS.check(length, f"a text has a word ({shown(match[0][:20])}) whose length")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = shown(text[error.start])
        raise UserError(f"a text has a lone surrogate, {surrogate}, at {error.start + 1}") from None


def checked(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts after `check_text`."""
    for text in texts:
        check_text(text)
        yield text


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
        return cls(parse_tokenizer(files[cls.FILES[0]], cls.FILES[0]))

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
