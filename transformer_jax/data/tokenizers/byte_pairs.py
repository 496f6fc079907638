"""Byte-level BPE of translators (Sennrich et al. 2016; Radford et al. 2019), lossless for any clean text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile, checked
from transformer_jax.errors import UserError

PAD, BEGIN, END = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")

# The special tokens and a token for each byte.
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


# Byte order marks, and marks that only control the display direction, which a translator cannot predict.
_INVISIBLE = "[\ufeff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"


class BytePairTokenizer(TokenizerFile):
    """Tokenizer of texts, lossless except for what `clean` changes.

    A space is added before each text and removed by decoding, so that a word has the same tokens at any
    position. Digits are separated from spaces and letters, so that a number has the same tokens on both sides
    of a translation and can be copied.
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        # Set only here, because threads encode concurrently. Special tokens in a text are encoded as text.
        tokenizer.encode_special_tokens = True

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePairTokenizer:
        """Train the merges.

        Args:
          texts: Source and target sentences, which share the vocabulary.
          vocab_size: Target number of tokens; a small corpus may yield fewer.

        Raises:
          UserError: The vocabulary is too small for every byte.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise UserError(
                f"a vocabulary of {vocab_size} cannot hold the {len(SPECIAL_TOKENS)} special tokens and "
                f"256 bytes: use at least {MIN_VOCAB_SIZE}"
            )
        tokenizer = Tokenizer(models.BPE())
        # Training and use clean texts alike, because the tokenizer does it.
        tokenizer.normalizer = normalizers.Sequence([
            normalizers.NFC(), normalizers.Replace(Regex(_INVISIBLE), ""),
            normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(left=False, right=True),
        ])  # fmt: skip
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((" " + text for text in checked(texts)), trainer)
        return cls(tokenizer)

    def clean(self, text: str) -> str:
        """Return a text as the model reads it.

        White space at its ends is removed; runs of white space, such as tabs and no-break spaces, become one
        space; byte order marks and direction marks are removed; and characters are composed (Unicode's NFC).
        A tokenizer of an older run, without a normalizer, only removes white space at the ends.
        """
        normalizer = self._tokenizer.normalizer
        return (text if normalizer is None else normalizer.normalize_str(text)).strip()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text without begin and end, reading special tokens as plain text."""
        encoded = self._tokenizer.encode_batch_fast(
            [f" {text.strip()}" for text in checked(texts)], add_special_tokens=False
        )
        return [e.ids for e in encoded]

    def words(self, text: str) -> list[str]:
        """Return the words of a text that are merged separately, in the byte-level alphabet."""
        pre_tokenizer = self._tokenizer.pre_tokenizer
        assert pre_tokenizer is not None, "set by `train`"
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(f" {self.clean(text)}")]

    def merge_table(self) -> tuple[dict[str, int], dict[tuple[int, int], tuple[int, int]]]:
        """Return (the id of each token, the (rank, merged id) of each pair of ids that merges)."""
        model = json.loads(self._tokenizer.to_str())["model"]
        ids = model["vocab"]
        merges = {(ids[a], ids[b]): (rank, ids[a + b]) for rank, (a, b) in enumerate(model["merges"])}
        return ids, merges

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of token ids, without special tokens."""
        decoded = self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=True)
        return [text.removeprefix(" ") for text in decoded]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return each token as readable text for plots; a part of a character is U+FFFD."""
        return [
            SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else self._tokenizer.decode([i]).strip() or "␣"
            for i in ids
        ]
