"""Language modeling: training a causal decoder on text, and generating text with it."""

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
from transformer_jax.data.tokenizers.text_tokenizer import SpecialTokens, TextTokenizer
from transformer_jax.decoding.generation import Sampling
from transformer_jax.decoding.text_generation import Generated, TextGenerator
from transformer_jax.distributed.mesh import place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.layers.losses import cross_entropy_in_parts
from transformer_jax.models.registry import DECODERS
from transformer_jax.tasks.text_data import TextDataConfig, check_context, check_mesh, load_texts
from transformer_jax.training.config import FREE, Optimization, RunConfig, check_at_least, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import Files, TaskEntry, Trained, processor_of, shared_processor
from transformer_jax.training.totals import Totals

# Number of tokens of the validation text that start a sample, unless the config names another beginning.
_SAMPLE_PROMPT = 4


@dataclasses.dataclass(frozen=True)
class LanguageModelingConfig(TextDataConfig):
    """Text to train on, its division into rows, and the samples to print during training.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    tokenizer: str = "bpe"
    """char (one token per character), bpe (byte-level, trained on the text), or the path of a published
    tokenizer: tokenizer.json, NAME.tiktoken, or a folder with tokenizer.json or vocab.json and merges.txt."""
    packing: Literal["stream", "documents"] = "stream"
    """stream: rows are windows of all texts joined. documents: rows hold complete documents that do not attend
    to each other."""
    special_tokens: SpecialTokens = "control"
    """Reading of special tokens such as <|endoftext|> in the text and in prompts. control: the tokens that they
    name, as in transformers. text: like other text."""
    sample: str | None = dataclasses.field(default=None, metadata=FREE)
    """Prompt of the samples printed during training; None means the first words of the validation text."""
    sample_tokens: int = dataclasses.field(default=48, metadata=FREE)
    """Tokens per sample; 0 for no samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, sample_tokens=0)


# Constants of Adam in GPT-3 (Brown et al. 2020, appendix B).
_ADAM: dict[str, Any] = dict(b1=0.9, b2=0.95, epsilon=1e-8)
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gpt": dict(optimizer="adam", learning_rate=3e-3, weight_decay=0.1),
    "llama": dict(optimizer="adam", learning_rate=3e-3, weight_decay=0.1),
    "modern_gpt": dict(optimizer="muon", learning_rate=5e-3, weight_decay=0.0),
    "lstm": dict(optimizer="adam", learning_rate=5e-3, weight_decay=0.0),
    "gru": dict(optimizer="adam", learning_rate=5e-3, weight_decay=0.0),
}


