"""Shared parts of the pretraining tasks of text encoders: text, tokenizer, rows, masks and recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from transformer_jax.data.batches.masked_batches import (
    EncodedDocuments,
    MaskedBatches,
    Masking,
    PackedPieces,
    SentencePairs,
)
from transformer_jax.data.corpora import texts
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.mesh import place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.tasks.encoders.sizes import check_lowercase, choose_encoder, fit_to_tokenizer
from transformer_jax.tasks.encoders.trained import check_no_classes
from transformer_jax.tasks.text_data import TextDataConfig, check_context, load_texts
from transformer_jax.training.config import Optimization, RunConfig, Start, check_at_least
from transformer_jax.training.objective import Objective, Sums
from transformer_jax.training.task import Files, processor_of, shared_processor
from transformer_jax.training.totals import Totals

# Maximum number of validation batches: 50 of 32 x 128 tokens have 30,000 masked tokens.
_VALIDATION_BATCHES = 50


@dataclasses.dataclass(frozen=True)
class PretrainingConfig(TextDataConfig):
    """Text of a pretraining, and how it is split into rows and masked.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    tokenizer: str = "wordpiece"
    """wordpiece or bpe (byte-level), trained on the text, or the file or folder of a published tokenizer:
    tokenizer.json, vocab.txt, or vocab.json and merges.txt."""
    lowercase: bool = True
    """Fold case and accents in a wordpiece vocabulary that is trained from scratch."""
    batch_size: int = 32
    """Rows per batch B."""
    mask_rate: float = 0.15
    """Share of the tokens to predict."""
    whole_word_masking: bool = False
    """Predict all pieces of a word together, or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lowercase and self.tokenizer not in ("wordpiece", "bpe"):
            raise UserError(
                f"`lowercase` is for a vocabulary that is trained, and {self.tokenizer} brings its own: leave "
                "it out"
            )
        if not 0 < self.mask_rate < 1:
            raise UserError(f"`mask_rate` {self.mask_rate} must be above 0 and below 1")
        check_at_least(self, context=8)


def make_recipe(
    kind: str,
    complete: Callable[[str, Any, Sequence[Start], int], tuple[PretrainingConfig, Any]],
    *,
    excluded: Sequence[str] = (),
) -> Callable[..., RunConfig]:
    """Build the recipe of a task.

    Args:
      kind: Kind of the models, a key of `MODELS`.
      complete: Function (model name, its config, starts, context) -> (task config, model config).
      excluded: Names of models of the kind that the task does not train.
    """

    def text(
        *,
        start: tuple[str, ...] = (),
        model: str = "",
        preset: str = "",
        steps: int = 1_000,
        context: int = 128,
    ) -> RunConfig:
        """Pretrain a small encoder on any text, or continue to pretrain one."""
        starts = Start.parse_all(start)
        name, config, preset = choose_encoder(kind, starts, model=model, preset=preset, excluded=excluded)
        if not starts:
            config = dataclasses.replace(config, max_length=max(context, 128))
        task, config = complete(name, config, starts, context)
        return RunConfig(
            task=task,
            model=config,
            # BERT and ELECTRA at small sizes (Clark et al. 2020, table 6); a tenth of the rate for a start.
            optimization=Optimization(
                steps=steps, schedule="linear", warmup=max(1, min(10_000, steps // 10)),
                learning_rate=5e-5 if starts else 5e-4, b1=0.9, b2=0.999, epsilon=1e-6, weight_decay=0.01,
                save_every=max(1, steps // 10), evaluate_every=max(1, steps // 5),
            ),
            start=starts,
            recipe="text",
            preset=preset,
        )  # fmt: skip

    return text


def check(config: RunConfig, model_config: Any) -> None:
    """Check a config across its parts.

    Raises:
      UserError: Values contradict each other.
    """
    check_context(config, model_config)
    check_no_classes(model_config)
    if getattr(model_config, "classes", 0):
        raise UserError(f"`classes` {model_config.classes}: pretraining has none; leave it out")
    check_lowercase(config)


def abstract_batch(config: RunConfig, *, pairs: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's batches.

    Args:
      config: The run's config.
      pairs: Rows are pairs of texts, labeled with whether the second follows the first.
    """
    task: PretrainingConfig = config.task
    B, T, K = task.batch_size, task.context, Masking(rate=task.mask_rate).max_targets(task.context)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = dict(
        tokens=((B, T), jnp.int32),
        segments=((B, T), jnp.int32),
        positions=((B, K), jnp.int32),
        labels=((B, K), jnp.int32),
        weights=((B, K), jnp.float32),
    )
    if pairs:
        shapes |= dict(types=((B, T), jnp.int32), next_label=((B,), jnp.int32), next_weight=((B,), jnp.float32))
    return {name: jax.ShapeDtypeStruct(*shape_and_dtype) for name, shape_and_dtype in shapes.items()}


