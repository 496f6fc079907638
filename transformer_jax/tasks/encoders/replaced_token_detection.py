"""Replaced token detection (ELECTRA): a discriminator detects tokens that a generator replaced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.layers.losses import (
    binary_cross_entropy,
    cross_entropy,
    per_row,
    sample_tokens,
    token_keys,
    tokens_in_parts,
)
from transformer_jax.tasks import text_data
from transformer_jax.tasks.encoders import pretraining
from transformer_jax.tasks.encoders.pretraining import Pretraining, PretrainingConfig
from transformer_jax.tasks.encoders.trained_heads import TrainedElectra
from transformer_jax.training.config import RunConfig, Start, check_at_least
from transformer_jax.training.objective import Objective
from transformer_jax.training.run_folder import is_run, read_config
from transformer_jax.training.task import TaskEntry


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetectionConfig(PretrainingConfig):
    """A `PretrainingConfig` with the weight of the discriminator's loss.

    Raises:
      UserError: A value is out of range, here or in `PretrainingConfig`.
    """

    discriminator_weight: float = 50.0
    """Weight of the discriminator's loss, relative to the generator's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, discriminator_weight=0)


def _complete(
    name: str, config: Any, starts: Sequence[Start], context: int
) -> tuple[ReplacedTokenDetectionConfig, Any]:
    """Return the task and model config of a recipe, with the values that depend on the model's size.

    These are the mask rate, and the size of the generator if the start folder does not contain one.
    """
    if starts and not _has_generator(starts[0].folder):
        # Clark et al. 2020, section 3.2: a quarter of the heads, rounded up.
        config = dataclasses.replace(config, generator_size=-(-config.heads // 4) / config.heads)
    # Clark et al. 2020, table 6: the large model predicts a quarter of the tokens.
    is_large = config.width >= type(config).preset("large", config.vocab_size).width
    return ReplacedTokenDetectionConfig(context=context, mask_rate=0.25 if is_large else 0.15), config


def _has_generator(folder: str) -> bool:
    """Return whether a start folder holds a generator besides the discriminator, so that neither is random."""
    return is_run(folder) and read_config(folder)["task"] == "replaced_token_detection"


def sums_and_weights(
    model: Any, batch: Mapping[str, jax.Array], key: jax.Array, weight: float, *, train: bool = False
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Compute the generator's loss over masked tokens, and the discriminator's loss and accuracy over all.

    Padding does not count.

    Args:
      model: An `ElectraPretraining`.
      batch: A batch that `MaskedBatches` yields.
      key: PRNG key for sampling the generator's tokens, and for dropout.
      weight: Weight of the discriminator's loss.
      train: Enable dropout.

    Returns:
      ({metric: sum}, {metric: weight}); the mean of a metric is sum / weight.
    """
    generator_key, draw_key, discriminator_key = jax.random.split(key, 3)
    segments, word_weights, labels = batch["segments"], batch["weights"], batch["labels"]
    states = model.generator_states(
        batch["tokens"], batch["positions"], segments=segments, dropout_key=generator_key if train else None
    )

    def generate(states, labels, keys):
        logits = model.generator_logits(states)
        return cross_entropy(logits, labels), sample_tokens(keys, jax.lax.stop_gradient(logits))

    parts = model.compute.loss_parts_of(*labels.shape, model.config.vocab_size)
    arrays = states, labels, token_keys(draw_key, labels.shape)
    generator_losses, drawn = tokens_in_parts(generate, arrays, parts)
    # Unused positions point beyond the row, where the scatter drops their values.
    positions = jnp.where(word_weights > 0, batch["positions"], segments.shape[1])
    row = jnp.arange(len(positions))[:, None]
    original = batch["tokens"].at[row, positions].set(labels, mode="drop")
    tokens = original.at[row, positions].set(drawn, mode="drop")
    # A token that the generator predicts correctly is not replaced.
    replaced = (tokens != original).astype(jnp.float32)
    logits = model.replaced(tokens, segments=segments, dropout_key=discriminator_key if train else None)
    real = (segments > 0).astype(jnp.float32)
    discriminator_losses = binary_cross_entropy(logits, replaced)
    correct = ((logits > 0) == (replaced > 0)).astype(jnp.float32)
    sums = {
        "generator_loss": (generator_losses * word_weights).sum(),
        "discriminator_loss": (discriminator_losses * real).sum(),
        "discriminator_accuracy": (correct * real).sum(),
        "replaced": (replaced * real).sum(),
    }
    weights = {name: word_weights.sum() if name == "generator_loss" else real.sum() for name in sums}
    generator_means, has_words = per_row(generator_losses, word_weights)
    discriminator_means, _ = per_row(discriminator_losses, real)
    sums["loss"] = ((generator_means + weight * discriminator_means) * has_words).sum()
    weights["loss"] = has_words.sum()
    return sums, weights


class ReplacedTokens(Objective):
    """ELECTRA's training objective (Clark et al. 2020, section 2).

    It is the generator's cross-entropy over masked tokens, plus `weight` times the discriminator's binary
    cross-entropy over all tokens.
    """

    def __init__(self, weight: float):
        self.weight = weight

    def loss(self, model, extra, batch, key):
        """Return the sums and the weights of the metrics; "loss" is minimized."""
        return sums_and_weights(model, batch, key, self.weight, train=True)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the training objective of a config.

    Raises:
      UserError: `context` exceeds the model's maximum length, or see `pretraining.check`.
    """
    pretraining.check(config, model_config)
    return ReplacedTokens(config.task.discriminator_weight)


class ReplacedTokenDetection(Pretraining):
    """Replaced token detection with its text and tokenizer loaded, a `training.task.Task`."""

    best = "valid_discriminator_loss", "min"  # the run keeps the discriminator
    compared = "generator_loss"
    # The discriminator sees the generator's tokens instead of random tokens.
    shares = (0.85, 0.0)

    @staticmethod
    def sums_and_weights(model, batch):
        """Compute the sum and weight of each metric; the fixed key makes the sampled tokens reproducible."""
        return sums_and_weights(model, batch, jax.random.key(0), 1.0)


ENTRY = TaskEntry(
    "replaced_token_detection",
    ReplacedTokenDetectionConfig,
    "replaced_token",
    {"text": pretraining.make_recipe("replaced_token", _complete)},
    EncoderTokenizer,
    pretraining.abstract_batch,
    objective,
    functools.partial(pretraining.prepare, ReplacedTokenDetection),
    TrainedElectra.from_pretraining,
    check_mesh=text_data.check_mesh,
)
