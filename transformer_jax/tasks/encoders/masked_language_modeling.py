"""Masked language modeling: predict masked tokens, and with BERT whether one text follows another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.batches.masked_batches import EncodedDocuments, PackedPieces, SentencePairs
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.layers.losses import cross_entropy, mean_of_rows, sums_in_parts
from transformer_jax.tasks import text_data
from transformer_jax.tasks.encoders import pretraining
from transformer_jax.tasks.encoders.pretraining import Pretraining, PretrainingConfig
from transformer_jax.tasks.encoders.trained_heads import TrainedMaskedLM
from transformer_jax.training.config import RunConfig, Start, field_names
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModelingConfig(PretrainingConfig):
    """A `PretrainingConfig` with the choice to learn next sentences too."""

    next_sentence: bool = False
    """Make each row a pair of texts, and add the loss of whether the second follows the first; needs
    `pooler`."""


def _complete(
    name: str, config: Any, starts: Sequence[Start], context: int
) -> tuple[MaskedLanguageModelingConfig, Any]:
    """Complete the recipe: BERT with a pooler learns next sentences too, other models have no pooler."""
    next_sentence = name == "bert" and config.pooler
    if "pooler" in field_names(config):
        config = dataclasses.replace(config, pooler=next_sentence)
    return MaskedLanguageModelingConfig(context=context, next_sentence=next_sentence), config


def sums_and_weights(
    model: Any, batch: Mapping[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Compute loss (nats) and accuracy over the masked tokens, over the pairs, and in total.

    Args:
      model: A masked language model.
      batch: A batch of `MaskedBatches`.
      dropout_key: Key of dropout; None disables it.

    Returns:
      (sum, weight) of each metric by name.
    """
    states = model.hidden_states(
        batch["tokens"], types=batch.get("types"), segments=batch["segments"], dropout_key=dropout_key
    )

    def word_sums(states, labels, weights):
        logits = model.logits(states)
        correct = (logits.argmax(-1) == labels).astype(jnp.float32)
        return (cross_entropy(logits, labels) * weights).sum(axis=1), (correct * weights).sum()

    word_weights = batch["weights"]
    masked = jnp.take_along_axis(states, batch["positions"][..., None], axis=1)  # (B, K, D)
    parts = model.compute.loss_parts_of(*word_weights.shape, model.config.vocab_size)
    losses, correct = sums_in_parts(word_sums, (masked, batch["labels"], word_weights), parts)
    sums = {"masked_loss": losses.sum(), "masked_accuracy": correct}
    weights = dict.fromkeys(sums, word_weights.sum())
    row_losses, has_words = mean_of_rows(losses, word_weights)
    if "next_label" in batch:
        # Rows that only fill the batch are no pairs.
        pair_weights = batch["next_weight"] * has_words
        logits = model.sentence_logits(states[:, 0])
        losses = cross_entropy(logits, batch["next_label"])
        correct = (logits.argmax(-1) == batch["next_label"]).astype(jnp.float32)
        sums |= {"next_loss": (losses * pair_weights).sum(), "next_accuracy": (correct * pair_weights).sum()}
        weights |= dict.fromkeys(("next_loss", "next_accuracy"), pair_weights.sum())
        row_losses = row_losses + losses * pair_weights
    sums["loss"], weights["loss"] = (row_losses * has_words).sum(), has_words.sum()
    return sums, weights


class MaskedWords(Objective):
    """Cross-entropy of masked tokens (Devlin et al. 2019, section 3.1), plus that of next sentences."""

    def loss(self, model, extra, batch, key):
        """Return the sum and weight of each metric."""
        return sums_and_weights(model, batch, key)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Build the loss.

    Raises:
      UserError: Values contradict each other.
    """
    pretraining.check(config, model_config)
    next_sentence = config.task.next_sentence
    if next_sentence and "pooler" not in field_names(model_config):
        raise UserError("`next_sentence` needs a model with a pooler, and this one has none: leave it out")
    if next_sentence != model_config.pooler:
        raise UserError(
            f"`next_sentence` {next_sentence} and `pooler` {model_config.pooler}: next sentences are predicted "
            "from the pooler, so give both or neither"
        )
    if next_sentence and model_config.token_types < 2:
        raise UserError("`next_sentence` needs two `token_types`, which tell the texts of a pair apart")
    return MaskedWords()


class MaskedLanguageModeling(Pretraining):
    """The task with its text opened."""

    compared = "masked_loss"
    sums_and_weights = staticmethod(sums_and_weights)

    def _rows(self, documents: EncodedDocuments) -> PackedPieces | SentencePairs:
        if self._config.task.next_sentence:
            return SentencePairs(documents, self._config.task.context, self.processor)
        return super()._rows(documents)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a run's batches."""
    return pretraining.abstract_batch(config, pairs=config.task.next_sentence)


ENTRY = TaskEntry(
    "masked_language_modeling",
    MaskedLanguageModelingConfig,
    "masked_lm",
    # ELECTRA's generator is trained together with its discriminator.
    {"text": pretraining.make_recipe("masked_lm", _complete, excluded=("electra",))},
    EncoderTokenizer,
    abstract_batch,
    objective,
    functools.partial(pretraining.prepare, MaskedLanguageModeling),
    TrainedMaskedLM,
    check_mesh=text_data.check_mesh,
)