def make_tokenizer(config: RunConfig, corpus: texts.TextCorpus) -> EncoderTokenizer:
    """Open the tokenizer that a config names, or train "wordpiece" or "bpe" on the corpus.

    Raises:
      UserError: See `EncoderTokenizer`.
    """
    task: PretrainingConfig = config.task
    if task.tokenizer == "wordpiece":
        return EncoderTokenizer.wordpiece(corpus.train, config.model.vocab_size, lowercase=task.lowercase)
    if task.tokenizer == "bpe":
        return EncoderTokenizer.byte_pairs(corpus.train, config.model.vocab_size)
    return EncoderTokenizer.open(task.tokenizer)


class Pretraining:
    """A pretraining task with its text and tokenizer loaded, a `training.task.Task`.

    A subclass defines `sums_and_weights`, and may override `best` and the attributes below.

    Attributes:
      compared: Metric that is reported as the loss, because it is comparable between objectives.
      shares: Shares of the selected tokens that are replaced by the mask token and by a random token.

    Raises:
      UserError: The text is too short.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_loss", "min")
    unit = "rows"
    compared: str
    shares: tuple[float, float] = (0.8, 0.1)

    def __init__(
        self,
        config: RunConfig,
        corpus: texts.TextCorpus,
        tokenizer: EncoderTokenizer,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: PretrainingConfig = config.task
        self._config, self._mesh, self.processor = config, mesh, tokenizer
        self.model_config = fit_to_tokenizer(config, tokenizer)
        self.files: Files = {}
        self.fingerprint = corpus.fingerprint()
        train = EncodedDocuments(corpus.train, tokenizer, "training text")
        valid = EncodedDocuments(corpus.valid, tokenizer, "validation text")
        masking = Masking(task.mask_rate, *self.shares, whole_word_masking=task.whole_word_masking)
        options: dict[str, Any] = dict(tokenizer=tokenizer, masking=masking)
        rows, valid_rows = self._rows(train), self._rows(valid)
        here = rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        self.batches = MaskedBatches(rows, task.batch_size, config.seed, **options).share(here)
        valid_batches = MaskedBatches(valid_rows, task.batch_size, 0, **options)
        self._valid_batches = list(valid_batches.once(_VALIDATION_BATCHES))
        self._filled = rows.filled
        if rows.left_out:
            note(f"{rows.left_out:,} document(s) are too short to have a next sentence and are left out")
        self._sums_and_weights = jax.jit(self.sums_and_weights)
        self.about = f"{task.batch_size} x {task.context}, {100 * (1 - rows.filled):.1f} % padding"
        note(
            f"{len(train.tokens):,} tokens of {len(corpus.train):,} document(s) for training, "
            f"{len(valid.tokens):,} of {len(corpus.valid):,} for validation, "
            f"vocabulary {tokenizer.vocab_size:,}"
        )
        scored, available = _VALIDATION_BATCHES * task.batch_size, len(valid_rows.once())
        if scored < available:
            note(f"{scored:,} of the validation text's {available:,} rows are scored")

    def _rows(self, documents: EncodedDocuments) -> PackedPieces | SentencePairs:
        return PackedPieces(documents, self._config.task.context, self._config.seed, self.processor)

    @staticmethod
    def sums_and_weights(model: Any, batch: Mapping[str, jax.Array]) -> tuple[Sums, Sums]:
        """Compute the sum and weight of each metric of a validation batch, without dropout."""
        raise NotImplementedError

    def evaluate(self, model: Any) -> dict[str, float]:
        """Compute the mean of each metric over the validation text."""
        totals: dict[str, list[float]] = {}
        for batch in self._valid_batches:
            sums, weights = self._sums_and_weights(model, place_batch(batch, self._mesh))
            for name, value in sums.items():
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += float(value)
                total[1] += float(weights[name])
        means = {name: value / max(1.0, weight) for name, (value, weight) in totals.items()}
        means["loss"] = means.pop(self.compared)
        return means

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield (metric, mean) of the validation text."""
        for name, value in self.evaluate(model).items():
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on the validation text, and measure the throughput."""
        means = self.evaluate(kept_model)
        tokens = totals.weight * self._config.task.context * self._filled
        results = {
            "validation_loss": means.pop("loss"),
            **means,
            "tokens_per_second": tokens / max(totals.seconds, 1e-9),
            "tokens": tokens,
        }
        lines = [
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in results.items()
            if not name.startswith("tokens")
        ]
        return results, lines


def prepare(
    task_type: type[Pretraining],
    config: RunConfig,
    objective: Objective,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> Pretraining:
    """Open the text, make or read the tokenizer, and make batches; see `TaskEntry.prepare`."""
    corpus = on_first_then_every_process(lambda: load_texts(config.task, texts.paragraphs_corpus))

    def make() -> EncoderTokenizer:
        tokenizer = processor_of(starts)
        if tokenizer is None:
            return make_tokenizer(config, corpus)
        if config.task.tokenizer != PretrainingConfig.tokenizer:
            raise UserError(
                f"`tokenizer` {config.task.tokenizer}: a start brings its own, which its parameters depend on; "
                "leave it out"
            )
        return tokenizer.with_labels(())

    tokenizer = shared_processor(EncoderTokenizer, make, stored)
    return on_every_process(lambda: task_type(config, corpus, tokenizer, mesh, note))
