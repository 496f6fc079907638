"""Shared parts of the fine-tuning tasks of text encoders: labeled data, splits, batches and recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.example_batches import Example, ExampleBatches, bucket_lengths
from transformer_jax.data.corpora.held_out import held_out, sample_rows
from transformer_jax.data.corpora.tables import Table, fingerprint
from transformer_jax.data.corpora.text_groups import equal_rows, group_numbers
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.mesh import check_reach, check_rows, rows_here
from transformer_jax.distributed.processes import on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.encoder_batches import EncoderRunner
from transformer_jax.tasks.encoders.sizes import check_lowercase, choose_encoder, fit_to_tokenizer
from transformer_jax.tasks.encoders.trained import check_no_classes, predicted
from transformer_jax.training.config import (
    FREE,
    Optimization,
    RunConfig,
    Start,
    check_accumulation,
    check_at_least,
    field_names,
)
from transformer_jax.training.task import Files, processor_of, shared_processor
from transformer_jax.training.totals import Totals

# A pair of texts has up to four special tokens.
_MIN_LENGTH = 8
_SPLIT_NAMES = {"train": "training", "valid": "validation", "test": "test"}


@dataclasses.dataclass(frozen=True)
class FineTuningConfig:
    """Data of a fine-tuning run and its batch size.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    train: tuple[str, ...] = ()
    """Files to train on."""
    valid: tuple[str, ...] = ()
    """Files to validate on; without them, `held_out` of the training set."""
    test: tuple[str, ...] = ()
    """Files to score the trained model on; without them, the validation set."""
    corpus: str = ""
    """tfds:NAME, a set of TensorFlow Datasets to read instead of `train`."""
    splits: tuple[str, str] = ("train", "validation")
    """Training and validation split of a tfds: corpus, in the syntax of TFDS."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of the TFDS sets; None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    examples: int = 0
    """Number of training examples to draw once and use; 0 uses all."""
    held_out: float = 0.1
    """Share of the training set to hold out if `valid` names no files."""
    batch_size: int = 32
    """Number of examples in a batch B."""
    lowercase: bool = True
    """Fold case and accents in a vocabulary that is trained from scratch."""

    def __post_init__(self) -> None:
        if self.corpus and not self.corpus.startswith("tfds:"):
            raise UserError(f"unknown corpus {self.corpus!r}: write tfds:NAME, or name files with `train`")
        if self.corpus and self.train:
            raise UserError("`corpus` and `train` contradict each other: give one of them")
        if not self.corpus and (self.data_dir is not None or self.splits != FineTuningConfig.splits):
            raise UserError("`data_dir` and `splits` are for a corpus tfds:NAME")
        if (self.valid or self.test) and not self.train:
            raise UserError("`valid` and `test` need `train`")
        if self.valid and self.held_out != FineTuningConfig.held_out:
            raise UserError("`valid` and `held_out` contradict each other: give one of them")
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        check_at_least(self, batch_size=1, examples=0)


def make_recipe(
    kind: str,
    make_task: Callable[[Sequence[Start]], FineTuningConfig],
    *,
    default_length: int = 128,
    has_pooler: Callable[[str, Any], bool] = lambda name, config: False,
    limit: Callable[[Sequence[Start]], int | None] = lambda starts: None,
) -> Callable[..., RunConfig]:
    """Build the recipe of a task.

    Args:
      kind: Kind of the models, a key of `MODELS`.
      make_task: Function from the starts to the task's config.
      default_length: Default of the recipe's maximum length of a text in tokens.
      has_pooler: Function from the model's name and config to whether the new model has a pooler; not called
        for models without the option.
      limit: Function from the starts to the maximum length of a text that they set, or None.
    """

    def fine_tune(
        *,
        start: tuple[str, ...] = (),
        model: str = "",
        preset: str = "",
        steps: int = 500,
        max_length: int | None = None,
    ) -> RunConfig:
        """Fine-tune an encoder, or train one from scratch.

        Args:
          start: Folder to start from.
          model: Name of the model; "" means that of the start.
          preset: Size of a model that is trained from scratch.
          steps: Number of steps.
          max_length: Maximum length of a text in tokens; None means the task's default, and for a longformer
            all that it reads.
        """
        starts = Start.parse_all(start)
        task = make_task(starts)
        name, config, preset = choose_encoder(kind, starts, model=model, preset=preset, max_length=max_length)
        if max_length is None:
            max_length = config.max_length if name == "longformer" else default_length
        longest = min(max_length, limit(starts) or max_length, config.max_length)
        changes: dict[str, Any] = {"max_length": longest}
        if "pooler" in field_names(config):
            changes["pooler"] = has_pooler(name, config)
        return RunConfig(
            task=task,
            model=dataclasses.replace(config, **changes),
            # Devlin et al. 2019, appendix A.3, with the bias correction that they omit (Mosbach et al. 2021).
            optimization=Optimization(
                steps=steps, schedule="linear", warmup=max(1, steps // 10), b1=0.9, b2=0.999, epsilon=1e-6,
                learning_rate=5e-5 if starts else 5e-4, weight_decay=0.01, keep="best",
                save_every=max(1, steps // 5), evaluate_every=max(1, steps // 5),
            ),
            start=starts,
            recipe="fine_tune",
            preset=preset,
        )  # fmt: skip

    return fine_tune


def check(config: RunConfig, model_config: Any, *, classifies: bool = False) -> None:
    """Check a config across its parts.

    Args:
      config: The run's config.
      model_config: The model's config.
      classifies: The head predicts classes of a text, as opposed to tokens, spans or vectors.

    Raises:
      UserError: `max_length` is too small, or values contradict each other.
    """
    if model_config.max_length < _MIN_LENGTH:
        raise UserError(
            f"`max_length` {model_config.max_length} is below {_MIN_LENGTH}: special tokens leave no room for "
            "a text"
        )
    if not classifies:
        check_no_classes(model_config)
    check_lowercase(config)
    check_accumulation(config.task.batch_size, config.optimization)


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Check that the mesh divides the rows of a batch, and long rows into parts of a window.

    Raises:
      UserError: The mesh does not.
    """
    check_rows(config.task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)
    check_reach(config.model, config.model.max_length, mesh, "`max_length`")


