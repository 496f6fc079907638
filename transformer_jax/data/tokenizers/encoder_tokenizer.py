"""Tokenizers of text encoders: WordPiece and byte-level BPE with BERT's special tokens, and labels."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

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

from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile, read_tokenizer
from transformer_jax.errors import UserError

# Names of the special tokens in published vocabularies, BERT's and RoBERTa's.
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
# The library encodes them in parallel, and its encodings hold a hundred bytes a token.
_TEXTS_AT_ONCE = 1_000


class EncoderTokenizer(TokenizerFile):
    """Texts and pairs of texts to token ids between special tokens, with types, words and places in the text.

    Attributes:
      labels: names of a task's classes in the order of their numbers; empty where a task has none.
      settings: what else a trained model keeps beside its tokenizer, by name.
      names: of the special tokens "pad", "unknown", "begin", "separator" and "mask".
      pad, begin, separator, mask: their ids.

    Raises:
      UserError: a vocabulary without one of them.
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
        # A published file may say to cut or to fill up texts: that is the batches' business.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.labels, self.settings = tuple(labels), dict(settings or {})
        self.names = {}
        for kind, known in _NAMES.items():
            own = (names or {}).get(kind)
            found = next((n for n in (own, *known) if n and tokenizer.token_to_id(n) is not None), None)
            if found is None:
                raise UserError(f"the vocabulary has no token {' or '.join(known)}, which an encoder needs")
            self.names[kind] = found
        ids = {kind: _id(tokenizer, name) for kind, name in self.names.items()}
        self.pad, self.unknown, self.mask = ids["pad"], ids["unknown"], ids["mask"]
        self.begin, self.separator = ids["begin"], ids["separator"]
        if tokenizer.post_processor is None:
            tokenizer.post_processor = _template(self.names, self.begin, self.separator)

    @classmethod
    def wordpiece(cls, texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Self:
        """WordPiece in the manner of BERT (Devlin et al. 2019; Wu et al. 2016), trained on texts.

        Args:
          texts: to learn the pieces from.
          vocab_size: number of tokens aimed at.
          lowercase: fold case and accents, as the uncased models do.

        Raises:
          UserError: a vocabulary too small for the special tokens.
        """
        names = [known[0] for known in _NAMES.values()]
        _check_room(vocab_size, 100)
        texts = list(texts)

        def trained(size: int, first: Sequence[str]) -> dict[str, int]:
            tokenizer = _wordpiece(models.WordPiece(unk_token="[UNK]"), lowercase)
            trainer = trainers.WordPieceTrainer(
                vocab_size=size, special_tokens=list(first), show_progress=False, continuing_subword_prefix="##"
            )
            tokenizer.train_from_iterator(texts, trainer)
            return tokenizer.get_vocab()

        # The trainer numbers characters in the order of a hash table, and the numbers decide between pieces of
        # the same count: given beforehand in an order of their own, every training finds the same vocabulary.
        characters = sorted(set(trained(0, names)) - set(names))
        vocabulary = trained(vocab_size, [*names, *characters])
        model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
        tokenizer = _wordpiece(model, lowercase)
        tokenizer.add_special_tokens(names)
        return cls(tokenizer)

    @classmethod
    def byte_pairs(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Byte-level BPE in the manner of RoBERTa (Liu et al. 2019; Radford et al. 2019), trained on texts.

        Raises:
          UserError: a vocabulary too small for every byte.
        """
        _check_room(vocab_size, 261)
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        # The order of fairseq, in which the padding id is 1.
        names = ["<s>", "<pad>", "</s>", "<unk>", _BYTE_LEVEL_MASK]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=names,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        _make_byte_level(tokenizer)
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.post_processor = _roberta_template(tokenizer)
        return cls(tokenizer)

    @classmethod
    def open(cls, path: str | pathlib.Path) -> Self:
        """A published tokenizer: `tokenizer.json`, `vocab.txt` (WordPiece), or `vocab.json` and `merges.txt`
        (byte-level BPE), as a file or in a folder, whose `tokenizer_config.json` is read too.

        Raises:
          UserError: none of these, or damaged.
        """
        path = pathlib.Path(path)
        folder = path if path.is_dir() else path.parent
        described: dict[str, Any] = {}
        if (folder / "tokenizer_config.json").is_file():
            try:
                described = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{folder / 'tokenizer_config.json'}: not JSON ({error})") from None
            if not isinstance(described, dict):
                raise UserError(f"{folder / 'tokenizer_config.json'}: not a JSON object")
        names = {}
        for kind, field in _PUBLISHED.items():
            value = described.get(field)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[kind] = value
        if path.is_dir():
            files = [path / name for name in ("tokenizer.json", "vocab.txt", "vocab.json")]
            found = next((file for file in files if file.is_file()), None)
            if found is None:
                raise UserError(f"{path}: holds neither tokenizer.json nor vocab.txt nor vocab.json")
            path = found
        try:
            if path.name == "vocab.txt":
                tokenizer = _read_wordpiece(path, described)
            elif path.name == "vocab.json":
                tokenizer = _read_byte_pairs(path, folder / "merges.txt")
            else:
                tokenizer = read_tokenizer(path)
            return cls(tokenizer, names=names)
        except UserError as error:
            raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        try:
            described = json.loads(files["processor.json"].decode("utf-8"))
            tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode("utf-8"))
        except Exception as error:  # noqa: BLE001  the library raises nothing narrower
            raise UserError(f"tokenizer.json, processor.json: not a tokenizer ({error})") from None
        return cls(
            tokenizer,
            labels=described["labels"],
            names=described["special_tokens"],
            settings=described["settings"],
        )

    def files(self) -> dict[str, bytes]:
        described = {"labels": list(self.labels), "special_tokens": self.names, "settings": self.settings}
        return {
            **super().files(),
            "processor.json": (json.dumps(described, ensure_ascii=False, indent=1) + "\n").encode("utf-8"),
        }

    def with_labels(self, labels: Sequence[str], **settings: Any) -> Self:
        """The same tokenizer with a task's labels and settings in place of those that it has."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        return type(self)(copy, labels=labels, names=self.names, settings=settings)

    def check_fits(self, vocab_size: int) -> None:
        """That every id is one of a model's vocabulary of this size.

        Raises:
          UserError: the tokenizer has more.
        """
        if self.vocab_size > vocab_size:
            raise UserError(
                f"the tokenizer has ids up to {self.vocab_size - 1} and the model a vocabulary of "
                f"{vocab_size}: they do not belong together"
            )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text as it stands, without special tokens."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_batch(
        self,
        texts: Sequence[str | tuple[str, str]] | Sequence[Sequence[str]],
        *,
        max_length: int,
        words: bool = False,
    ) -> list[EncodedText]:
        """Texts, or pairs of texts, between the special tokens of the model.

        Of a pair the longer text is cut first.

        Args:
          texts: each a text, a pair (text, text), or with `words` a list of words.
          max_length: longest result in tokens; what is behind is left out.
          words: each text is a list of words, and the result says which word a token is of.
        """
        # The library's own truncation keeps every part that is left out, of a pair each with each.
        found: list[EncodedText] = []
        for part in _parts(texts):
            if words:
                encodings = self._of_words.encode_batch(part, is_pretokenized=True)
            else:
                encodings = self._tokenizer.encode_batch_fast(part)
            found += [EncodedText.of(one, words=words).shortened(max_length) for one in encodings]
        return found

    def windows(
        self, pairs: Sequence[tuple[str, str]], *, max_length: int, stride: int
    ) -> list[list[EncodedText]]:
        """The second text of each pair behind the first one, in as many windows as it needs.

        Args:
          pairs: (first, second).
          max_length: longest window in tokens, the first text included.
          stride: tokens that consecutive windows share.
        """
        found: list[list[EncodedText]] = []
        tokenizer = self._of_windows
        tokenizer.enable_truncation(max_length, stride=stride, strategy="only_second")
        for part in _parts(pairs):
            for one in tokenizer.encode_batch(part):
                own = [one, *one.overflowing]
                found.append([EncodedText.of(window, offsets=True, cut=len(own) > 1) for window in own])
        return found

    @functools.cached_property
    def _of_windows(self) -> Tokenizer:
        """One that cuts texts, as the other must not."""
        return Tokenizer.from_str(self._tokenizer.to_str())

    @functools.cached_property
    def _of_words(self) -> Tokenizer:
        """The tokenizer of texts that are cut into words: a byte-level one puts a space in front of each, as
        published ones do with `add_prefix_space`."""
        if not isinstance(self._tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            return self._tokenizer
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return copy

    def decode(self, sequences: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Texts of token ids; special tokens are left out unless asked for."""
        texts = self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=not special)
        mask = self._tokenizer.get_added_tokens_decoder().get(self.mask) if special else None
        if mask is not None and mask.lstrip:  # it has taken the space before it
            texts = [text.replace(mask.content, f" {mask.content}") for text in texts]
        return texts

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each token as readable text, for the axes of a picture."""
        return [self._tokenizer.id_to_token(int(i)) or f"[{i}]" for i in ids]

    def continues_word(self) -> list[bool]:
        """For each id, whether it continues a word in a text that is not cut into words beforehand."""
        pieces = {i: token for token, i in self._tokenizer.get_vocab().items()}
        special = {self.pad, self.unknown, self.begin, self.separator, self.mask}
        own = [pieces.get(i, "") for i in range(self.vocab_size)]
        if isinstance(self._tokenizer.model, models.WordPiece):
            return [piece.startswith("##") for piece in own]
        return [i not in special and not piece.startswith("\u0120") for i, piece in enumerate(own)]

    def special_ids(self) -> list[int]:
        """Ids of the special tokens, which are never masked or drawn."""
        return sorted({self.pad, self.unknown, self.begin, self.separator, self.mask})

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields of `config.json`, the contents of `tokenizer_config.json`) of a published folder."""
        fields: dict[str, Any] = {"pad_token_id": self.pad}
        if self.labels:
            fields["id2label"] = {str(n): label for n, label in enumerate(self.labels)}
            fields["label2id"] = {label: n for n, label in enumerate(self.labels)}
        described = {_PUBLISHED[kind]: name for kind, name in self.names.items()}
        return fields, {"tokenizer_class": "PreTrainedTokenizerFast", **described}


# The mask of a byte-level vocabulary takes the space before it, which is part of the word that it stands for.
_BYTE_LEVEL_MASK = AddedToken("<mask>", lstrip=True, special=True)


def _parts(texts: Sequence[Any]) -> Iterator[list[Any]]:
    return (list(texts[n : n + _TEXTS_AT_ONCE]) for n in range(0, len(texts), _TEXTS_AT_ONCE))


def _check_room(vocab_size: int, least: int) -> None:
    if vocab_size < least:
        raise UserError(f"a vocabulary of {vocab_size} cannot hold the characters: ask for at least {least}")


def _id(tokenizer: Tokenizer, name: str) -> int:
    number = tokenizer.token_to_id(name)
    assert number is not None, "a token of the vocabulary"
    return number


def _roberta_template(tokenizer: Tokenizer) -> Any:
    first, last = "<s>", "</s>"
    return processors.RobertaProcessing((last, _id(tokenizer, last)), (first, _id(tokenizer, first)))


def _template(names: Mapping[str, str], begin: int, separator: int) -> Any:
    first, last = names["begin"], names["separator"]
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, begin), (last, separator)],
    )


def _wordpiece(model: Any, lowercase: bool, **normalisation: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, **normalisation)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _make_byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()


def _read_wordpiece(path: pathlib.Path, described: Mapping[str, Any]) -> Tokenizer:
    """BERT's `vocab.txt`, a piece a line, with the normalisation that `tokenizer_config.json` names."""
    try:
        vocabulary = models.WordPiece.read_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"not a vocabulary of word pieces ({error})") from None
    unknown = described.get("unk_token", "[UNK]")
    unknown = unknown.get("content") if isinstance(unknown, dict) else unknown
    model = models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    tokenizer = _wordpiece(
        model,
        described.get("do_lower_case", True),
        strip_accents=described.get("strip_accents"),
        handle_chinese_chars=described.get("tokenize_chinese_chars", True),
    )
    known = [name for names in _NAMES.values() for name in names if name in vocabulary]
    tokenizer.add_special_tokens(known)
    return tokenizer


def _read_byte_pairs(vocabulary: pathlib.Path, merges: pathlib.Path) -> Tokenizer:
    """RoBERTa's `vocab.json` and `merges.txt`."""
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges), unk_token="<unk>")
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{vocabulary}, {merges}: not a vocabulary and its merges ({error})") from None
    tokenizer = Tokenizer(model)
    _make_byte_level(tokenizer)
    known = [name for names in _NAMES.values() for name in names if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens([_BYTE_LEVEL_MASK if name == "<mask>" else name for name in known])
    if {"<s>", "</s>"} <= set(known):
        tokenizer.post_processor = _roberta_template(tokenizer)
    return tokenizer
