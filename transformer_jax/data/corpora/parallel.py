"""Parallel corpora by name or from files, in three splits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from transformer_jax.data.corpora.pairs import Pair, read_pairs
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Three splits of pairs, in memory or read from disk on access.

    Attributes:
      train: Training pairs.
      valid: Validation pairs.
      test: Test pairs.
      empty: Number of pairs of each split that were left out because a side was empty.
      identity: Digest of the corpus; None if it must be computed from the texts.
    """

    train: Sequence[Pair]
    valid: Sequence[Pair]
    test: Sequence[Pair]
    empty: tuple[int, int, int] = (0, 0, 0)
    identity: str | None = None

    def fingerprint(self) -> str:
        """Return a digest of the corpus."""
        if self.identity is not None:
            return self.identity
        digest = hashlib.sha256()
        for split in (self.train, self.valid, self.test):
            for pair in split:
                digest.update("\t".join(pair).encode() + b"\n")
        return digest.hexdigest()[:16]


def parse_phrases_name(corpus: str) -> tuple[str, str]:
    """Return the locales in "phrases:SOURCE-TARGET".

    Raises:
      UserError: The name has another form.
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
    """Return splits of these sizes of the embedded corpus; the seed affects only the training phrases."""
    from transformer_jax.data.corpora.phrases import PhraseBook  # imports Babel

    book = PhraseBook(*parse_phrases_name(corpus))
    return Corpus(book.draw("train", train, seed), book.draw("valid", valid), book.draw("test", test))


def files_corpus(train: Sequence[str], valid: Sequence[str], test: Sequence[str]) -> Corpus:
    """Return splits read from files, see `read_pairs`."""
    (train_pairs, a), (valid_pairs, b), (test_pairs, c) = (read_pairs(files) for files in (train, valid, test))
    return Corpus(train_pairs, valid_pairs, test_pairs, (a, b, c))


def tfds_corpus(corpus: str, direction: str | None, splits: Sequence[str], data_dir: str | None) -> Corpus:
    """Return splits of the TFDS dataset "tfds:NAME", read from disk on access.

    Args:
      corpus: "tfds:" and TFDS's name of the set.
      direction: "SOURCE-TARGET"; None uses the order of the dataset's two languages.
      splits: Splits for training, validation and test, in TFDS's syntax.
      data_dir: TFDS's folder; None means its default.

    Raises:
      UserError: See `prepared_builder`, `direction_of` and `TfdsPairs`.
    """
    from transformer_jax.data.corpora import tfds_sources  # imports tensorflow-datasets, an extra

    builder = tfds_sources.prepared_builder(corpus.removeprefix("tfds:"), data_dir)
    languages = tfds_sources.direction_of(builder, direction)
    train, *rest = (tfds_sources.TfdsPairs(builder, split, *languages) for split in splits)
    # The small splits are kept in memory, because scores need their texts.
    valid, test = ([pair for pair in split if pair.source and pair.target] for split in rest)
    for name, split in zip(splits, (train, valid, test), strict=True):
        if not len(split):
            raise UserError(f"{corpus}: the split {name} has no pair with text on both sides")
    return Corpus(
        train,
        valid,
        test,
        empty=(0, len(rest[0]) - len(valid), len(rest[1]) - len(test)),
        identity=tfds_sources.tfds_fingerprint(builder, splits, languages),
    )
