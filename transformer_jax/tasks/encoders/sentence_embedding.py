"""Sentence embeddings by contrastive pairs: a text's vector is nearest to its partner's in a batch."""

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
from transformer_jax.data.corpora.tables import Table, joined, read_table
from transformer_jax.data.tokenizers.encoded_text import EncodedText
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import number_scores
from transformer_jax.evaluation.partners import partner_scores
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.layers.text_pooling import POOLINGS, normalised, pooled
from transformer_jax.tasks.encoders import fine_tuning
from transformer_jax.tasks.encoders.fine_tuning import Encoded, FineTuned, FineTuningConfig
from transformer_jax.tasks.encoders.sequence_classification import split_tables
from transformer_jax.tasks.encoders.trained import TrainedEncoder, check_tokens, inputs_of
from transformer_jax.training.config import RunConfig, Start, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.run_folder import is_run, read_config
from transformer_jax.training.task import TaskEntry

COLUMNS = ("sentence1", "sentence2", "score")


@dataclasses.dataclass(frozen=True)
class SentenceEmbeddingConfig(FineTuningConfig):
    """`FineTuningConfig`; files are .tsv or .tsv.gz with a header: sentence1 and sentence2, texts that belong
    together, and in what is validated on perhaps score, how alike they are.

    Raises:
      UserError: a value out of range.
    """

    pooling: str = "mean"
    """How the states of a text become one vector: mean, first or max. By default as the start did."""
    temperature: float = 0.05
    """Cosines are divided by it."""
    least_score: float = 0.0
    """Pairs of the training set whose score is below this are left out; of STS-B 4 keeps paraphrases."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("pooling", self.pooling, POOLINGS)
        if self.temperature <= 0:
            raise UserError(f"`temperature` {self.temperature} must be above 0")
        if self.corpus:
            raise UserError("`corpus` is for texts with one label: name pairs with `train`")


def fine_tune(
    *,
    start: tuple[str, ...] = (),
    model: str = "",
    preset: str = "",
    steps: int = 500,
    max_length: int = 128,
) -> RunConfig:
    """An encoder fine-tuned, or trained from nothing."""
    task = SentenceEmbeddingConfig(pooling=started_pooling(Start.every(start)[0].folder) if start else "mean")
    return fine_tuning.fine_tuning(
        task, "encoder",
        start=start, model=model, preset=preset, steps=steps, max_length=max_length, pooler=False,
    )  # fmt: skip


def started_pooling(folder: str) -> str:
    """How the encoder of a folder pooled its states before; "mean" where the folder says nothing of it.

    Raises:
      UserError: a way of pooling that is not computed here.
    """
    path = pathlib.Path(folder)
    if pretrained.is_published(path):
        from transformer_jax.pretrained.encoder_tables import sentence_settings  # imports safetensors

        return sentence_settings(path).get("pooling", "mean")
    return read_config(path)["run"]["task"].get("pooling", "mean") if is_run(path) else "mean"


class InBatchNegatives(Objective):
    """Cross-entropy of each text's partner among all second texts of the batch, and the other way round
    (Reimers & Gurevych 2019; Henderson et al. 2017, section 4.4). It is no sum over rows.

    Texts that are the same or belong together, in this pair or in another of the batch, are no negatives:
    `text_id` and `text_id_2` (B,) number the texts.
    """

    additive = False

    def __init__(self, pooling: str, temperature: float):
        self.pooling, self.temperature = pooling, temperature

    def loss(self, model, extra, batch, key):
        first_key, second_key = jax.random.split(key)
        first, second = (
            self._vectors(model, batch, side, own) for side, own in (("", first_key), ("_2", second_key))
        )
        logits = jnp.einsum("id,jd->ij", first, second) / self.temperature
        compared = ~related(batch["text_id"], batch["text_id_2"]) | jnp.eye(len(first), dtype=bool)
        logits = jnp.where(compared, logits, jnp.finfo(logits.dtype).min)
        partner = jnp.arange(len(first))
        losses = (cross_entropy(logits, partner) + cross_entropy(logits.T, partner)) / 2
        return {"loss": losses.sum()}, {"loss": batch["weight"].sum()}

    def _vectors(self, model: Any, batch: Mapping[str, jax.Array], side: str, key: jax.Array) -> jax.Array:
        own = {name: batch[name + side] for name in ("tokens", "types", "segments")}
        return vectors_of(model, own, self.pooling, dropout_key=key)


def related(first: jax.Array, second: jax.Array) -> jax.Array:
    """Whether first text i and second text j (B, B) are the same, or a pair of the batch in either order.

    Args:
      first, second: (B,) numbers of the texts.
    """
    across = first[:, None] == second[None]
    # i and k have the same first text, k and j the same second one: pair k is of i's first and j's second.
    as_given = _joined(first[:, None] == first[None], second[:, None] == second[None])
    return across | as_given | _joined(across, across)


def _joined(one: jax.Array, other: jax.Array) -> jax.Array:
    """Whether any k has `one` (i, k) and `other` (k, j); accelerators multiply no booleans."""
    return one.astype(jnp.float32) @ other.astype(jnp.float32) > 0


def vectors_of(
    model: Any, batch: Mapping[str, jax.Array], pooling: str, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Vectors (B, D) of length 1 of the texts of a batch."""
    states = model.hidden_states(**inputs_of(model, batch), dropout_key=dropout_key)
    return normalised(pooled(states, batch["segments"] > 0, pooling))


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    fine_tuning.check(config, model_config)
    return InBatchNegatives(config.task.pooling, config.task.temperature)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The longest batch of a run."""
    own = fine_tuning.abstract_batch(config, text_id=((), jnp.int32))
    return own | {f"{name}_2": own[name] for name in ("tokens", "types", "segments", "text_id")}


class PairBatches(ExampleBatches):
    """Batches of first texts with their partners under names that end in "_2"; a batch is always full."""

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
        epoch, place = divmod(int(step), self.batches_per_epoch)
        numbers = self._order(epoch)[place]
        batch: Batch = {}
        for side, examples, sizes in (
            ("", self.examples, self._sizes),
            ("_2", self._second, self._second_sizes),
        ):
            length = int(self.lengths[np.searchsorted(self.lengths, sizes[numbers].max())])
            own = self._stack([examples[n] for n in numbers], self.batch_size, length)
            batch |= {name if name == "weight" else name + side: value for name, value in own.items()}
        if self._here is not None and not self._here.all():
            for values in batch.values():
                values[~self._here] = 0
        return batch


class SentenceEmbedding(FineTuned):
    """The task with its data opened."""

    best = ("valid_accuracy", "max")
    unit = "pairs"
    rows_named = "pairs"
    texts_per_row = 2

    def __init__(self, config: RunConfig, splits: Sequence[Any], tokenizer: EncoderTokenizer, *rest: Any):
        scored = "score" in splits[1].columns
        self.best = ("valid_spearman", "max") if scored else ("valid_accuracy", "max")
        super().__init__(config, splits, tokenizer, *rest)

    def make_batches(self, encoded: Encoded) -> ExampleBatches:
        examples, config = encoded.examples, self._config
        first, second = examples[: len(examples) // 2], examples[len(examples) // 2 :]
        lengths = bucket_lengths([len(one.tokens) for one in examples], config.model.max_length)
        return PairBatches(first, second, config.task.batch_size, lengths, config.seed, pad=self.processor.pad)

    def encode(self, data: Table, *, training: bool) -> Encoded:
        encodings: list[EncodedText] = []
        for name in COLUMNS[:2]:
            side = self.processor.encode_batch(data.columns[name], max_length=self.model_config.max_length)
            check_tokens(side, data.place)
            encodings += side
        # Texts are the same if the model reads the same.
        numbers: dict[bytes, int] = {}
        examples = [
            Example(e.ids, e.types, {"text_id": numbers.setdefault(e.ids.tobytes(), len(numbers))})
            for e in encodings
        ]
        return Encoded(examples, sum(e.cut for e in encodings))

    def outputs(self, model: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return vectors_of(model, batch, self._config.task.pooling)

    def scores(self, name: str, outputs: Sequence[Any]) -> Iterator[tuple[str, float]]:
        first, second = np.split(np.stack(outputs), 2)
        columns = self._data[name].columns
        if "score" in columns:
            yield from number_scores((first * second).sum(axis=1), [float(x) for x in columns["score"]])
        yield from partner_scores(first, second, *(columns[side] for side in COLUMNS[:2]))


def prepare(config, objective, *, mesh, stored, starts, note):
    """Opens the data and makes batches; see `TaskEntry.prepare`."""
    task: SentenceEmbeddingConfig = config.task

    def read_pairs(path: str) -> Table:
        table = read_table(path, COLUMNS)
        for name in COLUMNS[:2]:
            if name not in table.columns:
                raise UserError(f"{path}: no column {name}")
            for row, text in enumerate(table.columns[name]):
                if not text.strip():
                    raise UserError(f"{table.place(row)}: a text of no tokens")
        for row, text in enumerate(table.columns.get("score", ())):
            try:
                finite = math.isfinite(float(text))
            except ValueError:
                finite = False
            if not finite:
                raise UserError(f"{table.place(row)}: the score {text!r} is not a number")
        return table

    read = on_first_then_every_process(lambda: fine_tuning.read_split(task, read_pairs, joined))

    def make() -> SentenceEmbedding:
        def alike(table: Table) -> Table:
            scores = table.columns.get("score")
            if scores is None:
                if task.least_score > 0:
                    raise UserError(
                        f"{table.path}: no column score, of which `least_score` {task.least_score} is"
                    )
                return table
            return table.taken([n for n, score in enumerate(scores) if float(score) >= task.least_score])

        splits = split_tables(task, read, alike)
        train = splits[0]
        assert train is not None
        if train.rows < task.batch_size:
            raise UserError(
                f"{train.path}: fewer pairs than `batch_size` {task.batch_size}: a batch compares its own texts"
            )

        def texts() -> Iterator[str]:
            return (text for name in COLUMNS[:2] for text in train.columns[name])

        tokenizer = fine_tuning.make_tokenizer(
            config, texts, stored, starts, (), pooling=task.pooling, normalise=True,
            max_length=config.model.max_length,
        )  # fmt: skip
        fingerprint = fine_tuning.fingerprint_of(splits)
        return SentenceEmbedding(config, splits, tokenizer, mesh, note, fingerprint)

    return on_every_process(make)


ENTRY = TaskEntry(
    "sentence_embedding",
    SentenceEmbeddingConfig,
    "encoder",
    {"fine_tune": fine_tune},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedEncoder,
    check_mesh=fine_tuning.check_mesh,
)
