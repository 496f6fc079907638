"""Tokenizers of language models: characters, byte-level BPE trained here, and published ones from their files.

All are tokenizers of the `tokenizers` library, so a run keeps any of them in one format.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from transformer_jax.data.tokenizers.tiktoken_file import read_tiktoken
from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile, read_tokenizer
from transformer_jax.errors import UserError

END_OF_TEXT = "<|endoftext|>"

# What ends a text in published vocabularies, the likeliest first.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")


class TextTokenizer(TokenizerFile):
    """Text to token ids and back, without loss where the vocabulary covers the text.

    Attributes:
      ends: ids of the tokens that end a text; empty where the vocabulary has none.
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        # A published file may say to cut or to fill up texts: here they are kept as they are.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        found = (tokenizer.token_to_id(name) for name in _ENDS)
        self.ends: tuple[int, ...] = tuple(i for i in found if i is not None)[:1]
        model = json.loads(tokenizer.to_str())["model"]
        by_character = model["type"] == "WordLevel" and all(len(token) == 1 for token in model["vocab"])
        self._characters = set(model["vocab"]) if by_character else None

    @property
    def end(self) -> int | None:
        """The token between texts, or None."""
        return self.ends[0] if self.ends else None

    @property
    def begin(self) -> int | None:
        """The token that the tokenizer's own template puts in front of a prompt, or None."""
        return next(iter(self._tokenizer.encode("", add_special_tokens=True).ids), None)

    @classmethod
    def characters(cls, texts: Iterable[str]) -> TextTokenizer:
        """One token for each character of the texts, in the order of their code points."""
        vocabulary = sorted(set().union(*texts))
        tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocabulary)}, unk_token="\ufffd"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return cls(tokenizer)

    @classmethod
    def byte_pairs(cls, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
        """Byte-level BPE in the manner of GPT-2 (Radford et al. 2019), with an end-of-text token.

        Args:
          texts: to learn the merges from.
          vocab_size: number of tokens aimed at; a small text may have fewer to give.

        Raises:
          UserError: a vocabulary too small to hold every byte.
        """
        if vocab_size < 257:
            raise UserError(
                f"a vocabulary of {vocab_size} cannot hold {END_OF_TEXT} and 256 bytes: ask for at least 257"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def open(cls, path: str | pathlib.Path) -> TextTokenizer:
        """A published tokenizer: a `tokenizer.json`, a folder that holds one, a `.tiktoken` file, or a folder
        with GPT-2's `vocab.json` and `merges.txt`.

        Raises:
          UserError: none of these, or damaged.
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
        """Token ids of each text, as it stands: without begin or end, special tokens written in it as text.

        Raises:
          UserError: a character that a vocabulary of characters lacks.
        """
        self._check_characters(texts)
        self._tokenizer.encode_special_tokens = True
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts: with the begin token where the tokenizer's own template puts one, and special
        tokens written in a prompt as themselves.

        Raises:
          UserError: a character that a vocabulary of characters lacks.
        """
        self._check_characters(texts)
        self._tokenizer.encode_special_tokens = False
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)]

    def _check_characters(self, texts: Sequence[str]) -> None:
        if self._characters is None:
            return
        strange = sorted(set().union(*texts) - self._characters)
        if strange:
            shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in strange[:3])
            more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
            raise UserError(
                f"the vocabulary of characters lacks {shown}{more}: leave them out, or "
                "train with `tokenizer` bpe"
            )

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

    def decode(self, sequences: Sequence[Sequence[int]], *, special: bool = False) -> list[str]:
        """Texts of token ids; special tokens are left out unless asked for."""
        return self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=not special)

    def published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(fields of `config.json`, the contents of `tokenizer_config.json`) of a published folder."""
        ends = list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)
        described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.end is not None:
            described["eos_token"] = self.tokens([self.end])[0]
        return {"bos_token_id": self.begin, "eos_token_id": ends}, described

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each token as readable text, for the axes of a picture; a cut character shows as U+FFFD."""
        return [self._token(i) for i in ids]

    def _token(self, number: int) -> str:
        # A text's first space is no part of it for some tokenizers (Llama's), so a second copy is what is read.
        one, two = (self._tokenizer.decode([number] * n, skip_special_tokens=False) for n in (1, 2))
        return two.removeprefix(one) if two.startswith(one) else one


def _gpt2_files(vocabulary: pathlib.Path, merges: pathlib.Path) -> Tokenizer:
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{vocabulary}, {merges}: not a vocabulary and its merges ({error})") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    return tokenizer
