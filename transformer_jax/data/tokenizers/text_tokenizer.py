"""Tokenizers of language models: characters, byte-level BPE trained here, and published tokenizers.

All of them are tokenizers of the `tokenizers` library, so that a run stores them in one format.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from transformer_jax.data.tokenizers.tiktoken_file import read_tiktoken
from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile, checked, read_bpe, read_tokenizer
from transformer_jax.errors import UserError

END_OF_TEXT = "<|endoftext|>"

# End-of-text tokens of published vocabularies, in the order of preference.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


class TextTokenizer(TokenizerFile):
    """Tokenizer of texts, lossless if the vocabulary covers the text.

    Attributes:
      ends: Ids of the end-of-text tokens, or ().
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        # Published files may enable truncation or padding, which the batches do here.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = (tokenizer.token_to_id(name) for name in _ENDS)
        self.ends: tuple[int, ...] = tuple(i for i in ids if i is not None)[:1]
        model = json.loads(tokenizer.to_str())["model"]
        by_character = model["type"] == "WordLevel" and all(len(token) == 1 for token in model["vocab"])
        self._characters = set(model["vocab"]) if by_character else None

    @property
    def end(self) -> int | None:
        """The first end-of-text token, or None."""
        return self.ends[0] if self.ends else None

    @property
    def begin(self) -> int | None:
        """The token that the tokenizer's template adds before a prompt, or None."""
        return next(iter(self._tokenizer.encode("", add_special_tokens=True).ids), None)

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
    def open(cls, path: str | pathlib.Path) -> TextTokenizer:
        """Open a published tokenizer.

        Args:
          path: A `tokenizer.json` or `.tiktoken` file, or a folder with `tokenizer.json` or with GPT-2's
            `vocab.json` and `merges.txt`.

        Raises:
          UserError: None of these files exists, or one is damaged.
        """
        path = pathlib.Path(path)
        if path.is_dir():
            if (path / "tokenizer.json").is_file():
                return cls.load(path / "tokenizer.json")
            if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
                return cls(_gpt2_files(path / "vocab.json", path / "merges.txt"))
            raise UserError(f"{path}: holds neither tokenizer.json nor vocab.json and merges.txt")
        if path.suffix == ".tiktoken":
            return cls(read_tiktoken(path))
        return cls(read_tokenizer(path))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text without begin and end, reading special tokens as plain text.

        Raises:
          UserError: A vocabulary of characters lacks a character.
        """
        self._check_characters(texts)
        self._tokenizer.encode_special_tokens = True
        return [
            e.ids for e in self._tokenizer.encode_batch_fast(list(checked(texts)), add_special_tokens=False)
        ]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of prompts, with the begin token of the tokenizer's template and special tokens.

        Raises:
          UserError: A vocabulary of characters lacks a character.
        """
        self._check_characters(texts)
        self._warn_of_special_tokens(texts)
        self._tokenizer.encode_special_tokens = False
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(checked(texts)), add_special_tokens=True)]

    def _warn_of_special_tokens(self, texts: Sequence[str]) -> None:
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = [t.content for t in added if t.special and any(t.content in text for text in texts)]
        if special:
            names = ", ".join(sorted(special)[:4])
            warnings.warn(f"the prompt contains {names}, which acts as a control token", stacklevel=4)

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


def _gpt2_files(vocabulary: pathlib.Path, merges: pathlib.Path) -> Tokenizer:
    tokenizer = Tokenizer(read_bpe(vocabulary, merges))
    _make_byte_level(tokenizer)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return tokenizer
