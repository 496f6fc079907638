"""Language modeling: text, a causal decoder, and what a trained one can do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.token_batches import (
    Batch,
    PackedDocuments,
    Rows,
    StreamWindows,
    TokenBatches,
    TokenizedDocuments,
    validation_windows,
)
from transformer_jax.data.corpora import texts
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.generation import Sampling
from transformer_jax.decoding.text_generation import Generated, TextGenerator
from transformer_jax.distributed.mesh import check_rows, check_tokens, place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.layers.losses import cross_entropy_in_parts
from transformer_jax.models.registry import DECODERS
from transformer_jax.training.config import (
    FREE,
    Optimization,
    RunConfig,
    check_accumulation,
    check_at_least,
    choose,
)
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import Files, TaskEntry, Trained, processor_of, shared_processor
from transformer_jax.training.totals import Totals

# Tokens of the validation text that a sample begins with, if no other beginning is named.
_SAMPLE_PROMPT = 4


@dataclasses.dataclass(frozen=True)
class LanguageModelingConfig:
    """Which text is learned, how it is cut into rows, and how samples are made.

    Raises:
      UserError: a value out of range, or values that contradict each other.
    """

    text: tuple[str, ...] = ()
    """Text to train on: files, or folders of .txt files, plain or .gz; without it `corpus`."""
    valid: tuple[str, ...] = ()
    """Text to validate on, as `text`; without it a tenth of the text is held out."""
    corpus: str = "python"
    """python, the language reference that ships with every Python, or tfds:NAME, any set of TensorFlow
    Datasets with texts. Ignored if `text` names files."""
    splits: tuple[str, str] = ("train", "validation")
    """Training and validation split of a tfds: corpus, in its syntax: train[:98%] ..."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    tokenizer: str = "bpe"
    """char (a token for each character), bpe (byte-level, trained on the text), or the file of a published
    one: tokenizer.json, NAME.tiktoken, or a folder that holds tokenizer.json or vocab.json and merges.txt."""
    packing: Literal["stream", "documents"] = "stream"
    """Rows are windows of one long stream, or complete documents that do not see each other."""
    context: int = 128
    """Tokens of a row T."""
    batch_size: int = 16
    """Rows of a batch B."""
    sample: str | None = dataclasses.field(default=None, metadata=FREE)
    """Beginning of the samples that are made while training; None: the first words of the validation text."""
    sample_tokens: int = dataclasses.field(default=48, metadata=FREE)
    """Tokens of a sample; 0 for none."""

    def __post_init__(self) -> None:
        if self.valid and not self.text:
            raise UserError("`valid` needs `text`")
        named = not self.text and self.corpus.startswith("tfds:")
        if not self.text and self.corpus != "python" and not named:
            raise UserError(
                f"unknown corpus {self.corpus!r}: write python or tfds:NAME, or name files with `text`"
            )
        if not self.corpus.startswith("tfds:") and self.data_dir is not None:
            raise UserError("`data_dir` is for a corpus tfds:NAME")
        check_at_least(self, context=1, batch_size=1, sample_tokens=0)


# Constants of Adam in GPT-3 (Brown et al. 2020, appendix B).
_ADAM: dict[str, Any] = dict(b1=0.9, b2=0.95, epsilon=1e-8)
_LEARNING: dict[str, dict[str, Any]] = {
    "gpt": dict(optimizer="adam", learning_rate=3e-3, weight_decay=0.1),
    "llama": dict(optimizer="adam", learning_rate=3e-3, weight_decay=0.1),
    "modern_gpt": dict(optimizer="muon", learning_rate=5e-3, weight_decay=0.0),
    "lstm": dict(optimizer="adam", learning_rate=5e-3, weight_decay=0.0),
    "gru": dict(optimizer="adam", learning_rate=5e-3, weight_decay=0.0),
}


