"""Translation of sentences: tokenization, batches by length bucket, and search."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.data.batches.pair_batches import pad
from transformer_jax.data.tokenizers.byte_pairs import BEGIN, END, PAD, BytePairTokenizer
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.search import check_search, is_sharded, search_sequences
from transformer_jax.distributed.mesh import ROWS, constrained, replicated
from transformer_jax.errors import UserError

# The search compiles once per source length, so lengths are rounded up to one of these.
_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

# Largest number of sentences in a batch.
MAX_SENTENCES = 64


def bucket_length(length: int, limit: int) -> int:
    """Return the padded length of a source: the smallest bucket length that fits, or the limit."""
    return min(next(n for n in (*_LENGTHS, limit) if n >= length), limit)


def max_target_length(source: int, limit: int) -> int:
    """Return the largest number of tokens of a translation.

    For the sentence lengths of Vaswani et al. 2017 it is close to the paper's source length + 50.
    """
    return min(2 * source + 16, limit)


@functools.partial(jax.jit, static_argnames=("max_length", "beam_size", "alpha", "return_weights"))
def search(
    model: Any,
    source: jax.Array,
    *,
    max_length: int,
    beam_size: int,
    alpha: float,
    return_weights: bool = False,
) -> Hypotheses:
    """Translate a padded batch of sources (B, S); beam size 1 is greedy search."""
    source = constrained(source, (ROWS, None))
    cache = model.start(source, source_mask=(source != PAD).sum(axis=1), max_length=max_length)
    return search_sequences(
        model, cache, batch=source.shape[0], begin=BEGIN, end=END, max_length=max_length, beam_size=beam_size,
        alpha=alpha, return_weights=return_weights,
    )  # fmt: skip


@jax.jit
def forced_weights(model: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """Return the cross-attention (B, L, H, T, S) of padded sources (B, S) with target inputs (B, T)."""
    _, weights = model(
        source,
        target,
        source_mask=(source != PAD).sum(axis=1),
        target_mask=(target != PAD).sum(axis=1),
        return_weights=True,
    )
    return replicated(weights)


def search_all(model: Any, sources: Iterable[np.ndarray], **options: Any) -> list[Hypotheses]:
    """Run `search` on many batches and return the results in order as NumPy arrays.

    On one CPU two batches run in parallel, because XLA computes a part of a search in one thread. The worker
    threads ignore the caller's `with jax.default_matmul_precision(...)`. On a mesh the batches run one after
    the other, because two programs would wait for each other's devices forever.
    """

    def search_batch(source: np.ndarray) -> Hypotheses:
        return jax.device_get(search(model, source, **options))

    sources = list(sources)
    if len(sources) < 2 or jax.default_backend() != "cpu" or is_sharded(model):
        return [search_batch(source) for source in sources]
    pool = concurrent.futures.ThreadPoolExecutor(2)
    try:
        first_of_shape: dict[tuple[int, ...], concurrent.futures.Future] = {}
        pending = []
        for source in sources:
            # The first batch of a shape compiles the program; parallel calls would compile it again.
            if source.shape in first_of_shape:
                first_of_shape[source.shape].result()
            pending.append(pool.submit(search_batch, source))
            first_of_shape.setdefault(source.shape, pending[-1])
        return [future.result() for future in pending]
    finally:
        # An error or Ctrl-C cancels the batches that have not started.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Alignment:
    """A translation with its attention weights.

    Attributes:
      text: The translation.
      source_tokens: The S source tokens, including the end token.
      target_tokens: The T target tokens, including the end token.
      weights: Cross-attention (L, H, T, S) float32; row t is from the step that generated target token t.
      target_ids: Ids of the target tokens.
    """

    text: str
    source_tokens: list[str]
    target_tokens: list[str]
    weights: np.ndarray
    target_ids: tuple[int, ...] = ()


class Translator:
    """Translates with a trained model.

    Args:
      model: Encoder-decoder.
      tokenizer: Tokenizer of the model's training.
      beam_size: Number of beams; 1 is greedy search.
      alpha: Exponent of the length penalty, see `beam_search`.
      rows: Largest number of sentences in a batch.

    Raises:
      UserError: See `check_search`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: BytePairTokenizer,
        *,
        beam_size: int = 4,
        alpha: float = 0.6,
        rows: int = MAX_SENTENCES,
    ):
        check_search(beam_size, alpha)
        self.model, self.tokenizer = model, tokenizer
        self.beam_size, self.alpha, self.rows = beam_size, alpha, rows

    @property
    def max_source(self) -> int:
        """The largest number of source tokens, not counting the end token."""
        return self.model.config.max_length - 1

    def encode(self, texts: Sequence[str], *, truncate: bool = False) -> list[list[int]]:
        """Return the token ids of each text, ending with END.

        Args:
          texts: Sentences.
          truncate: Truncate sentences that are too long instead of raising an error.

        Raises:
          UserError: A sentence exceeds the model's limit.
        """
        encoded = self.tokenizer.encode(texts)
        limit = self.max_source
        for number, ids in enumerate(encoded, 1):
            if len(ids) > limit and not truncate:
                raise UserError(
                    f"sentence {number} has {len(ids)} tokens, above the limit of {limit} that this model "
                    "was trained with: split it, or train with a larger `max_length`"
                )
        return [[*ids[:limit], END] for ids in encoded]

    def __call__(self, texts: Sequence[str], *, truncate: bool = False) -> list[str]:
        """Translate each text; the translation of an empty text is empty.

        Raises:
          UserError: A sentence exceeds the model's limit, unless `truncate` is set.
        """
        encoded = self.encode(texts, truncate=truncate)
        translations = [""] * len(texts)
        # Sorting puts sentences of equal length into one batch, which runs as long as its longest sentence.
        order = [
            i
            for i in sorted(range(len(texts)), key=lambda i: len(encoded[i]))
            if self.tokenizer.clean(texts[i])
        ]
        rows = next((r for r in (1, 8) if len(order) <= r), self.rows)
        batches: list[tuple[int, list[int]]] = []
        while order:
            length = bucket_length(len(encoded[order[0]]), self.model.config.max_length)
            batch = [i for i in order[:rows] if len(encoded[i]) <= length]
            order = order[len(batch) :]
            batches.append((length, batch))
        for length, group in itertools.groupby(batches, key=lambda batch: batch[0]):
            batches_of_length = [batch for _, batch in group]
            sources = (self._pad([encoded[i] for i in batch], rows, length) for batch in batches_of_length)
            results = search_all(self.model, sources, **self._options(length))
            for batch, hypotheses in zip(batches_of_length, results, strict=True):
                for i, ids, size in zip(batch, hypotheses.tokens, hypotheses.lengths, strict=False):
                    translations[i] = self.tokenizer.decode([ids[0, : size[0]]])[0]
        return translations

    def align(self, text: str, translation: str | None = None) -> Alignment:
        """Translate one sentence and return its cross-attention.

        Args:
          text: The sentence.
          translation: Translation to align; None aligns the model's translation.

        Raises:
          UserError: A sentence is empty or exceeds the model's limit, or the model has no attention.
        """
        clean = self.tokenizer.clean
        if not clean(text) or (translation is not None and not clean(translation)):
            raise UserError("an empty sentence has no alignment: give some text")
        if not getattr(self.model, "attends", True):
            raise UserError("this model has no attention and therefore no alignment")
        limit = self.model.config.max_length
        (ids,) = self.encode([text])
        length = bucket_length(len(ids), limit)
        source = self._pad([ids], 1, length)
        if translation is None:
            (hypotheses,) = search_all(self.model, [source], **self._options(length), return_weights=True)
            assert hypotheses.weights is not None, "requested by return_weights"
            target = hypotheses.tokens[0, 0, : int(hypotheses.lengths[0, 0])].tolist()
            weights = np.asarray(hypotheses.weights)[0, 0]
        else:
            (target,) = self.encode([translation])
            inputs = self._pad([[BEGIN, *target[:-1]]], 1, bucket_length(len(target), limit))
            weights = np.asarray(forced_weights(self.model, source, inputs))[0]
        return Alignment(
            self.tokenizer.decode([target])[0],
            self.tokenizer.tokens(ids),
            self.tokenizer.tokens(target),
            weights[:, :, : len(target), : len(ids)],
            tuple(target),
        )

    @staticmethod
    def _pad(ids: list[list[int]], rows: int, length: int) -> np.ndarray:
        # Unused rows repeat a sentence, because an empty one might never end and delay the batch.
        return pad(ids + [ids[-1]] * (rows - len(ids)), rows, length)

    def _options(self, length: int) -> dict[str, Any]:
        max_length = max_target_length(length, self.model.config.max_length)
        return dict(max_length=max_length, beam_size=self.beam_size, alpha=self.alpha)
