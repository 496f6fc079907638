"""Sentence embeddings from contrastive pairs: a text's vector is nearest to its partner's in a batch."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import pretrained
from transformer_jax.data.batches.example_batches import Example, ExampleBatches, bucket_lengths
from transformer_jax.data.batches.token_batches import Batch
from transformer_jax.data.corpora.tables import Table, concatenate, read_table
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import number_scores
from transformer_jax.evaluation.partners import partner_scores
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.layers.text_pooling import POOLINGS, pool, scale_to_unit_length
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import EncodedSplit, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.trained import TrainedEncoder, check_tokens, inputs_of
from transformer_jax.training.config import RunConfig, Start, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.run_folder import is_run, read_config
from transformer_jax.training.task import TaskEntry

COLUMNS = ("sentence1", "sentence2", "score")


@dataclasses.dataclass(frozen=True)
class SentenceEmbeddingConfig(FineTuningConfig):
    """A `FineTuningConfig` for .tsv or .tsv.gz files with a header: pairs of texts that belong together.

    The columns are sentence1 and sentence2, and optionally score, the similarity of the pair.

    Raises:
      UserError: A value is out of range, or see `FineTuningConfig`.
    """

    pooling: str = "mean"
    """How the states of a text become a vector: mean, first or max; defaults to the pooling of the start."""
    temperature: float = 0.05
    """Divisor of the cosine similarities."""
    min_score: float = 0.0
    """Minimum score of a pair to train on; 4 keeps the paraphrases of STS-B."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)
        if self.temperature <= 0:
            raise UserError(f"`temperature` {self.temperature} must be above 0")
        if self.corpus:
            raise UserError("`corpus` is for texts with one label: name pairs with `train`")


def started_pooling(folder: str) -> str:
    """Return the pooling of a start folder; "mean" if the folder does not name one.

    Raises:
      UserError: The folder names an unknown pooling, or has dense layers after it.
    """
    path = pathlib.Path(folder)
    if pretrained.is_published(path):
        # The import of safetensors takes time.
        from transformer_jax.pretrained.sentence_modules import dense_layers, sentence_settings

        if dense_layers(path):
            raise UserError(f"{path}: Dense modules cannot be trained: start from another folder")
        return sentence_settings(path).get("pooling", "mean")
    return read_config(path)["run"]["task"].get("pooling", "mean") if is_run(path) else "mean"


def _started_limit(starts: Sequence[Start]) -> int | None:
    """Return the maximum length of a text that a published start folder sets, or None."""
    if not starts or not pretrained.is_published(pathlib.Path(starts[0].folder)):
        return None
    from transformer_jax.pretrained.sentence_modules import sentence_settings

    return sentence_settings(pathlib.Path(starts[0].folder)).get("max_length")


def _default_task(starts: Sequence[Start]) -> SentenceEmbeddingConfig:
    return SentenceEmbeddingConfig(pooling=started_pooling(starts[0].folder) if starts else "mean")


class InBatchNegatives(Objective):
    """Cross-entropy of each text's partner among all partners of the batch, in both directions.

    The loss (Reimers & Gurevych 2019; Henderson et al. 2017, section 4.4) is not a sum over rows. Two texts are
    no negatives if they are equal, or a pair anywhere in the batch: `text_id` and `text_id_2` (B,) number the
    texts.
    """

    additive = False

    def __init__(self, pooling: str, temperature: float):
        self.pooling, self.temperature = pooling, temperature

    def loss(self, model, extra, batch, key):
        """Return the sum of the losses and the number of pairs."""
        first_key, second_key = jax.random.split(key)
        first = self._vectors(model, batch, "", first_key)
        second = self._vectors(model, batch, "_2", second_key)
        logits = jnp.einsum("id,jd->ij", first, second) / self.temperature
        compared = ~related(batch["text_id"], batch["text_id_2"]) | jnp.eye(len(first), dtype=bool)
        logits = jnp.where(compared, logits, jnp.finfo(logits.dtype).min)
        partner = jnp.arange(len(first))
        losses = (cross_entropy(logits, partner) + cross_entropy(logits.T, partner)) / 2
        return {"loss": losses.sum()}, {"loss": batch["weight"].sum()}

    def _vectors(self, model: Any, batch: Mapping[str, jax.Array], suffix: str, key: jax.Array) -> jax.Array:
        side = {name: batch[name + suffix] for name in ("tokens", "types", "segments")}
        return vectors_of(model, side, self.pooling, dropout_key=key)


