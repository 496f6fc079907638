"""Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019): any text in, the same text out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile
from transformer_jax.errors import UserError

PAD, BEGIN, END = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")

# The special tokens and one token per byte: below this no text would be representable.
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256


class BytePairTokenizer(TokenizerFile):
    """Text to token ids and back, without loss.

    A space is put before each text and taken off again, so that a word has one token wherever it
    stands. Runs of digits stand apart from spaces and letters: a number has the same tokens on both
    sides of a translation, and is copied.
    """

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        # Set once: threads that encode at the same time only read. A special token in a text is text.
        tokenizer.encode_special_tokens = True

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePairTokenizer:
        """Learns the merges.

        Args:
          texts: all sentences, source and target together: the vocabulary is shared.
          vocab_size: number of tokens aimed at; a small corpus may have fewer to give.

        Raises:
          UserError: a vocabulary too small to hold every byte.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(
                f"a vocabulary of {vocab_size} cannot hold the {len(SPECIAL_TOKENS)} special tokens and "
                f"256 bytes: ask for at least {SMALLEST_VOCABULARY}"
            )
        tokenizer = Tokenizer(models.BPE())
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
        tokenizer.train_from_iterator((" " + text for text in texts), trainer)
        return cls(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without begin or end. Special tokens written in a text are text."""
        encoded = self._tokenizer.encode_batch_fast([" " + text for text in texts], add_special_tokens=False)
        return [e.ids for e in encoded]

    def words(self, text: str) -> list[str]:
        """The pieces of a text that are encoded one by one, in the byte-level alphabet."""
        pre_tokenizer = self._tokenizer.pre_tokenizer
        assert pre_tokenizer is not None, "every tokenizer here cuts words"
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(" " + text)]

    def merge_table(self) -> tuple[dict[str, int], dict[tuple[int, int], tuple[int, int]]]:
        """(id of each token, (rank, id of the whole) of each pair of ids that merges)."""
        model = json.loads(self._tokenizer.to_str())["model"]
        ids = model["vocab"]
        merges = {(ids[a], ids[b]): (rank, ids[a + b]) for rank, (a, b) in enumerate(model["merges"])}
        return ids, merges

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Texts of token ids; ids of special tokens are left out."""
        decoded = self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=True)
        return [text.removeprefix(" ") for text in decoded]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each token as readable text, for the axes of a picture; a cut character shows as U+FFFD."""
        return [
            SPECIAL_TOKENS[i] if i < len(SPECIAL_TOKENS) else self._tokenizer.decode([i]).strip() or "␣"
            for i in ids
        ]
