"""Sentences in, sentences out: batches by length bucket around the search."""

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
from transformer_jax.decoding.beam import beam_search
from transformer_jax.decoding.greedy import greedy_search
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.distributed.mesh import ROWS, constrained, replicated
from transformer_jax.errors import UserError

# Source lengths are rounded up to one of these, so that the search compiles once for each.
_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


# Sentences of a batch at most.
SENTENCES = 64


def bucket_length(length: int, limit: int) -> int:
    """The length that a source is padded to: the smallest bucket that holds it, at most the limit."""
    return min(next(n for n in (*_LENGTHS, limit) if n >= length), limit)


def longest_target(source: int, limit: int) -> int:
    """Tokens of a translation at most: twice the source and a little, as the paper's source + 50 for sentences
    of its length."""
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
    """Translates a padded batch of sources (B, S); beam size 1 is greedy search."""
    source = constrained(source, (ROWS, None))
    cache = model.start(source, source_mask=(source != PAD).sum(axis=1), max_length=max_length)
    step = model.step_function(return_weights=return_weights)
    options: dict[str, Any] = dict(
        batch=source.shape[0], begin=BEGIN, end=END, max_length=max_length, return_weights=return_weights
    )
    if beam_size == 1:
        return replicated(greedy_search(step, cache, **options))
    return replicated(beam_search(step, cache, beam_size=beam_size, alpha=alpha, **options))


@jax.jit
def forced_weights(model: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """The cross-attention (B, L, H, T, S) of sources (B, S) with given target inputs (B, T), padded."""
    _, weights = model(
        source,
        target,
        source_mask=(source != PAD).sum(axis=1),
        target_mask=(target != PAD).sum(axis=1),
        return_weights=True,
    )
    return replicated(weights)


def search_all(model: Any, sources: Iterable[np.ndarray], **options: Any) -> list[Hypotheses]:
    """`search` over many batches, in order, as NumPy arrays.

    On a CPU two batches are computed at a time: selections and other work that XLA does in one thread
    then leave no core idle. They run in threads of their own, where a caller's
    `with jax.default_matmul_precision(...)` does not reach. On a mesh there is one: two programs would wait
    for each other's devices without end.
    """

    def one(source: np.ndarray) -> Hypotheses:
        return jax.device_get(search(model, source, **options))

    sources = list(sources)
    spread_out = any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(model))
    if len(sources) < 2 or jax.default_backend() != "cpu" or spread_out:
        return [one(source) for source in sources]
    pool = concurrent.futures.ThreadPoolExecutor(2)
    try:
        first: dict[tuple[int, ...], concurrent.futures.Future] = {}
        pending = []
        for source in sources:
            # The first of a shape compiles; a second one at the same time would compile the same again.
            if source.shape in first:
                first[source.shape].result()
            pending.append(pool.submit(one, source))
            first.setdefault(source.shape, pending[-1])
        return [future.result() for future in pending]
    finally:
        # After an error or Ctrl-C nothing that waits is begun.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class Alignment:
    """One translation and what it attended to.

    Attributes:
      text: the translation.
      source_tokens, target_tokens: the S and T tokens, each with its end token.
      weights: cross-attention (L, H, T, S) float32; row t is from the step that made target token t.
      target_ids: of the target tokens.
    """

    text: str
    source_tokens: list[str]
    target_tokens: list[str]
    weights: np.ndarray
    target_ids: tuple[int, ...] = ()


class Translator:
    """Translates with a trained model.

    Args:
      model: an encoder-decoder of the zoo.
      tokenizer: the one it was trained with.
      beam_size: 1 is greedy search.
      alpha: length penalty, see `beam_search`.
      rows: largest number of sentences in one batch.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: BytePairTokenizer,
        *,
        beam_size: int = 4,
        alpha: float = 0.6,
        rows: int = SENTENCES,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.beam_size, self.alpha, self.rows = beam_size, alpha, rows

    @property
    def max_source(self) -> int:
        """The longest source in tokens, without its end token."""
        return self.model.config.max_length - 1

    def encode(self, texts: Sequence[str], *, truncate: bool = False) -> list[list[int]]:
        """Token ids of the texts, ending with END.

        Args:
          texts: the sentences.
          truncate: cut sentences that are too long instead of refusing them.

        Raises:
          UserError: a sentence longer than the model's limit.
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
        """The translation of each text; an empty text stays empty.

        Raises:
          UserError: a sentence longer than the model's limit, unless `truncate`.
        """
        encoded = self.encode(texts, truncate=truncate)
        translations = [""] * len(texts)
        # Equal lengths next to each other: a batch runs as long as its longest sentence.
        order = [i for i in sorted(range(len(texts)), key=lambda i: len(encoded[i])) if texts[i].strip()]
        rows = next((r for r in (1, 8) if len(order) <= r), self.rows)
        batches: list[tuple[int, list[int]]] = []
        while order:
            length = bucket_length(len(encoded[order[0]]), self.model.config.max_length)
            fitting = [i for i in order[:rows] if len(encoded[i]) <= length]
            order = order[len(fitting) :]
            batches.append((length, fitting))
        for length, group in itertools.groupby(batches, key=lambda batch: batch[0]):
            members = [fitting for _, fitting in group]
            sources = (self._pad([encoded[i] for i in fitting], rows, length) for fitting in members)
            for fitting, found in zip(
                members, search_all(self.model, sources, **self._options(length)), strict=True
            ):
                for i, ids, size in zip(fitting, found.tokens, found.lengths, strict=False):
                    translations[i] = self.tokenizer.decode([ids[0, : size[0]]])[0]
        return translations

    def align(self, text: str, translation: str | None = None) -> Alignment:
        """The translation of one sentence with its cross-attention.

        Args:
          text: the sentence.
          translation: whose alignment to show; None: the model's own.

        Raises:
          UserError: an empty sentence, one longer than the model's limit, or a model without attention.
        """
        for given in (text, translation):
            if given is not None and not given.strip():
                raise UserError("an empty sentence has no alignment: give some text")
        if not getattr(self.model, "attends", True):
            raise UserError("this model has no attention, and so no alignment to show")
        limit = self.model.config.max_length
        (ids,) = self.encode([text])
        length = bucket_length(len(ids), limit)
        source = self._pad([ids], 1, length)
        if translation is None:
            (found,) = search_all(self.model, [source], **self._options(length), return_weights=True)
            assert found.weights is not None, "asked for"
            target = found.tokens[0, 0, : int(found.lengths[0, 0])].tolist()
            weights = np.asarray(found.weights)[0, 0]
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
        # Rows to spare repeat a sentence: an empty one might never end and hold up the batch.
        return pad(ids + [ids[-1]] * (rows - len(ids)), rows, length)

    def _options(self, length: int) -> dict[str, Any]:
        most = longest_target(length, self.model.config.max_length)
        return dict(max_length=most, beam_size=self.beam_size, alpha=self.alpha)
