"""Tokenizers of text encoders: WordPiece and byte-level BPE with BERT's special tokens, and class labels."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import msgspec
import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from transformer_jax.data.tokenizers.byte_offsets import byte_offsets
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.post_processors import bert_template
from transformer_jax.data.tokenizers.published_tokenizer import read_published_tokenizer
from transformer_jax.data.tokenizers.tokenizer_file import (
    TokenizerFile,
    check_text,
    checked,
    label_fields,
    parse_tokenizer,
)
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, parse_json

# Special tokens of published vocabularies, BERT's and RoBERTa's.
_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "begin": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
# Their names in `tokenizer_config.json`.
_PUBLISHED = {
    "pad": "pad_token",
    "unknown": "unk_token",
    "begin": "cls_token",
    "separator": "sep_token",
    "mask": "mask_token",
}
# A text on which the offsets of a tokenizer are checked.
_PROBE = "Anna lives in Oslo, Norway. The house is small."
# The library encodes texts of one call in parallel; its encodings take a hundred bytes per token.
_TEXTS_PER_CALL = 1_000


# Settings renamed since version 0.1, by their old names.
_CURRENT_NAMES = {"longest": "max_answer_length", "normalise": "normalize"}


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings in `processor.json`."""

    target: Literal["label", "labels", "score"] | None = None
    pairs: bool | None = None
    passages: bool | None = None
    stride: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_answer_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    unanswerable: bool | None = None
    pooling: Literal["first", "mean", "max"] | None = None
    normalize: bool | None = None
    max_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    include_prompt: bool | None = None
    similarity: Literal["cosine", "dot"] | None = None


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of `processor.json` in a run folder."""

    labels: list[str]
    special_tokens: dict[str, str]
    settings: _Settings


def with_current_settings(values: Mapping[str, Any], name: str = "settings") -> dict[str, Any]:
    """Return parsed JSON in which settings with the names of version 0.1 have their current names.

    Args:
      values: Parsed JSON that may contain settings.
      name: Name of the settings in it.
    """
    settings = values.get(name)
    if not isinstance(settings, dict):
        return dict(values)
    return {**values, name: {_CURRENT_NAMES.get(n, n): value for n, value in settings.items()}}


class DenseLayer(NamedTuple):
    """A dense layer after pooling, activation(x @ kernel + bias), from a sentence-transformers folder.

    Attributes:
      kernel: (D, E) float32.
      bias: (E,) float32, or None.
      activation: "identity", "tanh", "relu", "gelu" or "silu".
    """

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: str


class EncoderTokenizer(TokenizerFile):
    """Tokenizer of texts and pairs of texts with special tokens, token types, word numbers and offsets.

    Attributes:
      labels: Names of a task's classes in the order of their numbers, or ().
      settings: Further settings of a trained model, by name.
      dense_layers: Layers between pooling and normalization of sentence vectors; only published folders have
        them.
      names: The special tokens "pad", "unknown", "begin", "separator" and "mask" in the vocabulary.
      pad: Id of the padding token.
      unknown: Id of the token for unknown pieces.
      begin: Id of the first token of a text.
      separator: Id of the token at the end of each text.
      mask: Id of the mask token.

    Raises:
      UserError: The vocabulary lacks a special token.
    """

    FILES: ClassVar[tuple[str, ...]] = ("tokenizer.json", "processor.json")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        labels: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        super().__init__(tokenizer)
        self.labels, self.settings = tuple(labels), dict(settings or {})
        self.dense_layers: tuple[DenseLayer, ...] = ()
        self.names = {}
        for role, known in _NAMES.items():
            candidates = ((names or {}).get(role), *known)
            name = next((n for n in candidates if n and tokenizer.token_to_id(n) is not None), None)
            if name is None:
                raise UserError(f"the vocabulary has no token {' or '.join(known)}, which an encoder needs")
            self.names[role] = name
        ids = {role: _id(tokenizer, name) for role, name in self.names.items()}
        self.pad, self.unknown, self.mask = ids["pad"], ids["unknown"], ids["mask"]
        self.begin, self.separator = ids["begin"], ids["separator"]

    @classmethod
    def wordpiece(cls, texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Self:
        """Train WordPiece on texts as in BERT (Devlin et al. 2019; Wu et al. 2016).

        Args:
          texts: Training texts.
          vocab_size: Target number of tokens.
          lowercase: Fold case and accents, as in uncased models.

        Raises:
          UserError: The vocabulary is too small for the characters.
        """
        names = [known[0] for known in _NAMES.values()]
        _check_vocab_size(vocab_size, 100)
        texts = list(checked(texts))

        def train(size: int, first_tokens: Sequence[str]) -> dict[str, int]:
            tokenizer = _wordpiece(models.WordPiece(unk_token="[UNK]"), lowercase)
            trainer = trainers.WordPieceTrainer(
                vocab_size=size,
                special_tokens=list(first_tokens),
                show_progress=False,
                continuing_subword_prefix="##",
            )
            tokenizer.train_from_iterator(texts, trainer)
            return tokenizer.get_vocab()

        # The trainer numbers characters in the order of a hash table, and breaks ties between pieces by these
        # numbers. Listing the characters in a fixed order makes the vocabulary deterministic.
        characters = sorted(set(train(0, names)) - set(names))
        vocabulary = train(vocab_size, [*names, *characters])
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
        tokenizer = _wordpiece(model, lowercase)
        tokenizer.add_special_tokens(names)
        first, last = names[2], names[3]
        tokenizer.post_processor = bert_template(first, _id(tokenizer, first), last, _id(tokenizer, last))
        return cls(tokenizer)

    @classmethod
    def byte_pairs(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train byte-level BPE on texts as in RoBERTa (Liu et al. 2019; Radford et al. 2019).

        Args:
          texts: Training texts.
          vocab_size: Target number of tokens.

        Raises:
          UserError: The vocabulary is too small for every byte.
        """
        _check_vocab_size(vocab_size, 261)
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        # The order of fairseq, with padding id 1.
        names = ["<s>", "<pad>", "</s>", "<unk>", _BYTE_LEVEL_MASK]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=names,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        _make_byte_level(tokenizer)
        tokenizer.train_from_iterator(checked(texts), trainer)
        tokenizer.post_processor = _roberta_template(tokenizer)
        return cls(tokenizer)

    @classmethod
    def open(cls, path: str | pathlib.Path, *, model_type: str | None = None) -> Self:
        """Open a published tokenizer; see `read_published_tokenizer`.

        Args:
          path: `tokenizer.json`, `vocab.txt` (WordPiece), or `vocab.json` next to `merges.txt` (byte-level
            BPE), or a folder with one of these.
          model_type: The `model_type` of the folder's model; None reads it from `config.json`.

        Raises:
          UserError: None of these files exists, one is damaged, the class of the tokenizer is not supported, or
            the vocabulary lacks a special token.
        """
        published = read_published_tokenizer(path, byte_level_class="RobertaTokenizer", model_type=model_type)
        if published.splits_special_tokens:
            raise UserError(f"{path}: split_special_tokens is not supported")
        names = {
            role: published.tokens[field] for role, field in _PUBLISHED.items() if field in published.tokens
        }
        try:
            return cls(published.tokenizer, names=names)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """Create the tokenizer from the result of `files`.

        Raises:
          UserError: The files are damaged.
        """
        stored = convert(
            with_current_settings(parse_json(files["processor.json"], dict[str, Any], "processor.json")),
            _Stored,
            "processor.json",
        )
        settings = msgspec.to_builtins(stored.settings)
        return cls(
            parse_tokenizer(files["tokenizer.json"], "tokenizer.json"),
            labels=stored.labels,
            names=stored.special_tokens,
            settings={name: value for name, value in settings.items() if value is not None},
        )

    def files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, its labels and settings, by name."""
        settings = {"labels": list(self.labels), "special_tokens": self.names, "settings": self.settings}
        return {
            **super().files(),
            "processor.json": (json.dumps(settings, ensure_ascii=False, indent=1) + "\n").encode("utf-8"),
        }

    def with_labels(self, labels: Sequence[str], **settings: Any) -> Self:
        """Return a copy with a task's labels and settings, which replace the current ones."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        return type(self)(copy, labels=labels, names=self.names, settings=settings)

    def prompt(self, name: str | None = None, *, text: str | None = None) -> str:
        """Return the text that a sentence encoder puts before each text.

        Args:
          name: Name of one of its prompts; None means the default, "" if it has none.
          text: A text that replaces the prompt; None means that of `name`.

        Raises:
          UserError: The prompt is unknown or no text, or the folder excludes prompts from its vectors.
        """
        result = self._prompt(name) if text is None else text
        if not isinstance(result, str):
            raise UserError(f"a prompt is a text, not a {type(result).__name__}")
        if result and not self.settings.get("include_prompt", True):
            raise UserError(
                "the folder excludes prompts from its vectors, which is not supported: set `prompt` ''"
            )
        return result

    def _prompt(self, name: str | None) -> str:
        prompts, name = self.settings.get("prompts", {}), name or self.settings.get("default_prompt_name")
        if name is not None and name not in prompts:
            raise UserError(f"unknown prompt {name!r}: known are {', '.join(prompts) or 'none'}")
        return "" if name is None else prompts[name]

    def lowercase(self) -> None:
        """Make the tokenizer lower-case every text first, as `do_lower_case` of sentence-transformers does."""
        steps = _steps(self._tokenizer.normalizer)
        if not any(isinstance(step, normalizers.Lowercase) for step in steps):
            self._tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        return [
            e.ids for e in self._tokenizer.encode_batch_fast(list(checked(texts)), add_special_tokens=False)
        ]

    def encode_batch(
        self,
        texts: Sequence[str | tuple[str, str]] | Sequence[Sequence[str]],
        *,
        max_length: int,
        words: bool = False,
    ) -> list[EncodedText]:
        """Encode texts or pairs of texts with special tokens; in a pair the longer text is truncated first.

        Args:
          texts: Texts, pairs (text, text), or with `words` lists of words.
          max_length: Maximum tokens of a result; further tokens are truncated.
          words: Each text is a list of words, whose numbers the result includes.
        """
        # The library's truncation would keep all overflowing parts, and for a pair every combination of them.
        encoded: list[EncodedText] = []
        for part in _parts(texts):
            if words:
                encodings = self._for_words.encode_batch(part, is_pretokenized=True)
            else:
                encodings = self._tokenizer.encode_batch_fast(part)
            encoded += [EncodedText.of(e, words=words).truncate(max_length) for e in encodings]
        return encoded

    def windows(
        self, pairs: Sequence[tuple[str, str]], *, max_length: int, stride: int
    ) -> list[list[EncodedText]]:
        """Encode each pair in windows that contain the first text and a part of the second.

        Args:
          pairs: (first, second).
          max_length: Maximum tokens of a window, including the first text.
          stride: Tokens of the second text that consecutive windows share.

        Returns:
          The windows of each pair.
        """
        self._for_windows.enable_truncation(max_length, stride=stride, strategy="only_second")
        windows = _windows(self._for_windows, pairs, offsets=True)
        if self._has_exact_offsets:
            return windows
        return [
            _with_offsets(texts, self._offsets(pair[1]), stride)
            for pair, texts in zip(pairs, windows, strict=True)
        ]

    @functools.cached_property
    def _has_exact_offsets(self) -> bool:
        """Whether the offsets of the library point at the tokens; some stacks of pre-tokenizers shift them."""
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return True
        encoding = self._tokenizer.encode(_PROBE, add_special_tokens=False)
        exact = byte_offsets(_PROBE, encoding.tokens)
        pairs = zip(encoding.offsets, exact or [], strict=False)
        return all(_PROBE[slice(*ours)].strip() == _PROBE[slice(*theirs)].strip() for theirs, ours in pairs)

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each token of a text, found by its bytes.

        Raises:
          UserError: The tokens are not the bytes of the text.
        """
        offsets = byte_offsets(text, self._tokenizer.encode(text, add_special_tokens=False).tokens)
        if offsets is None:
            raise UserError("the tokenizer changes the text, so that its tokens have no place in it")
        return offsets

    def word_windows(
        self, word_lists: Sequence[Sequence[str]], *, max_length: int, stride: int
    ) -> list[list[EncodedText]]:
        """Encode each list of words in windows, whose tokens have the numbers of their words.

        Args:
          word_lists: Lists of words.
          max_length: Maximum tokens of a window.
          stride: Tokens that consecutive windows share.

        Returns:
          The windows of each list.
        """
        self._for_word_windows.enable_truncation(max_length, stride=stride, strategy="only_first")
        return _windows(self._for_word_windows, word_lists, words=True)

    @functools.cached_property
    def _for_windows(self) -> Tokenizer:
        """A copy with truncation, because the tokenizer itself must not truncate."""
        return Tokenizer.from_str(self._tokenizer.to_str())

    @functools.cached_property
    def _for_word_windows(self) -> Tokenizer:
        """A copy of the tokenizer of words with truncation."""
        return Tokenizer.from_str(self._for_words.to_str())

    @functools.cached_property
    def _for_words(self) -> Tokenizer:
        """The tokenizer of lists of words; byte-level BPE prefixes a space to each, like `add_prefix_space`."""
        if not isinstance(self._tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            return self._tokenizer
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return copy

    def decode(self, sequences: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Return the texts of token ids, with special tokens only if `special`."""
        texts = self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=not special)
        mask = self._tokenizer.get_added_tokens_decoder().get(self.mask) if special else None
        if mask is not None and mask.lstrip:  # the mask token includes the preceding space
            texts = [text.replace(mask.content, f" {mask.content}") for text in texts]
        return texts

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return each token as readable text, for plots."""
        return [self._tokenizer.id_to_token(int(i)) or f"[{i}]" for i in ids]

    def continues_word(self) -> list[bool]:
        """Return for each id whether it continues a word.

        Raises:
          UserError: The pieces of the vocabulary do not show it.
        """
        vocabulary = {i: token for token, i in self._tokenizer.get_vocab().items()}
        special = {*self.special_ids(), *self._tokenizer.get_added_tokens_decoder()}
        pieces = [vocabulary.get(i, "") for i in range(self.vocab_size)]
        if isinstance(self._tokenizer.model, models.WordPiece):
            prefix = self._tokenizer.model.continuing_subword_prefix
            return [i not in special and piece.startswith(prefix) for i, piece in enumerate(pieces)]
        # A space before a word is a part of its first piece: Ġ in byte-level BPE, ▁ in SentencePiece.
        splitting = repr((self._tokenizer.normalizer, self._tokenizer.pre_tokenizer))
        space = "\u0120" if "ByteLevel" in splitting else "\u2581"
        if space == "\u2581" and space not in splitting:
            raise UserError("whole-word masking needs a vocabulary whose pieces show where a word begins")
        return [i not in special and not piece.startswith(space) for i, piece in enumerate(pieces)]

    def special_ids(self) -> list[int]:
        """Return the ids of the special tokens, which are never masked or sampled."""
        return sorted({self.pad, self.unknown, self.begin, self.separator, self.mask})

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (fields of `config.json`, contents of `tokenizer_config.json`) of a published folder."""
        config = {_PUBLISHED[role]: name for role, name in self.names.items()}
        return (
            {"pad_token_id": self.pad, **label_fields(self.labels)},
            {"tokenizer_class": "PreTrainedTokenizerFast", **config},
        )


