"""From a corpus to what a translator's run reads: examples, batches, and text to translate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from transformer_jax.data.batches.encoded_pairs import EncodedPairs, token_lengths
from transformer_jax.data.batches.pair_batches import Bucket, TranslationBatches, choose_buckets, packed_bucket
from transformer_jax.data.corpora import parallel
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.errors import UserError
from transformer_jax.translation_config import ResolvedConfig

_VALIDATION_PHRASES, _TEST_PHRASES = 500, 1_000


@dataclasses.dataclass(frozen=True)
class TranslationData:
    """A corpus made ready for one run.

    Attributes:
      lengths: of every training pair, see `token_lengths`.
    """

    corpus: parallel.Corpus
    tokenizer: BytePairTokenizer
    train: TranslationBatches
    valid: list[dict[str, np.ndarray]]
    lengths: np.ndarray


def load_corpus(config: ResolvedConfig) -> parallel.Corpus:
    """The pairs that a resolved config names.

    Raises:
      UserError: see `read_pairs`, `PhraseBook` and `tfds_corpus`.
    """
    if config.recipe == "multi30k" and not config.train:
        raise UserError("the recipe multi30k trains on files: name them with --train, --valid and --test")
    if config.train:
        return parallel.files_corpus(config.train, config.valid, config.test)
    if config.corpus.startswith("tfds:"):
        return parallel.tfds_corpus(config.corpus, config.direction, config.splits, config.data_dir)
    return parallel.phrases_corpus(
        config.corpus, config.phrases, _VALIDATION_PHRASES, _TEST_PHRASES, config.seed
    )


def _counted(examples: EncodedPairs, empty: int, limit: int) -> str:
    """ "29,000 pairs", with what was left out where anything was."""
    empty += examples.empty
    reasons = [f"{empty:,} empty"] * (empty > 0)
    reasons += [f"{examples.too_long:,} longer than {limit} tokens"] * (examples.too_long > 0)
    return f"{len(examples):,} pairs" + (f" ({' and '.join(reasons)} left out)" if reasons else "")


def prepare(
    config: ResolvedConfig,
    corpus: parallel.Corpus,
    tokenizer: BytePairTokenizer,
    note: Callable[[str], None],
    lengths: np.ndarray | None = None,
) -> TranslationData:
    """Training and validation batches of a corpus, as a resolved config wants them.

    `lengths` are those that an earlier call gave for the same corpus and tokenizer; None counts them.

    Raises:
      UserError: every pair of a split is longer than the config's limit, or a batch is too small for
        the longest.
    """
    limit = config.max_length
    if lengths is None or len(lengths) != len(corpus.train):
        if not isinstance(corpus.train, list):
            note(f"counting the tokens of {len(corpus.train):,} pairs, once for this run")
        lengths = token_lengths(corpus.train, tokenizer)
    train = EncodedPairs(corpus.train, tokenizer, max_length=limit, dropout=config.bpe_dropout, lengths=lengths)
    valid = EncodedPairs(corpus.valid, tokenizer, max_length=limit)
    for split, examples in (("training", train), ("validation", valid)):
        if not len(examples) and not examples.too_long:
            raise UserError(f"no {split} pair has text on both sides")
        if not len(examples):
            raise UserError(f"every {split} pair is longer than --max-length {limit} tokens: raise it")
    note(
        f"{_counted(train, corpus.empty[0], limit)} for training, "
        f"{_counted(valid, corpus.empty[1], limit)} for validation, "
        f"{len(corpus.test):,} pairs{f' ({corpus.empty[2]:,} empty left out)' if corpus.empty[2] else ''} "
        f"for test, vocabulary {tokenizer.vocab_size:,}"
    )
    packed = config.batching == "packed"
    buckets: tuple[Bucket, ...]
    options: dict[str, int] = dict(row_multiple=config.accumulation, limit=limit)
    longer_side = train.lengths.max(axis=1) + 1
    if packed:
        buckets = (packed_bucket(longer_side, config.batch_tokens, **options),)
    else:
        buckets = choose_buckets(longer_side, config.buckets, config.batch_tokens, **options)
    batches = TranslationBatches(train, buckets, config.seed, packed=packed)
    longest = int(valid.lengths.max()) + 1
    if longest > buckets[-1].length:
        # Longer than all that is trained on: one more shape.
        buckets += (Bucket(longest, max(1, buckets[-1].rows // 2)),)
    valid_batches = TranslationBatches(valid, buckets, config.seed, packed=packed)
    return TranslationData(corpus, tokenizer, batches, list(valid_batches.epoch()), lengths)
