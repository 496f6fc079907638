"""Corpora by name or from files: three splits of sentence pairs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from transformer_jax.data.pairs import read_pairs
from transformer_jax.data.phrases import Pair, PhraseBook
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits, and how many pairs of each were left out because a side was empty."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    empty: tuple[int, int, int] = (0, 0, 0)

    def fingerprint(self) -> str:
        """Tells this corpus from any other."""
        digest = hashlib.sha256()
        for split in (self.train, self.valid, self.test):
            for pair in split:
                digest.update("\t".join(pair).encode() + b"\n")
        return digest.hexdigest()[:16]


def parse_phrases_name(corpus: str) -> tuple[str, str]:
    """The locales of "phrases:SOURCE-TARGET".

    Raises:
      UserError: another form of name.
    """
    kind, _, locales = corpus.partition(":")
    source, dash, target = locales.partition("-")
    if kind != "phrases" or not (source and dash and target):
        raise UserError(f"unknown corpus {corpus!r}: write phrases:en-de, with any two CLDR locales")
    return source, target


def phrases_corpus(corpus: str, train: int, valid: int, test: int, seed: int) -> Corpus:
    """Splits of the embedded corpus of the given sizes; the seed moves the training phrases only."""
    book = PhraseBook(*parse_phrases_name(corpus))
    return Corpus(book.draw("train", train, seed), book.draw("valid", valid), book.draw("test", test))


def files_corpus(train: Sequence[str], valid: Sequence[str], test: Sequence[str]) -> Corpus:
    """Splits read from files, see `read_pairs`."""
    (train_pairs, a), (valid_pairs, b), (test_pairs, c) = (read_pairs(files) for files in (train, valid, test))
    return Corpus(train_pairs, valid_pairs, test_pairs, (a, b, c))