def related(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return (B, B) whether first text i and second text j are equal, or a pair of the batch in either order.

    Args:
      first: (B,) numbers of the first texts.
      second: (B,) numbers of the second texts.
    """
    equal = first[:, None] == second[None]
    # If i and k have equal first texts, and k and j equal second texts, then pair k joins text i and text j.
    paired = _compose(first[:, None] == first[None], second[:, None] == second[None])
    paired_in_reverse = _compose(equal, equal)
    return equal | paired | paired_in_reverse


def _compose(left: jax.Array, right: jax.Array) -> jax.Array:
    """Return whether any k has `left` (i, k) and `right` (k, j); accelerators do not multiply booleans."""
    return left.astype(jnp.float32) @ right.astype(jnp.float32) > 0


def vectors_of(
    model: Any, batch: Mapping[str, jax.Array], pooling: str, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Compute the vectors (B, D) of length 1 of the texts of a batch."""
    states = model.hidden_states(**inputs_of(model, batch), dropout_key=dropout_key)
    return scale_to_unit_length(pool(states, batch["segments"] > 0, pooling))


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Build the loss.

    Raises:
      UserError: Values contradict each other.
    """
    fine_tuning.check(config, model_config)
    return InBatchNegatives(config.task.pooling, config.task.temperature)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's longest batch."""
    first = fine_tuning.abstract_batch(config, text_id=((), jnp.int32))
    return first | {f"{name}_2": first[name] for name in ("tokens", "types", "segments", "text_id")}


class PairBatches(ExampleBatches):
    """Batches of first texts, and of their partners under names that end in "_2"; a batch is always full."""

    def __init__(self, first: Sequence[Example], second: Sequence[Example], *arguments: Any, **options: Any):
        super().__init__(first, *arguments, **options)
        self._second = second
        self._second_sizes = np.array([len(example.tokens) for example in second])
        self.batches_per_epoch = max(1, len(first) // self.batch_size)

    def _draw_order(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.examples))
        order = np.resize(order, max(len(order), self.batch_size))
        return [order[n * self.batch_size :][: self.batch_size] for n in range(self.batches_per_epoch)]

    def __getitem__(self, step: SupportsIndex) -> Batch:
        epoch, number = divmod(int(step), self.batches_per_epoch)
        rows = self._order(epoch)[number]
        batch: Batch = {}
        for suffix, examples, sizes in (
            ("", self.examples, self._sizes),
            ("_2", self._second, self._second_sizes),
        ):
            length = int(self.lengths[np.searchsorted(self.lengths, sizes[rows].max())])
            side = self._stack([examples[n] for n in rows], self.batch_size, length)
            batch |= {name if name == "weight" else name + suffix: value for name, value in side.items()}
        if self._local_rows is not None and not self._local_rows.all():
            for values in batch.values():
                values[~self._local_rows] = 0
        return batch


class SentenceEmbedding(FineTuned):
    """The task with its data opened."""

    unit = "pairs"
    rows_named = "pairs"
    texts_per_row = 2

    def __init__(self, config: RunConfig, splits: Sequence[Any], tokenizer: EncoderTokenizer, *rest: Any):
        has_scores = "score" in splits[1].columns
        self.best = ("valid_spearman", "max") if has_scores else ("valid_accuracy", "max")
        super().__init__(config, splits, tokenizer, *rest)

    def make_batches(self, examples: Sequence[Example]) -> ExampleBatches:
        """Make batches of all pairs of the training split."""
        config, count = self._config, len(examples) // 2
        lengths = bucket_lengths([len(example.tokens) for example in examples], config.model.max_length)
        return PairBatches(
            examples[:count], examples[count:], config.task.batch_size, lengths, config.seed,
            pad=self.processor.pad,
        )  # fmt: skip

    def encode(self, split: str, data: Table) -> EncodedSplit:
        """Encode all first texts, then all second texts, with a number for each distinct text."""
        encodings: list[EncodedText] = []
        for name in COLUMNS[:2]:
            texts = [self.processor.prompt() + text for text in data.columns[name]]
            side = self.processor.encode_batch(texts, max_length=self.model_config.max_length)
            check_tokens(side, data.location)
            encodings += side
        # Texts of equal tokens are equal for the model.
        numbers: dict[bytes, int] = {}
        examples = [
            Example(e.ids, e.types, {"text_id": numbers.setdefault(e.ids.tobytes(), len(numbers))})
            for e in encodings
        ]
        return EncodedSplit(examples, sum(e.truncated for e in encodings))

    def outputs(self, model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Compute the vectors of the texts."""
        return vectors_of(model, batch, self._config.task.pooling)

    def scores(self, name: str, outputs: Sequence[Any]) -> Iterator[tuple[str, float]]:
        """Yield the correlations with scores, if the data has scores, and how often partners are nearest."""
        first, second = np.split(np.stack(outputs), 2)
        columns = self._data[name].columns
        if "score" in columns:
            yield from number_scores((first * second).sum(axis=1), [float(x) for x in columns["score"]])
        yield from partner_scores(first, second, *(columns[side] for side in COLUMNS[:2]))


def _read_pairs(path: str) -> Table:
    table = read_table(path, COLUMNS)
    for name in COLUMNS[:2]:
        if name not in table.columns:
            raise UserError(f"{path}: no column {name}")
        for row, text in enumerate(table.columns[name]):
            if not text.strip():
                raise UserError(f"{table.location(row)}: the text has no tokens")
    for row, text in enumerate(table.columns.get("score", ())):
        try:
            finite = math.isfinite(float(text))
        except ValueError:
            finite = False
        if not finite:
            raise UserError(f"{table.location(row)}: the score {text!r} is not a number")
    return table


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the data and make batches; see `TaskEntry.prepare`."""
    task: SentenceEmbeddingConfig = config.task
    tables = fine_tuning.read_splits(task, _read_pairs, concatenate)

    def above_least_score(table: Table) -> Table:
        scores = table.columns.get("score")
        if scores is None:
            if task.min_score > 0:
                raise UserError(f"{table.path}: no column score, which `min_score` {task.min_score} needs")
            return table
        return table.select([n for n, score in enumerate(scores) if float(score) >= task.min_score])

    def make() -> SentenceEmbedding:
        splits = fine_tuning.split_tables(task, tables, above_least_score)
        train = splits[0]
        if train.rows < task.batch_size:
            raise UserError(
                f"{train.path}: fewer pairs than `batch_size` {task.batch_size}: a batch compares its own texts"
            )

        def all_texts() -> Iterator[str]:
            return (text for name in COLUMNS[:2] for text in train.columns[name])

        tokenizer = fine_tuning.make_tokenizer(
            config, all_texts, stored, starts, (), pooling=task.pooling, normalize=True,
            max_length=config.model.max_length,
        )  # fmt: skip
        return SentenceEmbedding(config, splits, tokenizer, mesh, note)

    return on_every_process(make)


ENTRY = TaskEntry(
    "sentence_embedding",
    SentenceEmbeddingConfig,
    "encoder",
    {"fine_tune": fine_tuning.make_recipe("encoder", _default_task, limit=_started_limit)},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedEncoder,
    check_mesh=fine_tuning.check_mesh,
)