def abstract_batch(
    config: RunConfig, **targets: tuple[tuple[int, ...], Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's longest batch.

    Args:
      config: The run's config.
      **targets: Shape without the batch axis and dtype of each target.
    """
    B, T = config.task.batch_size, config.model.max_length
    shapes = {name: jax.ShapeDtypeStruct((B, T), jnp.int32) for name in ("tokens", "types", "segments")}
    shapes["weight"] = jax.ShapeDtypeStruct((B,), jnp.float32)
    return shapes | {name: jax.ShapeDtypeStruct((B, *shape), dtype) for name, (shape, dtype) in targets.items()}


def read_splits(
    task: FineTuningConfig,
    read_file: Callable[[str], Any],
    join: Callable[[list[Any]], Any],
    read_tfds: Callable[[str, str, str | None], Any] | None = None,
) -> list[Any]:
    """Read the training, validation and test data, first in the first process; absent data is None.

    Args:
      task: The task's config.
      read_file: Function from the path of a file to its data.
      join: Function that joins the data of several files.
      read_tfds: Function from the corpus, a split and `data_dir` to the split's data.

    Raises:
      UserError: No files are named, or a file or corpus cannot be read.
    """

    def read() -> list[Any]:
        if read_tfds is not None and task.corpus:
            return [*(read_tfds(task.corpus, split, task.data_dir) for split in task.splits), None]
        if not task.train:
            raise UserError("name the examples to train on with `train`")
        splits = (task.train, task.valid, task.test)
        return [join([read_file(path) for path in paths]) if paths else None for paths in splits]

    return on_first_then_every_process(read)


def split_tables(
    task: FineTuningConfig, tables: Sequence[Any], used: Callable[[Table], Table] = lambda table: table
) -> list[Any]:
    """Hold out validation rows if their table is absent, and draw `examples` of the training rows.

    Rows that share a sentence, such as a sentence and its phrases, are held out together; so are equal pairs of
    sentences, and equal lists of words.

    Args:
      task: The task's config.
      tables: Training, validation and test table.
      used: Function that selects the rows to train on from those that are not held out.
    """
    train, valid, test = tables
    if valid is None:
        columns = train.columns
        if "sentence" in columns:
            groups = group_numbers(columns["sentence"])
        else:
            inputs = [columns[name] for name in ("sentence1", "sentence2", "tokens") if name in columns]
            groups = equal_rows(inputs) if inputs else np.arange(train.rows)
        kept, held = held_out(groups, task.held_out)
        train, valid = train.select(kept), train.select(held)
    train = used(train)
    return [train.select(sample_rows(train.rows, task.examples)), valid, test]


class EncodedSplit(NamedTuple):
    """Encoded examples of one split.

    Attributes:
      examples: Inputs of the model with their targets.
      truncated: Number of texts that were longer than the model's limit.
    """

    examples: list[Example]
    truncated: int


class FineTuned:
    """A fine-tuning task with its tables and tokenizer loaded, a `training.task.Task`.

    A subclass defines `encode` and `scores`, and may override `best`, `classes`, `make_batches`, `outputs` and
    the attributes below.

    Attributes:
      ignored: Padding of targets that have a value for each token, by name; see `stacked`.
      rows_named: Name of the rows of a batch in messages.
      texts_per_row: Number of encoded texts in a row of a batch.
      select: See `ExampleBatches`.
      rows_per_step: Mean number of filled rows in a batch; the last batch of an epoch may be partly filled.

    Raises:
      UserError: The data is malformed.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_accuracy", "max")
    unit = "examples"
    ignored: Mapping[str, Any] = {}
    rows_named = "examples"
    texts_per_row = 1
    select: Callable[[Example, np.random.Generator], Example] | None = None

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Any],
        tokenizer: EncoderTokenizer,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: FineTuningConfig = config.task
        self._config, self._mesh, self.processor = config, mesh, tokenizer
        self.model_config = fit_to_tokenizer(config, tokenizer)
        classes = self.classes(tokenizer)
        if config.model.classes not in (0, classes):
            raise UserError(f"`classes` {config.model.classes}: the data has {classes}; leave it out")
        if classes:
            self.model_config = dataclasses.replace(self.model_config, classes=classes)
        self.files: Files = {}
        self.fingerprint = fingerprint(data.columns if isinstance(data, Table) else data for data in splits)
        train, valid, test = splits
        self._data = {"valid": valid} if test is None else {"valid": valid, "test": test}
        self._encoded: dict[str, EncodedSplit] = {}
        for split, data in {"train": train, **self._data}.items():
            encoded = self._encoded[split] = self.encode(split, data)
            if encoded.truncated:
                note(
                    f"{encoded.truncated:,} of {len(encoded.examples):,} {_SPLIT_NAMES[split]} texts are "
                    f"longer than {config.model.max_length} tokens and were truncated"
                )
        batches = self.make_batches(self._encoded["train"].examples)
        here = rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        self.batches = batches.share(here)
        self._runner = EncoderRunner(self.outputs, pad=tokenizer.pad, mesh=mesh)
        rows = {split: len(part.examples) // self.texts_per_row for split, part in self._encoded.items()}
        self.rows_per_step = min(rows["train"] / batches.batches_per_epoch, task.batch_size)
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} {self.rows_named} a batch, {epochs:.1f} epochs"
        counts = ", ".join(f"{count:,} for {_SPLIT_NAMES[split]}" for split, count in rows.items())
        note(f"{self.rows_named}: {counts}")

    def make_batches(self, examples: Sequence[Example]) -> ExampleBatches:
        """Make batches of all rows of the training split."""
        config, limit = self._config, self._config.model.max_length
        lengths = bucket_lengths([min(len(example.tokens), limit) for example in examples], limit)
        return ExampleBatches(
            examples, config.task.batch_size, lengths, config.seed,
            pad=self.processor.pad, ignored=self.ignored, select=self.select,
        )  # fmt: skip

    def classes(self, tokenizer: EncoderTokenizer) -> int:
        """Return the head's number of classes C; 0 if the head has none."""
        return 0

    def encode(self, split: str, data: Any) -> EncodedSplit:
        """Encode the data of the split "train", "valid" or "test"."""
        raise NotImplementedError

    def outputs(self, model: Any, batch: Mapping[str, jax.Array]) -> Any:
        """Compute the outputs that `scores` reads."""
        return predicted(model, batch)

    def scores(self, name: str, outputs: Sequence[Any]) -> Iterator[tuple[str, float]]:
        """Yield (metric, value) from the model's outputs for each example of the split `name`."""
        raise NotImplementedError

    def examples(self, name: str) -> list[Example]:
        """Return the encoded examples of the split "train", "valid" or "test"."""
        return self._encoded[name].examples

    def evaluate(self, model: Any, name: str) -> dict[str, float]:
        """Score a model on the split "valid" or "test"."""
        outputs = self._runner(self._runner.prepare(model), self.examples(name))
        return dict(self.scores(name, outputs))

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield (metric, value) of the validation set."""
        for name, value in self.evaluate(model, "valid").items():
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on the test set if there is one, and on the validation set."""
        split = "test" if "test" in self._data else "valid"
        scores = self.evaluate(kept_model, split)
        validation = self.evaluate(kept_model, "valid") if split == "test" else {}
        results = {
            **scores,
            **{f"validation_{name}": value for name, value in validation.items()},
            "split": split,
            # The weight of the loss may count words instead of examples.
            "examples_per_second": self._config.optimization.steps
            * self.rows_per_step
            / max(totals.seconds, 1e-9),
        }
        return results, [f"{name.replace('_', ' ')} {value:.2f}" for name, value in scores.items()]


def make_tokenizer(
    config: RunConfig,
    texts: Callable[[], Iterator[str]],
    stored: Files | None,
    starts: Sequence[Any],
    labels: Sequence[str],
    *,
    allow_more_labels: bool = False,
    **settings: Any,
) -> EncoderTokenizer:
    """Read the tokenizer of the run or the start, or train one, and add labels; the same in every process.

    Args:
      config: The run's config.
      texts: Function that returns the texts to train a tokenizer on.
      stored: Files of the existing run, or None.
      starts: Opened start folders.
      labels: Labels of the data.
      allow_more_labels: Keep a start's labels if they include all labels of the data, instead of only if they
        are the same.
      **settings: Settings of the task to store with the tokenizer.

    Raises:
      UserError: The start's vocabulary lacks special tokens, or see `EncoderTokenizer`.
    """

    def make() -> EncoderTokenizer:
        tokenizer = processor_of(starts)
        if tokenizer is None:
            tokenizer = EncoderTokenizer.wordpiece(
                texts(), config.model.vocab_size, lowercase=config.task.lowercase
            )
        elif not isinstance(tokenizer, EncoderTokenizer):
            raise UserError("`start`: its vocabulary lacks begin, end and mask tokens, which an encoder needs")
        # The start's head depends on the order of the start's labels.
        known, needed = set(tokenizer.labels), set(labels)
        keeps_labels = labels and (needed <= known if allow_more_labels else needed == known)
        # Vectors of texts are trained and used with the default prompt of the start.
        names = ("prompts", "default_prompt_name", "include_prompt", "similarity")
        kept = names if "pooling" in settings else ()
        prompts = {name: tokenizer.settings[name] for name in kept if name in tokenizer.settings}
        return tokenizer.with_labels(tokenizer.labels if keeps_labels else labels, **settings, **prompts)

    return shared_processor(EncoderTokenizer, make, stored)
