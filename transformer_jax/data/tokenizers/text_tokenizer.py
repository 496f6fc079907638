"""Tokenizers of language models: characters, byte-level BPE trained here, and published tokenizers.

All of them are tokenizers of the `tokenizers` library, so that a run stores them in one format.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from transformer_jax.data.tokenizers.post_processors import begin_ids
from transformer_jax.data.tokenizers.published_tokenizer import read_published_tokenizer
from transformer_jax.data.tokenizers.tiktoken_file import read_tiktoken
from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile, checked, parse_tokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

END_OF_TEXT = "<|endoftext|>"

# End-of-text tokens of published vocabularies, in the order of preference.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


SpecialTokens = Literal["control", "text"]


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of `processor.json` in a run folder."""

    ends: list[Annotated[int, msgspec.Meta(ge=0)]]
    special_tokens: SpecialTokens


class TextTokenizer(TokenizerFile):
    """Tokenizer of texts, lossless if the vocabulary covers the text.

    Attributes:
      ends: Ids of the end-of-text tokens, or ().
      begin: Id of the token that the tokenizer's template adds before a prompt, or None.
      pad: Id of the padding token of a published folder, or None.
    """

    FILES: ClassVar[tuple[str, ...]] = ("tokenizer.json", "processor.json")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        ends: Sequence[int] | None = None,
        special_tokens: SpecialTokens = "control",
    ):
        super().__init__(tokenizer)
        if ends is None:
            ids = (tokenizer.token_to_id(name) for name in _ENDS)
            ends = [number for number in ids if number is not None][:1]
        self.ends = tuple(ends)
        self._begin = begin_ids(tokenizer)
        self.begin = next(iter(self._begin), None)
        is_words = isinstance(tokenizer.model, models.WordLevel)
        characters = set(tokenizer.get_vocab(with_added_tokens=False)) if is_words else set()
        self._characters = characters if characters and all(len(c) == 1 for c in characters) else None
        self.special_tokens = special_tokens
        self.pad: int | None = None

    @property
    def end(self) -> int | None:
        """The first end-of-text token, or None."""
        return self.ends[0] if self.ends else None

    @property
    def special_tokens(self) -> SpecialTokens:
        """How special tokens such as <|endoftext|> in texts and prompts are encoded: "control" or "text".

        "control" reads them as the tokens that they name, as `transformers` does, with a warning; "text" reads
        them like other text.
        """
        return "text" if self._tokenizer.encode_special_tokens else "control"

    @special_tokens.setter
    def special_tokens(self, value: SpecialTokens) -> None:
        if value not in get_args(SpecialTokens):
            raise UserError(f"special_tokens must be control or text, not {value!r}")
        self._tokenizer.encode_special_tokens = value == "text"

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TextTokenizer:
        """Create the tokenizer from the result of `files`.

        A run without `processor.json` does not store its end tokens: they are guessed, with a warning.

        Raises:
          UserError: A file is damaged.
        """
        tokenizer = parse_tokenizer(files["tokenizer.json"], "tokenizer.json")
        if "processor.json" in files:
            stored = parse_json(files["processor.json"], _Stored, "processor.json")
            return cls(tokenizer, ends=stored.ends, special_tokens=stored.special_tokens)
        result = cls(tokenizer, special_tokens="text")
        if result.special_names():
            ends = ", ".join(result.tokens(result.ends)) or "none"
            warnings.warn(
                f"the run does not store its end token and how it reads special tokens: assuming the end token "
                f"{ends}, and reading special tokens as text",
                stacklevel=3,
            )
        return result

    def files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, its end tokens and its reading of special tokens, by name."""
        stored = {"ends": list(self.ends), "special_tokens": self.special_tokens}
        return {**super().files(), "processor.json": (json.dumps(stored) + "\n").encode()}

    @classmethod
    def characters(cls, texts: Iterable[str]) -> TextTokenizer:
        """Return a tokenizer with a token for each character of the texts, in the order of code points."""
        vocabulary = sorted(set().union(*texts))
        tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocabulary)}, unk_token="\ufffd"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return cls(tokenizer)

    @classmethod
    def byte_pairs(cls, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
        """Train byte-level BPE as in GPT-2 (Radford et al. 2019), with an end-of-text token.

        Args:
          texts: Training texts.
          vocab_size: Target number of tokens; a small text may yield fewer.

        Raises:
          UserError: The vocabulary is too small for every byte.
        """
        if vocab_size < 257:
            raise UserError(
                f"a vocabulary of {vocab_size} cannot hold {END_OF_TEXT} and 256 bytes: use at least 257"
            )
        tokenizer = Tokenizer(models.BPE())
        _make_byte_level(tokenizer)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(checked(texts), trainer)
        return cls(tokenizer)

    @classmethod
    def open(cls, path: str | pathlib.Path, *, model_type: str | None = None) -> TextTokenizer:
        """Open a published tokenizer; see `read_published_tokenizer`.

        Args:
          path: A `tokenizer.json` or `.tiktoken` file, or a folder with `tokenizer.json` or with GPT-2's
            `vocab.json` and `merges.txt`.
          model_type: The `model_type` of the folder's model; None reads it from `config.json`.

        Raises:
          UserError: None of these files exists, one is damaged, or the class of the tokenizer is not supported.
        """
        path = pathlib.Path(path)
        if path.suffix == ".tiktoken":
            return cls(read_tiktoken(path))
        published = read_published_tokenizer(path, byte_level_class="GPT2Tokenizer", model_type=model_type)
        end = published.tokenizer.token_to_id(published.tokens.get("eos_token", ""))
        # The end token is guessed only if no config describes the tokenizer or its model.
        ends = None if end is None and not published.has_config else [] if end is None else [end]
        special_tokens: SpecialTokens = "text" if published.splits_special_tokens else "control"
        result = cls(published.tokenizer, ends=ends, special_tokens=special_tokens)
        result.pad = published.tokenizer.token_to_id(published.tokens.get("pad_token", ""))
        return result

    def framed(self, *, lowercase: bool, remove_punctuation: bool = False) -> TextTokenizer:
        """Return a copy whose template adds the begin token, if there is one, and the end token to a text.

        Args:
          lowercase: Convert texts to lowercase.
          remove_punctuation: Remove ASCII punctuation.
        """
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        names = self.tokens([*([] if self.begin is None else [self.begin]), self.ends[0]])
        ids = [copy.token_to_id(name) for name in names]
        single = [*names[:-1], "$A", names[-1]]
        copy.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, "$B", names[-1]], special_tokens=list(zip(names, ids, strict=True))
        )
        steps: list[Any] = [normalizers.Lowercase()] if lowercase else []
        if remove_punctuation:
            steps.append(normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""))
        if steps:
            stored = [] if copy.normalizer is None else [copy.normalizer]
            copy.normalizer = normalizers.Sequence([*steps, *stored])
        return type(self)(copy, ends=self.ends, special_tokens=self.special_tokens)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text without begin and end; see `special_tokens`.

        Raises:
          UserError: A vocabulary of characters lacks a character.
        """
        self._check_characters(texts)
        encodings = self._tokenizer.encode_batch_fast(list(checked(texts)), add_special_tokens=False)
        encoded = [encoding.ids for encoding in encodings]
        self._warn_of_special_tokens(encoded)
        return encoded

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts, which start with the tokens that the tokenizer's template adds.

        Tokens that a template adds after a text would end the prompt, and are left out.

        Raises:
          UserError: A vocabulary of characters lacks a character.
        """
        return [[*self._begin, *ids] for ids in self.encode(texts)]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    def special_names(self) -> dict[int, str]:
        """Return the special tokens by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def _warn_of_special_tokens(self, encoded: Sequence[Sequence[int]]) -> None:
        if self.special_tokens == "text":
            return
        special = self.special_names()
        present = set().union(*(special.keys() & set(ids) for ids in encoded))
        if present:
            names = ", ".join(sorted(special[number] for number in present)[:4])
            warnings.warn(
                f"the text contains {names}, read as control tokens; set `special_tokens` to text to read "
                "them as text",
                stacklevel=4,
            )

    def _check_characters(self, texts: Sequence[str]) -> None:
        if self._characters is None:
            return
        unknown = sorted(set().union(*texts) - self._characters)
        if unknown:
            names = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in unknown[:3])
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise UserError(
                f"the vocabulary of characters lacks {names}{more}: remove them, or train with `tokenizer` bpe"
            )

    def decode(self, sequences: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Return the texts of token ids, with special tokens only if `special`."""
        return self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=not special)

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (fields of `config.json`, contents of `tokenizer_config.json`) of a published folder."""
        ends = list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.end is not None:
            config["eos_token"] = self.tokens([self.end])[0]
        if self.special_tokens == "text":
            config["split_special_tokens"] = True
        return {"bos_token_id": self.begin, "eos_token_id": ends}, config

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return each token as readable text for plots; a part of a character is U+FFFD."""
        return [self._token(i) for i in ids]

    def _token(self, number: int) -> str:
        # Some tokenizers (Llama's) drop the first space of a text, so the token is read from a second copy.
        single, double = (self._tokenizer.decode([number] * n, skip_special_tokens=False) for n in (1, 2))
        return double.removeprefix(single) if double.startswith(single) else single


def _make_byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