def _steps(normalizer: Any) -> list[Any]:
    if isinstance(normalizer, normalizers.Sequence):
        steps: Any = normalizer
        return list(steps)
    return [] if normalizer is None else [normalizer]


# The mask of a byte-level vocabulary includes the preceding space, because a space is part of the masked word.
_BYTE_LEVEL_MASK = AddedToken("<mask>", lstrip=True, special=True)


def _parts(texts: Sequence[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(texts), _TEXTS_PER_CALL):
        part = list(texts[start : start + _TEXTS_PER_CALL])
        for item in part:
            for text in [item] if isinstance(item, str) else item:
                check_text(text)
        yield part


def _windows(
    tokenizer: Tokenizer, texts: Sequence[Any], *, words: bool = False, offsets: bool = False
) -> list[list[EncodedText]]:
    """Encode each text or pair with a tokenizer that truncates, and return all parts as windows."""
    encoded: list[list[EncodedText]] = []
    for part in _parts(texts):
        for encoding in tokenizer.encode_batch(part, is_pretokenized=words):
            windows = [encoding, *encoding.overflowing]
            options: dict[str, Any] = dict(words=words, offsets=offsets, truncated=len(windows) > 1)
            encoded.append([EncodedText.of(window, **options) for window in windows])
    return encoded


def _with_offsets(
    windows: Sequence[EncodedText], offsets: Sequence[tuple[int, int]], stride: int
) -> list[EncodedText]:
    """Return windows with other offsets of the second text, whose consecutive windows share `stride` tokens."""
    result, start = [], 0
    for window in windows:
        second = np.flatnonzero(window.sequences == 1)
        changed = np.array(window.offsets)
        changed[second] = np.reshape(offsets[start : start + len(second)], (-1, 2))
        result.append(window._replace(offsets=changed))
        start += len(second) - stride
    return result


def _check_vocab_size(vocab_size: int, minimum: int) -> None:
    if vocab_size < minimum:
        raise UserError(f"a vocabulary of {vocab_size} cannot hold the characters: use at least {minimum}")


def _id(tokenizer: Tokenizer, name: str) -> int:
    number = tokenizer.token_to_id(name)
    assert number is not None, "a token of the vocabulary"
    return number


def _roberta_template(tokenizer: Tokenizer) -> Any:
    first, last = "<s>", "</s>"
    return processors.RobertaProcessing((last, _id(tokenizer, last)), (first, _id(tokenizer, first)))


def _wordpiece(model: Any, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _make_byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
