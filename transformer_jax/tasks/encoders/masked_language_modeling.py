"""Masked language modeling: words behind a mask token, and with BERT whether one text follows another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.batches.masked_batches import EncodedDocuments, PackedPieces, SentencePairs
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.layers.losses import cross_entropy, mean_of_rows, sums_in_parts
from transformer_jax.tasks.encoders import pretraining
from transformer_jax.tasks.encoders.pretraining import Pretraining, PretrainingConfig
from transformer_jax.tasks.encoders.trained_heads import TrainedMaskedLM
from transformer_jax.training.config import RunConfig, field_names
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry

# ELECTRA's generator, which is trained with its discriminator.
_TRAINED_OTHERWISE = ("electra",)


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModelingConfig(PretrainingConfig):
    """`PretrainingConfig`, and whether next sentences are learned too."""

    next_sentence: bool = False
    """A row is a pair of texts, and a second term of the loss is whether the second follows the first; needs
    `pooler`."""


def text(
    *,
    start: tuple[str, ...] = (),
    model: str = "",
    preset: str = "",
    steps: int = 1_000,
    context: int = 128,
) -> RunConfig:
    """A small encoder on any text, or one that is trained on; BERT with a pooler learns next sentences too."""
    name, config, preset, starts = pretraining.encoder(
        "masked_lm", start, model=model, preset=preset, context=context, leave_out=_TRAINED_OTHERWISE
    )
    pairs = name == "bert" and config.pooler
    if "pooler" in field_names(config):
        config = dataclasses.replace(config, pooler=pairs)
    return RunConfig(
        task=MaskedLanguageModelingConfig(context=context, next_sentence=pairs),
        model=config,
        optimization=pretraining.optimization(steps, starts),
        start=starts,
        recipe="text",
        preset=preset,
    )


def measured(
    model: Any, batch: Mapping[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Sums over the masked words, and over the pairs: loss (nats), accuracy, next_sentence_accuracy ..."""
    states = model.hidden_states(
        batch["tokens"], types=batch.get("types"), segments=batch["segments"], dropout_key=dropout_key
    )
    weights = batch["weights"]

    def words(states, labels, weights):
        logits = model.logits(states)
        right = (logits.argmax(-1) == labels).astype(jnp.float32)
        return (cross_entropy(logits, labels) * weights).sum(axis=1), (right * weights).sum()

    chosen = jnp.take_along_axis(states, batch["positions"][..., None], axis=1)  # (B, K, D)
    given = chosen, batch["labels"], weights
    parts = model.compute.loss_parts_of(*weights.shape, model.config.vocab_size)
    losses, right = sums_in_parts(words, given, parts)
    sums = {"masked_loss": losses.sum(), "masked_accuracy": right}
    own = dict.fromkeys(sums, weights.sum())
    rows, real = mean_of_rows(losses, weights)
    if "next_label" in batch:
        # Rows that fill a batch up are no pairs.
        real_pairs = batch["next_weight"] * real
        logits = model.sentence_logits(states[:, 0])
        losses = cross_entropy(logits, batch["next_label"])
        right = (logits.argmax(-1) == batch["next_label"]).astype(jnp.float32)
        sums |= {"next_loss": (losses * real_pairs).sum(), "next_accuracy": (right * real_pairs).sum()}
        own |= dict.fromkeys(("next_loss", "next_accuracy"), real_pairs.sum())
        rows = rows + losses * real_pairs
    sums["loss"], own["loss"] = (rows * real).sum(), real.sum()
    return sums, own


class MaskedWords(Objective):
    """Cross-entropy of masked words (Devlin et al. 2019, section 3.1), with that of next sentences."""

    def loss(self, model, extra, batch, key):
        return measured(model, batch, key)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    pretraining.check(config, model_config)
    if config.task.next_sentence and "pooler" not in field_names(model_config):
        raise UserError("`next_sentence` needs a model with a pooler: this one has none; leave it out")
    if config.task.next_sentence != model_config.pooler:
        raise UserError(
            f"`next_sentence` {config.task.next_sentence} and `pooler` {model_config.pooler}: what tells next "
            "sentences apart is read from the pooler, so give both or neither"
        )
    if config.task.next_sentence and model_config.token_types < 2:
        raise UserError("`next_sentence` needs two `token_types`, which tell the texts of a pair apart")
    return MaskedWords()


class MaskedLanguageModeling(Pretraining):
    """The task with its text opened."""

    measured = staticmethod(measured)

    def _rows(self, documents: EncodedDocuments) -> PackedPieces | SentencePairs:
        if self._config.task.next_sentence:
            return SentencePairs(documents, self._config.task.context, self.processor)
        return super()._rows(documents)

    def evaluate(self, model: Any, batches: Any = None) -> dict[str, float]:
        found = super().evaluate(model, batches)
        # What compares between objectives is the loss of the masked words.
        found["loss"] = found.pop("masked_loss")
        return found


def prepare(config, objective, **options):
    """See `pretraining.prepare`."""
    return pretraining.prepare(MaskedLanguageModeling, config, **options)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    return pretraining.abstract_batch(config, pairs=config.task.next_sentence)


ENTRY = TaskEntry(
    "masked_language_modeling",
    MaskedLanguageModelingConfig,
    "masked_lm",
    {"text": text},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedMaskedLM,
    check_mesh=pretraining.check_mesh,
)