def text(*, model: str = "gpt", preset: str = "mini", steps: int = 1_000, context: int = 128) -> RunConfig:
    """Train a small decoder on any text; the model determines the optimizer and its learning rate.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
      context: Tokens per row, and the model's maximum length.
    """
    choose("model", model, tuple(DECODERS))
    choose("preset", preset, DECODERS[model].presets)
    return RunConfig(
        task=LanguageModelingConfig(context=context),
        model=DECODERS[model].preset(preset, 1_024, max_length=context),
        optimization=Optimization(
            steps=steps, schedule="cosine", warmup=100, save_every=max(1, steps // 10),
            evaluate_every=max(1, steps // 5), **_ADAM, **_OPTIMIZERS[model],
        ),
        recipe="text",
        preset=preset,
    )  # fmt: skip


def next_token_loss(model: Any, batch: Mapping[str, jax.Array], dropout_key: jax.Array | None = None):
    """Return the sum over a batch of the negative log-likelihood in nats, and the number of predicted tokens.

    Args:
      model: A causal decoder.
      batch: A batch of `TokenBatches`.
      dropout_key: Key for dropout; None disables it.
    """
    states = model.hidden_states(batch["tokens"], segments=batch.get("segments"), dropout_key=dropout_key)
    parts = model.compute.loss_parts_of(*batch["tokens"].shape, model.config.vocab_size)
    loss, _, weight = cross_entropy_in_parts(
        model.logits, states, batch["targets"], batch["weights"], parts=parts
    )
    return loss, weight


class NextToken(Objective):
    """Cross-entropy of each next token."""

    def loss(self, model, extra, batch, key):
        """Return the sum of the loss and the number of tokens."""
        total, weight = next_token_loss(model, batch, key)
        return {"loss": total}, {"loss": weight}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    check_context(config, model_config)
    return NextToken()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    task: LanguageModelingConfig = config.task
    shape = (task.batch_size, task.context)
    dtypes: dict[str, Any] = dict(tokens=jnp.int32, targets=jnp.int32, weights=jnp.float32)
    if task.packing == "documents":
        dtypes["segments"] = jnp.int32
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def make_tokenizer(config: RunConfig, corpus: texts.TextCorpus) -> TextTokenizer:
    """Open the tokenizer of a config, or train it on the corpus if it is "char" or "bpe".

    Raises:
      UserError: See `TextTokenizer`.
    """
    name = config.task.tokenizer
    if name == "char":
        # The vocabulary must include the characters that occur only in the validation text.
        return TextTokenizer.characters([*corpus.train, *corpus.valid])
    if name == "bpe":
        return TextTokenizer.byte_pairs(corpus.train, config.model.vocab_size)
    return TextTokenizer.open(name)


_validation_loss = jax.jit(next_token_loss)


def evaluate(
    model: Any, batches: Sequence[Batch], text_bytes: int, mesh: Mesh | None = None
) -> Iterator[tuple[str, float]]:
    """Yield the scores of a model on tokens, each predicted once.

    Args:
      model: A causal decoder.
      batches: Batches from `validation_windows` or `TokenBatches`.
      text_bytes: Size of their text in UTF-8.
      mesh: Mesh that the model is sharded over, or None.

    Yields:
      (name, value): `valid_loss` in nats per token, `valid_perplexity`, and `valid_bits_per_byte`, which is
      comparable between tokenizers.
    """
    totals = [_validation_loss(model, place_batch(batch, mesh)) for batch in batches]
    likelihood = sum(float(total) for total, _ in totals)
    loss = likelihood / max(1.0, sum(float(weight) for _, weight in totals))
    yield "valid_loss", loss
    yield "valid_perplexity", math.exp(min(loss, 80.0))
    yield "valid_bits_per_byte", likelihood / math.log(2) / max(1, text_bytes)


def _one_epoch(rows: Rows, batch_size: int) -> list[Batch]:
    """Return batches of all rows in order; rows of weight 0 fill the last batch."""
    order = np.sort(rows.epoch(np.random.default_rng(0)))
    batches = []
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        batch = rows.batch(np.resize(numbers, batch_size))
        batch["weights"][len(numbers) :] = 0
        batches.append(batch)
    return batches


class LanguageModeling:
    """Language modeling with its text and tokenizer loaded, a `training.task.Task`.

    Args:
      config: Config of the run.
      corpus: Training and validation documents.
      tokenizer: Tokenizer of the run.
      mesh: Mesh that batches are sharded over, or None.
      note: Receives lines of text about the data and samples.

    Raises:
      UserError: A text is shorter than a row, or the tokenizer cannot encode the prompt of the samples.
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
        rows: Rows
        if task.packing == "documents":
            rows = PackedDocuments(train, task.context, config.seed)
            valid_rows = PackedDocuments(self._valid, task.context, config.seed)
            self._valid_batches = _one_epoch(valid_rows, task.batch_size)
        else:
            rows = StreamWindows(train.stream(), task.context)
            self._valid_batches = list(validation_windows(self._valid.stream(), task.context, task.batch_size))
        here = rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        self.batches = TokenBatches(rows, task.batch_size, config.seed).share(here)
        self.about = f"{task.packing} {task.batch_size} x {task.context}"
        self._prompt, self._sample_tokens = self._sample_settings(task)
        note(
            f"{len(train.tokens):,} tokens of {len(corpus.train):,} document(s) for training, "
            f"{len(self._valid.tokens):,} of {len(corpus.valid):,} for validation, "
            f"vocabulary {tokenizer.vocab_size:,}"
        )

    def _sample_settings(self, task: LanguageModelingConfig) -> tuple[str, int]:
        """Return the prompt of samples and their number of tokens, which is 0 for no samples."""
        prompt = task.sample
        if prompt is None:
            (prompt,) = self.processor.decode([self._valid.tokens[:_SAMPLE_PROMPT].tolist()])
        try:
            (ids,) = self.processor.encode_prompts([prompt])
        except UserError as error:
            raise UserError(f"`sample`: {error}") from None
        remaining = self.model_config.max_length - len(ids)
        return prompt, min(task.sample_tokens, remaining) if prompt and ids else 0

    def _sample(self, model: Any) -> str:
        """Generate a sample, or return "" if samples are disabled."""
        # A model with a dilated window has no cache to generate with.
        if self._sample_tokens < 1 or getattr(model.config, "dilation", 1) > 1:
            return ""
        generate = TextGenerator(model, self.processor)
        texts = generate([self._prompt], max_new_tokens=self._sample_tokens, seed=self._config.seed)
        return texts[0][0].text

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the scores of the validation text, and note a sample."""
        yield from evaluate(model, self._valid_batches, self._valid.text_bytes, self._mesh)
        if sample := self._sample(model):
            self._note("sample: " + " ".join(sample.split()))

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on the validation text, and generate a sample."""
        scores = dict(evaluate(kept_model, self._valid_batches, self._valid.text_bytes, self._mesh))
        results = {
            "validation_loss": scores["valid_loss"],
            "perplexity": scores["valid_perplexity"],
            "bits_per_byte": scores["valid_bits_per_byte"],
            "tokens_per_second": totals.weight / max(totals.seconds, 1e-9),
            "tokens": totals.weight,
        }
        sample = self._sample(kept_model)
        return results, [
            *(["", sample, ""] if sample else []),
            f"validation loss {scores['valid_loss']:.4f} nats a token",
            f"perplexity {scores['valid_perplexity']:.2f}",
            f"bits per byte {scores['valid_bits_per_byte']:.3f}",
        ]


def prepare(
    config: RunConfig,
    objective: Objective,
    *,
    mesh: Mesh | None,
    stored: Files | None,
    starts: Sequence[Any],
    note: Callable[[str], None],
) -> LanguageModeling:
    """Open the text, train or read the tokenizer, and make batches; see `TaskEntry.prepare`."""
    corpus = on_first_then_every_process(lambda: load_texts(config.task, texts.files_corpus))

    def make() -> TextTokenizer:
        tokenizer: TextTokenizer = processor_of(starts) or make_tokenizer(config, corpus)
        tokenizer.special_tokens = config.task.special_tokens
        return tokenizer

    tokenizer = shared_processor(TextTokenizer, make, stored)
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
        """Generate continuations of each prompt, see `TextGenerator`.

        Args:
          prompts: Texts to continue.
          max_new_tokens: Largest number of new tokens per continuation.
          samples: Number of continuations per prompt.
          seed: Seed of sampling.
          stop: Strings that end a continuation, without becoming part of it.
          **sampling: See `Sampling`.

        Raises:
          UserError: A prompt is empty or too long, or a value is out of range.
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
