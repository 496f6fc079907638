"""What the pretraining tasks of text encoders share: their text, tokenizer, rows, and masks."""

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
from transformer_jax.data.batches.token_batches import Batch
from transformer_jax.data.corpora import texts
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.mesh import check_rows, check_tokens, place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.tasks.encoders.sizes import check_lowercase, chosen_encoder, vocabulary_size
from transformer_jax.tasks.encoders.trained import check_no_classes
from transformer_jax.training.config import (
    FREE,
    Optimization,
    RunConfig,
    Start,
    check_accumulation,
    check_at_least,
)
from transformer_jax.training.objective import Sums
from transformer_jax.training.task import Files, processor_of, shared_processor
from transformer_jax.training.totals import Totals

# Batches of the validation text that are read at most: 50 of 32 x 128 tokens have 30,000 masked words.
_VALIDATED = 50
_SPLITS = ("train", "validation")


@dataclasses.dataclass(frozen=True)
class PretrainingConfig:
    """Which text is read, how it is cut into rows, and which of its words are predicted.

    Raises:
      UserError: a value out of range, or values that contradict each other.
    """

    text: tuple[str, ...] = ()
    """Text to train on: files, or folders of .txt files, plain, .gz or .xz; an empty line ends a document.
    Without it `corpus`."""
    valid: tuple[str, ...] = ()
    """Text to validate on, as `text`; without it a tenth of the documents is held out."""
    corpus: str = "python"
    """python, the language reference that ships with every Python, or tfds:NAME, any set of TensorFlow
    Datasets with texts. Ignored if `text` names files."""
    splits: tuple[str, str] = _SPLITS
    """Training and validation split of a tfds: corpus, in its syntax: train[:98%] ..."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    tokenizer: str = "wordpiece"
    """wordpiece or bpe (byte-level), trained on the text, or the file or folder of a published one:
    tokenizer.json, vocab.txt, or vocab.json and merges.txt."""
    lowercase: bool = True
    """Fold case and accents in a wordpiece vocabulary that is trained."""
    context: int = 128
    """Tokens of a row T."""
    batch_size: int = 32
    """Rows of a batch B."""
    mask_rate: float = 0.15
    """Share of the tokens that are predicted."""
    whole_words: bool = False
    """All pieces of a word are predicted together, or none."""

    def __post_init__(self) -> None:
        if self.valid and not self.text:
            raise UserError("`valid` needs `text`")
        if not self.text and self.corpus != "python" and not self.corpus.startswith("tfds:"):
            raise UserError(
                f"unknown corpus {self.corpus!r}: write python or tfds:NAME, or name files with `text`"
            )
        others = self.data_dir is not None or self.splits != _SPLITS
        if others and (self.text or not self.corpus.startswith("tfds:")):
            raise UserError("`data_dir` and `splits` are for a corpus tfds:NAME")
        if not self.lowercase and self.tokenizer not in ("wordpiece", "bpe"):
            raise UserError(
                f"`lowercase` is for a vocabulary that is trained, and {self.tokenizer} brings its own: leave "
                "it out"
            )
        if not 0 < self.mask_rate < 1:
            raise UserError(f"`mask_rate` {self.mask_rate} must be above 0 and below 1")
        check_at_least(self, context=8, batch_size=1)


def encoder(
    kind: str,
    start: Sequence[str],
    *,
    model: str,
    preset: str,
    context: int,
    leave_out: Sequence[str] = (),
) -> tuple[str, Any, str, tuple[Start, ...]]:
    """(name, config, preset, starts) of the model of a recipe; see `chosen_encoder`.

    Args:
      start: text forms of starts.
      context: tokens of a row, for which a model from nothing has positions.
    """
    starts = Start.every(start)
    name, config, preset = chosen_encoder(kind, starts, model=model, preset=preset, leave_out=leave_out)
    if not starts:
        config = dataclasses.replace(config, max_length=max(context, 128))
    return name, config, preset, starts


def optimization(steps: int, starts: Sequence[Start]) -> Optimization:
    """Of BERT and ELECTRA at small sizes (Clark et al. 2020, table 6), at a tenth of the rate from a start."""
    return Optimization(
        steps=steps, schedule="linear", warmup=max(1, min(10_000, steps // 10)),
        learning_rate=5e-5 if starts else 5e-4, b1=0.9, b2=0.999, epsilon=1e-6, weight_decay=0.01,
        save_every=max(1, steps // 10), evaluate_every=max(1, steps // 5),
    )  # fmt: skip


def check(config: RunConfig, model_config: Any) -> None:
    """Checks across the parts of a config.

    Raises:
      UserError: values that contradict each other.
    """
    task: PretrainingConfig = config.task
    if model_config.max_length < task.context:
        raise UserError(f"`max_length` {model_config.max_length} is below `context` {task.context}")
    check_no_classes(model_config)
    if getattr(model_config, "classes", 0):
        raise UserError(f"`classes` {model_config.classes}: pretraining has none; leave it out")
    check_lowercase(config)
    check_accumulation(task.batch_size, config.optimization)


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Checks that the rows and tokens of a batch can be sharded over the mesh.

    Raises:
      UserError: they cannot.
    """
    task: PretrainingConfig = config.task
    check_rows(task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)
    check_tokens(task.context, mesh, "`context`")


