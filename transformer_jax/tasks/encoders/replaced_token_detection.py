"""Replaced token detection: a generator fills masked words in, a discriminator says which words it replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.layers.losses import (
    binary_cross_entropy,
    cross_entropy,
    drawn_tokens,
    keys_of_tokens,
    per_row,
    tokens_in_parts,
)
from transformer_jax.tasks.encoders import pretraining
from transformer_jax.tasks.encoders.pretraining import Pretraining, PretrainingConfig
from transformer_jax.tasks.encoders.trained_heads import TrainedElectra
from transformer_jax.training.config import RunConfig, check_at_least
from transformer_jax.training.objective import Objective
from transformer_jax.training.run_folder import is_run, read_config
from transformer_jax.training.task import TaskEntry


@dataclasses.dataclass(frozen=True)
class ReplacedTokenDetectionConfig(PretrainingConfig):
    """`PretrainingConfig`, and the weight of the discriminator's loss.

    Raises:
      UserError: a value out of range.
    """

    discriminator_weight: float = 50.0
    """Factor of the discriminator's loss beside the generator's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, discriminator_weight=0)


def text(
    *,
    start: tuple[str, ...] = (),
    model: str = "",
    preset: str = "",
    steps: int = 1_000,
    context: int = 128,
) -> RunConfig:
    """A small ELECTRA on any text, or one that is trained on."""
    _, config, preset, starts = pretraining.encoder(
        "replaced_token", start, model=model, preset=preset, context=context
    )
    if starts and not _has_generator(starts[0].folder):
        config = dataclasses.replace(config, generator_size=-(-config.heads // 4) / config.heads)
    # Clark et al. 2020, table 6: the large one, of a preset or a start, predicts a quarter of the words.
    large = config.width >= type(config).preset("large", config.vocab_size).width
    return RunConfig(
        task=ReplacedTokenDetectionConfig(context=context, mask_rate=0.25 if large else 0.15),
        model=config,
        optimization=pretraining.optimization(steps, starts),
        start=starts,
        recipe="text",
        preset=preset,
    )


def _has_generator(folder: str) -> bool:
    """Whether a start holds both networks. Of one alone the other begins fresh, with a quarter of the heads
    (Clark et al. 2020, section 3.2), or the next share of them that is a whole number."""
    return is_run(folder) and read_config(folder)["task"] == "replaced_token_detection"


def measured(
    model: Any, batch: Mapping[str, jax.Array], key: jax.Array, weight: float, *, train: bool = False
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Sums over masked words and over all words: loss, generator_loss, discriminator_loss, accuracies.

    Args:
      model: an `ElectraPretraining`.
      batch: of `MaskedBatches`.
      key: of the words that the generator draws, and of dropout.
      weight: of the discriminator's loss.
      train: dropout is on.
    """
    generator_key, draw_key, discriminator_key = jax.random.split(key, 3)
    segments, weights, labels = batch["segments"], batch["weights"], batch["labels"]
    states = model.generator_states(
        batch["tokens"], batch["positions"], segments=segments, dropout_key=generator_key if train else None
    )

    def words(states, labels, keys):
        logits = model.generator_logits(states)
        return cross_entropy(logits, labels), drawn_tokens(keys, jax.lax.stop_gradient(logits))

    parts = model.compute.loss_parts_of(*labels.shape, model.config.vocab_size)
    given = states, labels, keys_of_tokens(draw_key, labels.shape)
    losses, drawn = tokens_in_parts(words, given, parts)
    # Places without a word lie behind the row, where nothing is written.
    places = jnp.where(weights > 0, batch["positions"], segments.shape[1])
    row = jnp.arange(len(places))[:, None]
    original = batch["tokens"].at[row, places].set(labels, mode="drop")
    tokens = original.at[row, places].set(drawn, mode="drop")
    # A word that the generator got right is no replaced one.
    replaced = (tokens != original).astype(jnp.float32)
    found = model.replaced(tokens, segments=segments, dropout_key=discriminator_key if train else None)
    real = (segments > 0).astype(jnp.float32)
    binary = binary_cross_entropy(found, replaced)
    right = ((found > 0) == (replaced > 0)).astype(jnp.float32)
    sums = {
        "generator_loss": (losses * weights).sum(),
        "discriminator_loss": (binary * real).sum(),
        "discriminator_accuracy": (right * real).sum(),
        "replaced": (replaced * real).sum(),
    }
    counts = {name: weights.sum() if name == "generator_loss" else real.sum() for name in sums}
    (of_generator, rows), (of_discriminator, _) = per_row(losses, weights), per_row(binary, real)
    sums["loss"] = ((of_generator + weight * of_discriminator) * rows).sum()
    counts["loss"] = rows.sum()
    return sums, counts


class ReplacedTokens(Objective):
    """The generator's cross-entropy, and the discriminator's of every word (Clark et al. 2020, section 2)."""

    def __init__(self, weight: float):
        self.weight = weight

    def loss(self, model, extra, batch, key):
        return measured(model, batch, key, self.weight, train=True)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    pretraining.check(config, model_config)
    return ReplacedTokens(config.task.discriminator_weight)


class ReplacedTokenDetection(Pretraining):
    """The task with its text opened."""

    best = "valid_discriminator_loss", "min"  # of what is kept
    # No random words: the discriminator sees none of what stands in the masks' places.
    shares = (0.85, 0.0)

    @staticmethod
    def measured(model, batch):
        return measured(model, batch, jax.random.key(0), 1.0)

    def evaluate(self, model: Any, batches: Any = None) -> dict[str, float]:
        found = super().evaluate(model, batches)
        found["loss"] = found.pop("generator_loss")
        return found


def prepare(config, objective, **options):
    """See `pretraining.prepare`."""
    return pretraining.prepare(ReplacedTokenDetection, config, **options)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    return pretraining.abstract_batch(config, pairs=False)


ENTRY = TaskEntry(
    "replaced_token_detection",
    ReplacedTokenDetectionConfig,
    "replaced_token",
    {"text": text},
    EncoderTokenizer,
    abstract_batch,
    objective,
    prepare,
    TrainedElectra.of,
    check_mesh=pretraining.check_mesh,
)
