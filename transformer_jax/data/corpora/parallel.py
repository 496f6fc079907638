"""Corpora by name or from files: three splits of sentence pairs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from transformer_jax.data.corpora.pairs import Pair, read_pairs
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits of pairs, in memory or read from disk when asked for.

    Attributes:
      empty: how many pairs of each split were left out already because a side was empty.
      identity: distinguishes this corpus from any other; None if only its texts do.
    """

    train: Sequence[Pair]
    valid: Sequence[Pair]
    test: Sequence[Pair]
    empty: tuple[int, int, int] = (0, 0, 0)
    identity: str | None = None

    def fingerprint(self) -> str:
        """Tells this corpus from any other."""
        if self.identity is not None:
            return self.identity
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
        raise UserError(
            f"unknown corpus {corpus!r}: write phrases:en-de, with any two CLDR locales, or "
            "tfds:wmt14_translate/de-en, with any translation set of TFDS"
        )
    return source, target


def phrases_corpus(corpus: str, train: int, valid: int, test: int, seed: int) -> Corpus:
    """Splits of the embedded corpus of the given sizes; the seed moves the training phrases only."""
    from transformer_jax.data.corpora.phrases import PhraseBook  # needs Babel, which files and TFDS do not

    book = PhraseBook(*parse_phrases_name(corpus))
    return Corpus(book.draw("train", train, seed), book.draw("valid", valid), book.draw("test", test))


def files_corpus(train: Sequence[str], valid: Sequence[str], test: Sequence[str]) -> Corpus:
    """Splits read from files, see `read_pairs`."""
    (train_pairs, a), (valid_pairs, b), (test_pairs, c) = (read_pairs(files) for files in (train, valid, test))
    return Corpus(train_pairs, valid_pairs, test_pairs, (a, b, c))


def tfds_corpus(corpus: str, direction: str | None, splits: Sequence[str], data_dir: str | None) -> Corpus:
    """Splits of the TFDS set "tfds:NAME", read from disk as they are needed.

    Args:
      corpus: "tfds:" and TFDS's name of the set.
      direction: "SOURCE-TARGET"; None for the order in which the set names its two languages.
      splits: of training, validation and test, in TFDS's syntax.
      data_dir: TFDS's folder; None for its own default.

    Raises:
      UserError: see `prepared_builder`, `direction_of` and `TfdsPairs`.
    """
    from transformer_jax.data.corpora import tfds_sources  # tensorflow-datasets is an extra, and takes a second

    builder = tfds_sources.prepared_builder(corpus.removeprefix("tfds:"), data_dir)
    languages = tfds_sources.direction_of(builder, direction)
    train, *rest = (tfds_sources.TfdsPairs(builder, split, *languages) for split in splits)
    # Texts of the small splits are what scores are made of; only training pairs are many.
    valid, test = ([pair for pair in split if pair.source and pair.target] for split in rest)
    for name, split in zip(splits, (train, valid, test), strict=True):
        if not len(split):
            raise UserError(f"{corpus}: the split {name} holds no pair with text on both sides")
    return Corpus(
        train,
        valid,
        test,
        empty=(0, len(rest[0]) - len(valid), len(rest[1]) - len(test)),
        identity=tfds_sources.tfds_fingerprint(builder, splits, languages),
    )
