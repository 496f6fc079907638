"""What the fine-tuning tasks of text encoders share: labelled data, its split, its batches, its recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from transformer_jax.data.batches.example_batches import Example, ExampleBatches, bucket_lengths
from transformer_jax.data.corpora import tables
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.mesh import check_rows, rows_here
from transformer_jax.errors import UserError
from transformer_jax.evaluation.encoder_batches import EncoderRunner
from transformer_jax.tasks.encoders.sizes import check_lowercase, chosen_encoder, vocabulary_size
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

# Tokens of a text at least, of which up to four are special ones of a pair.
_SHORTEST = 8
_SPLITS = ("train", "validation")


@dataclasses.dataclass(frozen=True)
class FineTuningConfig:
    """Which examples are learned, and how they are batched.

    Raises:
      UserError: a value out of range, or values that contradict each other.
    """

    train: tuple[str, ...] = ()
    """Files to train on."""
    valid: tuple[str, ...] = ()
    """Files to validate on; without them a tenth of the training set is held out."""
    test: tuple[str, ...] = ()
    """Files that the trained model is scored on; without them the validation set."""
    corpus: str = ""
    """tfds:NAME, a set of TensorFlow Datasets, in place of `train`."""
    splits: tuple[str, str] = _SPLITS
    """Training and validation split of a tfds: corpus, in its syntax."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    examples: int = 0
    """Number of training examples that are used, drawn once; 0 for all."""
    held_out: float = 0.1
    """Share of the training set that is held out where `valid` names no files."""
    batch_size: int = 32
    """Examples of a batch B."""
    lowercase: bool = True
    """Fold case and accents in a vocabulary that is trained, from nothing."""

    def __post_init__(self) -> None:
        if self.corpus and not self.corpus.startswith("tfds:"):
            raise UserError(f"unknown corpus {self.corpus!r}: write tfds:NAME, or name files with `train`")
        if self.corpus and self.train:
            raise UserError("`corpus` and `train` contradict each other: give one of them")
        if not self.corpus and (self.data_dir is not None or self.splits != _SPLITS):
            raise UserError("`data_dir` and `splits` are for a corpus tfds:NAME")
        if (self.valid or self.test) and not self.train:
            raise UserError("`valid` and `test` need `train`")
        if self.valid and self.held_out != FineTuningConfig.held_out:
            raise UserError("`valid` and `held_out` contradict each other: give one of them")
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        check_at_least(self, batch_size=1, examples=0)