def abstract_batch(config: RunConfig, *, pairs: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    task: PretrainingConfig = config.task
    B, T, K = task.batch_size, task.context, Masking(rate=task.mask_rate).places(task.context)
    kinds: dict[str, tuple[tuple[int, ...], Any]] = dict(
        tokens=((B, T), jnp.int32),
        segments=((B, T), jnp.int32),
        positions=((B, K), jnp.int32),
        labels=((B, K), jnp.int32),
        weights=((B, K), jnp.float32),
    )
    if pairs:
        kinds |= dict(types=((B, T), jnp.int32), next_label=((B,), jnp.int32), next_weight=((B,), jnp.float32))
    return {name: jax.ShapeDtypeStruct(*kind) for name, kind in kinds.items()}


def load_texts(task: PretrainingConfig) -> texts.TextCorpus:
    """The documents that a config names.

    Raises:
      UserError: see `parted_corpus` and `tfds_corpus`.
    """
    if task.text:
        return texts.parted_corpus(task.text, task.valid)
    if task.corpus.startswith("tfds:"):
        return texts.tfds_corpus(task.corpus, task.splits, task.data_dir)
    return texts.python_reference()


def make_tokenizer(config: RunConfig, corpus: texts.TextCorpus) -> EncoderTokenizer:
    """The tokenizer that a config names, trained on the corpus if it is "wordpiece" or "bpe".

    Raises:
      UserError: see `EncoderTokenizer`.
    """
    task: PretrainingConfig = config.task
    if task.tokenizer == "wordpiece":
        return EncoderTokenizer.wordpiece(corpus.train, config.model.vocab_size, lowercase=task.lowercase)
    if task.tokenizer == "bpe":
        return EncoderTokenizer.byte_pairs(corpus.train, config.model.vocab_size)
    return EncoderTokenizer.open(task.tokenizer)


class Pretraining:
    """A pretraining task with its text opened; see `training.task.Task`.

    A subclass says what is evaluated: `measured` gives sums and weights of a batch, `shown` the names in
    `results.json`.

    Raises:
      UserError: a text that is too short.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_loss", "min")
    unit = "rows"
    # Of the chosen words, those that become the mask token and a random one.
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
        self._config, self._mesh = config, mesh
        self.processor = tokenizer
        changes: dict[str, Any] = {"vocab_size": vocabulary_size(config, tokenizer)}
        if hasattr(config.model, "padding_id"):
            changes["padding_id"] = tokenizer.pad
        self.model_config = dataclasses.replace(config.model, **changes)
        self.files: Files = {}
        self.fingerprint = corpus.fingerprint()
        train = EncodedDocuments(corpus.train, tokenizer, "training text")
        valid = EncodedDocuments(corpus.valid, tokenizer, "validation text")
        masking = Masking(task.mask_rate, *self.shares, whole_words=task.whole_words)
        options: dict[str, Any] = dict(tokenizer=tokenizer, masking=masking)
        rows = self._rows(train)
        batches = MaskedBatches(rows, task.batch_size, config.seed, **options)
        here = rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        self.batches = batches.share(here)
        held = self._rows(valid)
        every = MaskedBatches(held, task.batch_size, 0, **options)
        self._valid_batches = list(every.once(_VALIDATED))
        scored = _VALIDATED * task.batch_size
        self._filled = rows.filled
        if rows.left_out:
            note(f"{rows.left_out:,} document(s) are too short to have a next sentence and are left out")
        self._measured = jax.jit(self.measured)
        self.about = f"{task.batch_size} x {task.context}, {100 * (1 - rows.filled):.1f} % padding"
        note(
            f"{len(train.tokens):,} tokens of {len(corpus.train):,} document(s) for training, "
            f"{len(valid.tokens):,} of {len(corpus.valid):,} for validation, "
            f"vocabulary {tokenizer.vocab_size:,}"
        )
        if scored < (rows_held := len(held.once())):
            note(f"{scored:,} of the validation text's {rows_held:,} rows are scored")

    def _rows(self, documents: EncodedDocuments) -> PackedPieces | SentencePairs:
        task: PretrainingConfig = self._config.task
        return PackedPieces(documents, task.context, self._config.seed, self.processor)

    @staticmethod
    def measured(model: Any, batch: Mapping[str, jax.Array]) -> tuple[Sums, Sums]:
        """Sums and weights of a validation batch by name, without dropout."""
        raise NotImplementedError

    def evaluate(self, model: Any, batches: Sequence[Batch] | None = None) -> dict[str, float]:
        """The means over the validation text, by name."""
        totals: dict[str, list[float]] = {}
        for batch in self._valid_batches if batches is None else batches:
            sums, weights = self._measured(model, place_batch(batch, self._mesh))
            for name, value in sums.items():
                own = totals.setdefault(name, [0.0, 0.0])
                own[0] += float(value)
                own[1] += float(weights[name])
        return {name: value / max(1.0, weight) for name, (value, weight) in totals.items()}

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        for name, value in self.evaluate(model).items():
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        task: PretrainingConfig = self._config.task
        found = self.evaluate(kept_model)
        tokens = totals.weight * task.context * self._filled
        results = {
            "validation_loss": found.pop("loss"),
            **found,
            "tokens_per_second": tokens / max(totals.seconds, 1e-9),
            "tokens": tokens,
        }
        shown = [
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in results.items()
            if not name.startswith("tokens")
        ]
        return results, shown


def prepare(
    kind: type[Pretraining],
    config: RunConfig,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> Pretraining:
    """Opens the text, makes or reads the tokenizer, and makes batches; see `TaskEntry.prepare`."""
    corpus = on_first_then_every_process(lambda: load_texts(config.task))

    def make() -> EncoderTokenizer:
        if stored is not None:
            return EncoderTokenizer.from_files(stored)
        given = processor_of(starts)
        if given is not None and config.task.tokenizer != PretrainingConfig.tokenizer:
            raise UserError(
                f"`tokenizer` {config.task.tokenizer}: a start brings its own, on which its parameters depend"
            )
        return make_tokenizer(config, corpus) if given is None else given.with_labels(())

    tokenizer = shared_processor(EncoderTokenizer, make)
    return on_every_process(lambda: kind(config, corpus, tokenizer, mesh, note))