def text(*, model: str = "gpt", preset: str = "mini", steps: int = 1_000, context: int = 128) -> RunConfig:
    """A small decoder on any text; the model gives optimizer and learning rate."""
    choose("model", model, tuple(DECODERS))
    choose("preset", preset, DECODERS[model].presets)
    share = max(1, steps)
    return RunConfig(
        task=LanguageModelingConfig(context=context),
        model=DECODERS[model].preset(preset, 1_024, max_length=context),
        optimization=Optimization(
            steps=steps, schedule="cosine", warmup=100, save_every=max(1, share // 10),
            evaluate_every=max(1, share // 5), **_ADAM, **_LEARNING[model],
        ),
        recipe="text",
        preset=preset,
    )  # fmt: skip


def next_token_loss(model: Any, batch: Mapping[str, jax.Array], dropout_key: jax.Array | None = None):
    """Sums over a batch of `TokenBatches`: (negative log-likelihood in nats, number of tokens predicted)."""
    states = model.hidden_states(batch["tokens"], segments=batch.get("segments"), dropout_key=dropout_key)
    parts = model.compute.loss_parts_of(*batch["tokens"].shape, model.config.vocab_size)
    _, likelihood, weight = cross_entropy_in_parts(
        model.logits, states, batch["targets"], batch["weights"], parts=parts
    )
    return likelihood, weight


class NextToken(Objective):
    """Cross-entropy of each next token."""

    def loss(self, model, extra, batch, key):
        total, weight = next_token_loss(model, batch, key)
        return {"loss": total}, {"loss": weight}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    task: LanguageModelingConfig = config.task
    if model_config.max_length < task.context:
        raise UserError(f"`max_length` {model_config.max_length} is below `context` {task.context}")
    check_accumulation(task.batch_size, config.optimization)
    return NextToken()


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Checks that the rows and tokens of a batch can be sharded over the mesh.

    Raises:
      UserError: they cannot.
    """
    task: LanguageModelingConfig = config.task
    check_rows(task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)
    check_tokens(task.context, mesh, "`context`")


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    task: LanguageModelingConfig = config.task
    shape = (task.batch_size, task.context)
    kinds: dict[str, Any] = dict(tokens=jnp.int32, targets=jnp.int32, weights=jnp.float32)
    if task.packing == "documents":
        kinds["segments"] = jnp.int32
    return {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}


def load_texts(task: LanguageModelingConfig) -> texts.TextCorpus:
    """The documents that a config names.

    Raises:
      UserError: see `files_corpus` and `tfds_corpus`.
    """
    if task.text:
        return texts.files_corpus(task.text, task.valid)
    if task.corpus.startswith("tfds:"):
        return texts.tfds_corpus(task.corpus, task.splits, task.data_dir)
    return texts.python_reference()


def make_tokenizer(config: RunConfig, corpus: texts.TextCorpus) -> TextTokenizer:
    """The tokenizer that a config names, trained on the corpus if it is "char" or "bpe".

    Raises:
      UserError: see `TextTokenizer`.
    """
    name = config.task.tokenizer
    if name == "char":
        # Of both splits: a character that only the validation text has must be readable.
        return TextTokenizer.characters([*corpus.train, *corpus.valid])
    if name == "bpe":
        return TextTokenizer.byte_pairs(corpus.train, config.model.vocab_size)
    return TextTokenizer.open(name)


_validation_loss = jax.jit(next_token_loss)


def evaluate(
    model: Any, batches: Sequence[Batch], text_bytes: int, mesh: Mesh | None = None
) -> Iterator[tuple[str, float]]:
    """Scores of a model on tokens that are each predicted once.

    Args:
      model: a causal decoder.
      batches: from `validation_windows` or `TokenBatches`.
      text_bytes: size of their text in UTF-8.
      mesh: that the model is sharded over, or None.

    Yields:
      (name, value): `valid_loss` in nats a token, `valid_perplexity`, and `valid_bits_per_byte`, which
      compares between tokenizers.
    """
    totals = [_validation_loss(model, place_batch(batch, mesh)) for batch in batches]
    likelihood = sum(float(total) for total, _ in totals)
    loss = likelihood / max(1.0, sum(float(weight) for _, weight in totals))
    yield "valid_loss", loss
    yield "valid_perplexity", math.exp(min(loss, 80.0))
    yield "valid_bits_per_byte", likelihood / math.log(2) / max(1, text_bytes)


def _one_epoch(rows: Rows, batch_size: int) -> list[Batch]:
    """Every row once, in order; the last batch is filled up with rows of weight 0."""
    order = np.sort(rows.epoch(np.random.default_rng(0)))
    batches = []
    for begin in range(0, len(order), batch_size):
        own = order[begin : begin + batch_size]
        batch = rows.batch(np.resize(own, batch_size))
        batch["weights"][len(own) :] = 0
        batches.append(batch)
    return batches


class LanguageModeling:
    """The task with its text opened; see `training.task.Task`.

    Raises:
      UserError: a text shorter than a row, or a beginning of samples that the tokenizer cannot read.
    """

    best: tuple[str, Literal["min", "max"]] = ("valid_loss", "min")
    unit = "tokens"

    def __init__(
        self,
        config: RunConfig,
        corpus: texts.TextCorpus,
        tokenizer: TextTokenizer,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: LanguageModelingConfig = config.task
        self._config, self._mesh, self._note = config, mesh, note
        self.processor = tokenizer
        self.model_config = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
        self.files: Files = {}
        self.fingerprint = corpus.fingerprint()
        train, self._valid = (TokenizedDocuments(split, tokenizer) for split in (corpus.train, corpus.valid))
        stream = self._valid.stream()
        rows: Rows
        if task.packing == "documents":
            rows = PackedDocuments(train, task.context, config.seed)
            packed = PackedDocuments(self._valid, task.context, config.seed)
            self._valid_batches = _one_epoch(packed, task.batch_size)
        else:
            rows = StreamWindows(train.stream(), task.context)
            self._valid_batches = list(validation_windows(stream, task.context, task.batch_size))
        here = rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        self.batches = TokenBatches(rows, task.batch_size, config.seed).share(here)
        self.about = f"{task.packing} {task.batch_size} x {task.context}"
        self._begin, self._sample_tokens = self._sample_of(task)
        note(
            f"{len(train.tokens):,} tokens of {len(corpus.train):,} document(s) for training, "
            f"{len(self._valid.tokens):,} of {len(corpus.valid):,} for validation, "
            f"vocabulary {tokenizer.vocab_size:,}"
        )

    def _sample_of(self, task: LanguageModelingConfig) -> tuple[str, int]:
        """What samples begin with, and how many tokens they have; 0 for none."""
        begin = task.sample
        if begin is None:
            (begin,) = self.processor.decode([self._valid.tokens[:_SAMPLE_PROMPT].tolist()])
        try:
            (ids,) = self.processor.encode_prompts([begin])
        except UserError as error:
            raise UserError(f"`sample`: {error}") from None
        room = self.model_config.max_length - len(ids)
        return begin, min(task.sample_tokens, room) if begin and ids else 0

    def _sample(self, model: Any) -> str:
        """A text of the model, or "" for none."""
        if self._sample_tokens < 1:
            return ""
        generator = TextGenerator(model, self.processor)
        seed, most = self._config.seed, self._sample_tokens
        return generator([self._begin], max_new_tokens=most, seed=seed)[0][0].text

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        yield from evaluate(model, self._valid_batches, self._valid.text_bytes, self._mesh)
        if sample := self._sample(model):
            self._note("sample: " + " ".join(sample.split()))

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        scores = dict(evaluate(kept_model, self._valid_batches, self._valid.text_bytes, self._mesh))
        results = {
            "validation_loss": scores["valid_loss"],
            "perplexity": scores["valid_perplexity"],
            "bits_per_byte": scores["valid_bits_per_byte"],
            "tokens_per_second": totals.weight / max(totals.seconds, 1e-9),
            "tokens": totals.weight,
        }
        sample = self._sample(kept_model)
        return results, [*(["", sample, ""] if sample else []), *(
            f"validation loss {scores['valid_loss']:.4f} nats a token",
            f"perplexity {scores['valid_perplexity']:.2f}",
            f"bits per byte {scores['valid_bits_per_byte']:.3f}",
        )]  # fmt: skip


def prepare(
    config: RunConfig,
    objective: Objective,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> LanguageModeling:
    """Opens the text, makes or reads the tokenizer, and makes batches; see `TaskEntry.prepare`."""
    corpus = on_first_then_every_process(lambda: load_texts(config.task))

    def make() -> TextTokenizer:
        if stored is not None:
            return TextTokenizer.from_files(stored)
        given = processor_of(starts)
        return make_tokenizer(config, corpus) if given is None else given

    tokenizer = shared_processor(TextTokenizer, make)
    return on_every_process(lambda: LanguageModeling(config, corpus, tokenizer, mesh, note))


class TrainedLanguageModel(Trained):
    """A language model from a run or a published folder."""

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 100,
        samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[list[Generated]]:
        """Continuations of each prompt, see `TextGenerator`.

        Args:
          prompts: any number of texts.
          max_new_tokens, samples, seed, stop: see `TextGenerator.__call__`.
          **sampling: see `Sampling`.

        Raises:
          UserError: a prompt that is empty or too long, or a value out of range.
        """
        generator = TextGenerator(self.model, self.processor, sampling=Sampling(**sampling))
        return generator(prompts, max_new_tokens=max_new_tokens, samples=samples, seed=seed, stop=stop)


ENTRY = TaskEntry(
    "language_modeling",
    LanguageModelingConfig,
    "decoder",
    {"text": text},
    TextTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedLanguageModel,
    check_mesh=check_mesh,
    decodes=True,
)