def fine_tuning(
    task: Any,
    kind: str,
    *,
    start: tuple[str, ...],
    model: str,
    preset: str,
    steps: int,
    max_length: int,
    **changes: Any,
) -> RunConfig:
    """The config of a recipe that fine-tunes an encoder, or trains one from nothing.

    Args:
      task: the task's config.
      kind: of its models, a key of `MODELS`.
      start: text forms of starts; the first gives model and sizes.
      model: name of the model; "" is that of the start, or bert.
      preset: size of a model from nothing; "" is mini.
      steps: optimizer steps.
      max_length: longest text in tokens.
      changes: fields of the model's config.

    Raises:
      UserError: a start that holds another model, or one that cannot be read.
      ValueError: an unknown name.
    """
    starts = Start.every(start)
    _, config, preset = chosen_encoder(kind, starts, model=model, preset=preset)
    changes = {name: value for name, value in changes.items() if name in field_names(config)}
    config = dataclasses.replace(config, max_length=min(max_length, config.max_length), **changes)
    return RunConfig(
        task=task,
        model=config,
        # Devlin et al. 2019, appendix A.3, but for the bias correction that they leave out (Mosbach et al.).
        optimization=Optimization(
            steps=steps, schedule="linear", warmup=max(1, steps // 10), b1=0.9, b2=0.999, epsilon=1e-6,
            learning_rate=5e-5 if starts else 5e-4, weight_decay=0.01, keep="best",
            save_every=max(1, steps // 5), evaluate_every=max(1, steps // 5),
        ),
        start=starts,
        recipe="fine_tune",
        preset=preset,
    )  # fmt: skip


def check(config: RunConfig, model_config: Any, *, classifies: bool = False) -> None:
    """Checks across the parts of a config; `classifies` is whether the head has a text's classes.

    Raises:
      UserError: no data is named, or values that contradict each other.
    """
    task: FineTuningConfig = config.task
    if model_config.max_length < _SHORTEST:
        raise UserError(f"`max_length` {model_config.max_length} is below {_SHORTEST}: no text is left of it")
    if not classifies:
        check_no_classes(model_config)
    check_lowercase(config)
    check_accumulation(task.batch_size, config.optimization)


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Checks that the rows of a batch can be sharded over the mesh.

    Raises:
      UserError: they cannot.
    """
    check_rows(config.task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)


def abstract_batch(
    config: RunConfig, **targets: tuple[tuple[int, ...], Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The longest batch of a run; `targets` are shapes behind B with dtypes."""
    B, T = config.task.batch_size, config.model.max_length
    shapes = {name: jax.ShapeDtypeStruct((B, T), jnp.int32) for name in ("tokens", "types", "segments")}
    shapes["weight"] = jax.ShapeDtypeStruct((B,), jnp.float32)
    return shapes | {n: jax.ShapeDtypeStruct((B, *shape), kind) for n, (shape, kind) in targets.items()}


def read_split(task: FineTuningConfig, read: Callable[[str], Any], join: Callable[[list[Any]], Any]) -> Any:
    """(training data, validation data or None, test data or None), as `read` reads a file each.

    Raises:
      UserError: no files are named, or see `read`.
    """
    if not task.train:
        raise UserError("name the examples to train on with `train`")

    def all_of(paths: Sequence[str]) -> Any:
        return join([read(path) for path in paths]) if paths else None

    return all_of(task.train), all_of(task.valid), all_of(task.test)


class Encoded:
    """Examples of one split with their tokens.

    Attributes:
      examples: what the model reads.
      cut: number of texts that were longer than the model takes.
    """

    def __init__(self, examples: Sequence[Example], cut: int):
        self.examples, self.cut = list(examples), cut


class FineTuned:
    """A fine-tuning task with its data opened; see `training.task.Task`.

    A subclass sets `best`, gives `encode` and `scores`, and may set `ignored` (see `stacked`), `rows_named` and
    `texts_per_row`.

    Attributes:
      rows_per_step: mean of the rows of a batch that are filled; the last of an epoch may be a part of one.

    Raises:
      UserError: bad data.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_accuracy", "max")
    unit = "examples"
    ignored: Mapping[str, Any] = {}
    rows_named = "examples"
    texts_per_row = 1

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Any],
        tokenizer: EncoderTokenizer,
        mesh: Mesh | None,
        note: Callable[[str], None],
        fingerprint: str,
    ):
        task: FineTuningConfig = config.task
        self._config, self._mesh, self.processor = config, mesh, tokenizer
        changes: dict[str, Any] = {"vocab_size": vocabulary_size(config, tokenizer)}
        classes = self.classes(tokenizer)
        if config.model.classes not in (0, classes):
            raise UserError(f"`classes` {config.model.classes}: the data has {classes}")
        if classes:
            changes["classes"] = classes
        if hasattr(config.model, "padding_id"):
            changes["padding_id"] = tokenizer.pad
        self.model_config = dataclasses.replace(config.model, **changes)
        self.files: Files = {}
        self.fingerprint = fingerprint
        train, valid, test = splits
        self._data = {"valid": valid, "test": test}
        encoded = self.encode(train, training=True)
        for name, own in (("training", encoded), *self._encoded_others(note)):
            if own.cut:
                note(
                    f"{own.cut:,} of {len(own.examples):,} {name} texts are longer than "
                    f"{config.model.max_length} tokens and were cut"
                )
        batches = self.make_batches(encoded)
        here = rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        self.batches = batches.share(here)
        self._runner = EncoderRunner(self.outputs, pad=tokenizer.pad, mesh=mesh)
        epochs = config.optimization.steps / batches.batches_per_epoch
        rows = len(encoded.examples) // self.texts_per_row / batches.batches_per_epoch
        self.rows_per_step = min(rows, task.batch_size)
        self.about = f"{task.batch_size} {self.rows_named} a batch, {epochs:.1f} epochs"
        counts = {
            "training": encoded,
            "validation": self._encoded["valid"],
            "the test": self._encoded.get("test"),
        }
        shown = [
            f"{len(own.examples) // self.texts_per_row:,} for {name}"
            for name, own in counts.items()
            if own is not None
        ]
        note(f"{self.rows_named}: {', '.join(shown)}")

    def make_batches(self, encoded: Encoded) -> ExampleBatches:
        """Batches of all rows of the training split."""
        examples, config = encoded.examples, self._config
        lengths = bucket_lengths([len(one.tokens) for one in examples], config.model.max_length)
        return ExampleBatches(
            examples, config.task.batch_size, lengths, config.seed,
            pad=self.processor.pad, ignored=self.ignored,
        )  # fmt: skip

    def _encoded_others(self, note: Callable[[str], None]) -> Iterator[tuple[str, Encoded]]:
        self._encoded: dict[str, Encoded] = {}
        for name, data in self._data.items():
            if data is not None:
                self._encoded[name] = self.encode(data, training=False)
                yield name, self._encoded[name]

    def classes(self, tokenizer: EncoderTokenizer) -> int:
        """C of the head; 0 where the head has none."""
        return 0

    def encode(self, data: Any, *, training: bool) -> Encoded:
        """Examples of a split."""
        raise NotImplementedError

    def outputs(self, model: Any, batch: Mapping[str, jax.Array]) -> Any:
        """What `scores` reads of a batch."""
        return predicted(model, batch)

    def scores(self, name: str, outputs: Sequence[Any]) -> Iterator[tuple[str, float]]:
        """Yields (name, value) from what the model predicts of each example of the split `name`."""
        raise NotImplementedError

    def examples(self, name: str) -> list[Example]:
        """What the model reads of a split, "valid" or "test"."""
        return self._encoded[name].examples

    def evaluate(self, model: Any, name: str) -> dict[str, float]:
        """Scores of a model on a split, "valid" or "test"."""
        outputs = self._runner(self._runner.prepared(model), self.examples(name))
        return dict(self.scores(name, outputs))

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        for name, value in self.evaluate(model, "valid").items():
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        split = "valid" if self._data["test"] is None else "test"
        found = self.evaluate(kept_model, split)
        others = {} if split == "valid" else self.evaluate(kept_model, "valid")
        results = {
            **found,
            **{f"validation_{name}": value for name, value in others.items()},
            "split": split,
            # Not the weight of the loss, which may count words.
            "examples_per_second": self._config.optimization.steps
            * self.rows_per_step
            / max(totals.seconds, 1e-9),
        }
        shown = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in found.items()]
        return results, shown


def make_tokenizer(
    config: RunConfig,
    texts: Callable[[], Iterator[str]],
    stored: Files | None,
    starts: Sequence[Any],
    labels: Sequence[str],
    *,
    further: bool = False,
    **settings: Any,
) -> EncoderTokenizer:
    """The tokenizer with its labels: of the run, of the start, or trained on the texts; in every process.

    Args:
      config: of the run.
      texts: to train one on.
      stored: files of the run's own.
      starts: of the run.
      labels: of the data.
      further: a start's labels stay if they have all of the data's among them, not only if they are the same.
      settings: of the task.

    Raises:
      UserError: see `EncoderTokenizer`.
    """

    def make() -> EncoderTokenizer:
        if stored is not None:
            return EncoderTokenizer.from_files(stored)
        given = processor_of(starts)
        if given is None:
            given = EncoderTokenizer.wordpiece(
                texts(), config.model.vocab_size, lowercase=config.task.lowercase
            )
        elif not isinstance(given, EncoderTokenizer):
            raise UserError(
                "`start`: its vocabulary has no tokens for begin, end and mask, which an encoder needs"
            )
        # What is trained on goes on with its own order of the labels; a task without any has none.
        same = set(labels) <= set(given.labels) if further else set(labels) == set(given.labels)
        own = given.labels if labels and same else tuple(labels)
        return given.with_labels(own, **settings)

    return shared_processor(EncoderTokenizer, make)


def fingerprint_of(splits: Sequence[Any]) -> str:
    """Tells the data of a run, tables or questions, from any other."""
    return tables.fingerprint(split.columns if isinstance(split, tables.Table) else split for split in splits)
