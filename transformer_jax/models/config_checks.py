"""What every config is held to when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.positions.configs import Positions, parse_positions
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.layers.text_pooling import POOLINGS

DTYPES = ("float32", "bfloat16", "float16")


def check_choices(config: Any, **choices: Sequence[str]) -> None:
    """That each named field holds one of its choices, and `dtype` one of the dtypes.

    Raises:
      ValueError: it does not.
    """
    for field, allowed in (choices | {"dtype": DTYPES}).items():
        if getattr(config, field) not in allowed:
            raise ValueError(f"{field}={getattr(config, field)!r} is not one of {', '.join(allowed)}")


def check_dropout(config: Any) -> None:
    """That dropout is a rate.

    Raises:
      ValueError: it is not.
    """
    if not 0.0 <= config.dropout < 1.0:
        raise ValueError(f"dropout={config.dropout} must be at least 0 and below 1")


def check_sizes(config: Any, *, head_width: int | None = None) -> None:
    """That heads divide the width (unless they have a width of their own) and dropout is a rate.

    Raises:
      ValueError: sizes that do not divide, or a value out of range.
    """
    if (head_width is None and config.width % config.heads) or config.heads % config.kv_heads:
        raise ValueError(
            f"width {config.width} must be a multiple of heads {config.heads}, "
            f"and heads of kv_heads {config.kv_heads}"
        )
    check_dropout(config)


def check_encoder_choices(config: Any) -> None:
    """That what a text encoder's config chooses by name is known.

    Raises:
      ValueError: a value outside its choices.
    """
    check_choices(
        config,
        activation=tuple(ACTIVATIONS),
        classifier_pooling=POOLINGS,
        initial_values=("normal", "neighbours"),
    )


def check_encoder_sizes(config: Any) -> None:
    """That a text encoder's heads divide its width, its sizes are at least 1 and its dropouts are rates.

    Raises:
      ValueError: sizes that do not divide, or a value out of range.
    """
    for field in ("vocab_size", "width", "layers", "heads", "feed_forward", "max_length", "embedding_width"):
        if getattr(config, field) < 1:
            raise ValueError(f"{field}={getattr(config, field)} must be at least 1")
    if config.width % config.heads:
        raise ValueError(f"width {config.width} must be a multiple of heads {config.heads}")
    for field in ("token_types", "classes", "position_offset"):
        if getattr(config, field) < 0:
            raise ValueError(f"{field}={getattr(config, field)} must be at least 0")
    check_dropout(config)
    for field in ("attention_dropout", "classifier_dropout", "reader_dropout"):
        rate = getattr(config, field, None)
        if rate is not None and not 0.0 <= rate < 1.0:
            raise ValueError(f"{field}={rate} must be at least 0 and below 1")


def parse_text_positions(config: Any) -> None:
    """Replaces the text form of `positions`, which a JSON file holds, by its value.

    Raises:
      ValueError: a text that is none, or another type.
    """
    if isinstance(config.positions, str):
        object.__setattr__(config, "positions", parse_positions(config.positions))
    if not isinstance(config.positions, Positions):
        raise ValueError(f"positions={config.positions!r} is neither `Positions` nor their text form")


def make_rotary_scaling(config: Any) -> None:
    """Replaces a `rotary_scaling` that is a dictionary, as a JSON file holds it, by its value.

    Raises:
      ValueError: a value out of range.
    """
    if isinstance(config.rotary_scaling, dict):
        object.__setattr__(config, "rotary_scaling", RotaryScaling(**config.rotary_scaling))


def check_recurrent_sizes(config: Any) -> None:
    """Checks that a recurrent model's sizes are at least 1 and dropout is a rate.

    Raises:
      ValueError: a value out of range.
    """
    for field in ("vocab_size", "width", "hidden", "layers", "max_length"):
        if getattr(config, field) < 1:
            raise ValueError(f"{field}={getattr(config, field)} must be at least 1")
    check_dropout(config)


def head_width(config: Any) -> int:
    """K: the config's own where it has one, else D / H."""
    return getattr(config, "head_width", None) or config.width // config.heads
