"""Translation: training an encoder-decoder on sentence pairs, and translating and aligning with it."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.encoded_pairs import EncodedPairs, token_lengths
from transformer_jax.data.batches.pair_batches import Bucket, TranslationBatches, choose_buckets, packed_bucket
from transformer_jax.data.corpora import parallel
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.decoding.translator import Alignment, Translator
from transformer_jax.distributed.mesh import check_rows, place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import bleu_signature, translation_scores
from transformer_jax.models.translators.hard_attention import HardAttentionConfig
from transformer_jax.tasks.translators.config import TranslationConfig
from transformer_jax.tasks.translators.hard_attention import HardAttentionTraining
from transformer_jax.tasks.translators.objective import TokenLoss, token_loss
from transformer_jax.tasks.translators.recipes import RECIPES
from transformer_jax.training.config import RunConfig
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import Files, TaskEntry, Trained, processor_of, shared_processor
from transformer_jax.training.totals import Totals

_VALIDATION_PHRASES, _TEST_PHRASES = 500, 1_000
# Number of validation sentences to translate during training; the loss uses all.
_TRANSLATED_WHILE_TRAINING = 200
_LENGTHS = "lengths.npy"


def load_corpus(config: RunConfig) -> parallel.Corpus:
    """Load the pairs of a config.

    Raises:
      UserError: See `files_corpus`, `tfds_corpus` and `PhraseBook`.
    """
    task: TranslationConfig = config.task
    if config.recipe == "multi30k" and not task.train:
        raise UserError("the recipe multi30k trains on files: name them with `train`, `valid` and `test`")
    if task.train:
        return parallel.files_corpus(task.train, task.valid, task.test)
    if task.corpus.startswith("tfds:"):
        return parallel.tfds_corpus(task.corpus, task.direction, task.splits, task.data_dir)
    return parallel.phrases_corpus(task.corpus, task.phrases, _VALIDATION_PHRASES, _TEST_PHRASES, config.seed)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config: policy gradients for hard attention, else cross-entropy.

    Raises:
      UserError: Values contradict each other.
    """
    task: TranslationConfig = config.task
    if model_config.max_length < 8:
        raise UserError(f"`max_length` {model_config.max_length} is below 8")
    if isinstance(model_config, HardAttentionConfig):
        if task.r_drop:
            raise UserError(
                "`r_drop` needs two passes with the same attention, but hard_attention samples its positions: "
                "leave `r_drop` out"
            )
        return HardAttentionTraining(task.label_smoothing)
    return TokenLoss(task.label_smoothing, task.r_drop)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the largest batch, with rows of full length."""
    task: TranslationConfig = config.task
    accumulation, length = config.optimization.accumulation, config.model.max_length
    rows = max(1, task.batch_tokens // length // accumulation) * accumulation
    names = ["source", "target_in", "target_out"]
    names += ["source_segments", "target_segments"] * (task.batching == "packed")
    return {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in names}


class PreparedPairs:
    """Batches of a corpus.

    Args:
      config: Config of the run.
      corpus: Training, validation and test pairs.
      tokenizer: Tokenizer of both sides.
      note: Receives lines of text with the counts.
      lengths: Lengths of every training pair from an earlier `token_lengths`; None counts them.

    Attributes:
      train: Training batches.
      valid: List of validation batches.
      lengths: Lengths of every training pair.

    Raises:
      UserError: All pairs of a split are empty or too long, or a batch is too small for the longest.
    """

    def __init__(
        self,
        config: RunConfig,
        corpus: parallel.Corpus,
        tokenizer: BytePairTokenizer,
        note: Callable[[str], None],
        lengths: np.ndarray | None = None,
    ):
        task: TranslationConfig = config.task
        limit = config.model.max_length
        if lengths is None or len(lengths) != len(corpus.train):
            if not isinstance(corpus.train, list):
                note(f"counting the tokens of {len(corpus.train):,} pairs, once for this run")
            lengths = token_lengths(corpus.train, tokenizer)
        train = EncodedPairs(
            corpus.train, tokenizer, max_length=limit, dropout=task.bpe_dropout, lengths=lengths
        )
        valid = EncodedPairs(corpus.valid, tokenizer, max_length=limit)
        for split, examples in (("training", train), ("validation", valid)):
            if not len(examples) and not examples.too_long:
                raise UserError(f"no {split} pair has text on both sides")
            if not len(examples):
                raise UserError(f"every {split} pair is longer than `max_length` {limit} tokens: raise it")
        empty = f" ({corpus.empty[2]:,} empty left out)" if corpus.empty[2] else ""
        note(
            f"{_counts(train, corpus.empty[0], limit)} for training, "
            f"{_counts(valid, corpus.empty[1], limit)} for validation, "
            f"{len(corpus.test):,} pairs{empty} for test, vocabulary {tokenizer.vocab_size:,}"
        )
        packed = task.batching == "packed"
        row_lengths = train.lengths.max(axis=1) + 1
        shape: dict[str, int] = dict(row_multiple=config.optimization.accumulation, limit=limit)
        buckets: tuple[Bucket, ...]
        if packed:
            buckets = (packed_bucket(row_lengths, task.batch_tokens, **shape),)
        else:
            buckets = choose_buckets(row_lengths, task.buckets, task.batch_tokens, **shape)
        self.train = TranslationBatches(train, buckets, config.seed, packed=packed)
        valid_length = int(valid.lengths.max()) + 1
        if valid_length > buckets[-1].length:
            # A validation pair is longer than all training pairs, so the batches need one more shape.
            buckets += (Bucket(valid_length, max(1, buckets[-1].rows // 2)),)
        self.valid = list(TranslationBatches(valid, buckets, config.seed, packed=packed).epoch())
        self.lengths = lengths


def _counts(examples: EncodedPairs, empty: int, limit: int) -> str:
    """Return the number of pairs as text, with the numbers of empty and of too long pairs."""
    empty += examples.empty
    reasons = [f"{empty:,} empty"] * (empty > 0)
    reasons += [f"{examples.too_long:,} longer than {limit} tokens"] * (examples.too_long > 0)
    return f"{len(examples):,} pairs" + (f" ({' and '.join(reasons)} left out)" if reasons else "")


class Translation:
    """The translation task with its corpus and tokenizer loaded, a `training.task.Task`.

    Args:
      config: Config of the run.
      corpus: Training, validation and test pairs.
      tokenizer: Tokenizer of both sides.
      pairs: Batches of the corpus.
      mesh: Mesh that batches are sharded over, or None.
      note: Receives lines of text about the test set.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_bleu", "max")
    unit = "target_tokens"

    def __init__(
        self,
        config: RunConfig,
        corpus: parallel.Corpus,
        tokenizer: BytePairTokenizer,
        pairs: PreparedPairs,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        self._config, self._corpus, self._pairs, self._mesh, self._note = config, corpus, pairs, mesh, note
        self.processor = tokenizer
        self.model_config = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
        # Saving the lengths spares a resumed run from reading a large corpus to count them again.
        self.files: Files = {} if isinstance(corpus.train, list) else {_LENGTHS: _npy_bytes(pairs.lengths)}
        self.fingerprint = corpus.fingerprint()
        accumulation = config.optimization.accumulation
        self.batches = pairs.train.share(lambda rows: rows_here(rows, mesh, micro_batches=accumulation))
        shapes = ", ".join(f"{bucket.rows} x {bucket.length}" for bucket in pairs.train.buckets)
        self.about = f"{config.task.batching} {shapes}"
        self._loss = jax.jit(lambda model, batch: token_loss(model, batch, 0.0)[1:])

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the loss and perplexity of all validation pairs, and scores of some greedy translations."""
        totals = [self._loss(model, place_batch(batch, self._mesh)) for batch in self._pairs.valid]
        likelihood = sum(float(total) for total, _ in totals)
        loss = likelihood / max(1.0, sum(float(weight) for _, weight in totals))
        yield "valid_loss", loss
        yield "valid_perplexity", float(np.exp(min(loss, 80.0)))
        pairs = self._corpus.valid[:_TRANSLATED_WHILE_TRAINING]
        translator = Translator(model, self.processor, beam_size=1)
        translations = translator([pair.source for pair in pairs], truncate=True)
        references = [self.processor.clean(pair.target) for pair in pairs]
        tokenize = self._config.task.bleu_tokenize
        for name, value in translation_scores(translations, references, bleu_tokenize=tokenize):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model's translations of the test set; the lines show some of them."""
        task: TranslationConfig = self._config.task
        translator = Translator(kept_model, self.processor, beam_size=task.beam_size, alpha=task.length_penalty)
        sources = [pair.source for pair in self._corpus.test]
        references = [self.processor.clean(pair.target) for pair in self._corpus.test]
        truncated = sum(len(ids) > translator.max_source for ids in self.processor.encode(sources))
        if truncated:
            self._note(f"{truncated} test source(s) were truncated to {translator.max_source} tokens")
        start_time = time.perf_counter()
        translations = translator(sources, truncate=True)
        seconds = time.perf_counter() - start_time
        scores = dict(translation_scores(translations, references, bleu_tokenize=task.bleu_tokenize))
        results = scores | {
            "signature": bleu_signature(references, task.bleu_tokenize),
            "tokens_per_second": totals.weight / max(totals.seconds, 1e-9),
            "target_tokens": totals.weight,
            "test_sentences": len(sources),
            "test_sentences_per_second": len(sources) / seconds,
        }
        lines = []
        rows = list(zip(sources, translations, references, strict=True))
        for source, translation, reference in rows[:: max(1, len(rows) // 8)][:8]:
            lines += ["", f"source       {source}", f"translation  {translation}"]
            lines += [f"reference    {reference}"] * (translation != reference)
        lines += [
            "",
            f"BLEU {scores['bleu']:.2f} ({results['signature']})",
            f"chrF {scores['chrf']:.2f}",
            f"exact match {scores['exact_match']:.1f} % of {len(rows):,} unseen sentences",
        ]
        return results, lines


def _npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def prepare(
    config: RunConfig,
    objective: Objective,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> Translation:
    """Open the corpus, train or read the tokenizer, and make batches; see `TaskEntry.prepare`."""
    corpus = on_first_then_every_process(lambda: load_corpus(config))

    def make_tokenizer() -> BytePairTokenizer:
        if (tokenizer := processor_of(starts)) is not None:
            return tokenizer
        if not isinstance(corpus.train, list):
            note(f"learning the vocabulary of {len(corpus.train):,} pairs")
        texts = (text for pair in corpus.train for text in pair if text)
        return BytePairTokenizer.train(texts, config.model.vocab_size)

    tokenizer = shared_processor(BytePairTokenizer, make_tokenizer, stored)
    lengths = np.load(io.BytesIO(stored[_LENGTHS])) if stored and _LENGTHS in stored else None
    pairs = on_every_process(lambda: PreparedPairs(config, corpus, tokenizer, note, lengths))
    smallest = min(bucket.rows for bucket in pairs.train.buckets) // config.optimization.accumulation
    on_every_process(lambda: check_rows(smallest, mesh, "`batch_tokens`", whole=False))
    return Translation(config, corpus, tokenizer, pairs, mesh, note)


class TrainedTranslator(Trained):
    """A translator from a run or a published folder."""

    def translator(self, *, beam_size: int | None = None, alpha: float | None = None) -> Translator:
        """Return a `Translator` for this model.

        Args:
          beam_size: See `beam_search`; None uses the run's.
          alpha: See `beam_search`; None uses the run's.
        """
        task = TranslationConfig() if self.config is None else self.config.task
        return Translator(
            self.model,
            self.processor,
            beam_size=task.beam_size if beam_size is None else beam_size,
            alpha=task.length_penalty if alpha is None else alpha,
        )

    def translate(
        self, texts: Sequence[str], *, beam_size: int | None = None, alpha: float | None = None
    ) -> list[str]:
        """Translate texts; the translation of an empty text is empty.

        Args:
          texts: List of sentences.
          beam_size: See `translator`.
          alpha: See `translator`.

        Raises:
          UserError: A text is longer than the model's limit.
        """
        return self.translator(beam_size=beam_size, alpha=alpha)(texts)

    def align(
        self,
        text: str,
        translation: str | None = None,
        *,
        beam_size: int | None = None,
        alpha: float | None = None,
    ) -> Alignment:
        """Return a translation of a text with its cross-attention; see `Alignment`.

        Args:
          text: The source sentence.
          translation: Its translation; None uses the model's.
          beam_size: See `translator`.
          alpha: See `translator`.

        Raises:
          UserError: The text is empty or longer than the model's limit.
        """
        return self.translator(beam_size=beam_size, alpha=alpha).align(text, translation)


def default_recipe(values: Mapping[str, Any]) -> str:
    """Return the recipe for values that name none: phrases for the embedded corpus, else files."""
    embedded = not values.get("train") and str(values.get("corpus") or "phrases:").startswith("phrases:")
    return "phrases" if embedded else "files"


ENTRY = TaskEntry(
    "translation",
    TranslationConfig,
    "translator",
    RECIPES,
    BytePairTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedTranslator,
    files=(_LENGTHS,),
    decodes=True,
)
