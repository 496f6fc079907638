"""Checks of the fields of a config, made when the config is created."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.layers.positions.configs import Positions, parse_positions
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.limits import check_values

# Fields that are at least 1 in every config.
_SIZES = {
    "vocab_size", "vocab_multiple", "width", "hidden", "layers", "encoder_layers", "decoder_layers", "heads",
    "kv_heads", "head_width", "feed_forward", "max_length", "embedding_width", "image_size", "patch_size",
    "channels", "decoder_width", "decoder_heads",
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")


def check_choices(config: Any, **choices: Sequence[str]) -> None:
    """Check the values that every model config has, and that each named field holds one of its choices.

    Raises:
      UserError: A number is not finite or above its limit, see `check_values`.
      ValueError: A field holds another value than its choices, a size is below 1, or `norm_epsilon` is not
        above 0.
    """
    check_values(config)
    for field in sorted(_SIZES & vars(config).keys()):
        if (size := getattr(config, field)) is not None and size < 1:
            raise ValueError(f"{field}={size} must be at least 1")
    if hasattr(config, "norm_epsilon") and not config.norm_epsilon > 0:
        raise ValueError(f"norm_epsilon={config.norm_epsilon} must be above 0")
    for field, allowed in (choices | {"dtype": DTYPES}).items():
        if getattr(config, field) not in allowed:
            raise ValueError(f"{field}={getattr(config, field)!r} is not one of {', '.join(allowed)}")


def check_minimum(config: Any, minimum: int, *fields: str) -> None:
    """Check that the named fields are at least `minimum`.

    Raises:
      ValueError: A field is below the minimum.
    """
    for field in fields:
        if getattr(config, field) < minimum:
            raise ValueError(f"{field}={getattr(config, field)} must be at least {minimum}")


def check_rates(config: Any, *fields: str) -> None:
    """Check that the named fields are rates, at least 0 and below 1, or None.

    Raises:
      ValueError: A field is out of range.
    """
    for field in fields:
        rate = getattr(config, field)
        if rate is not None and not 0.0 <= rate < 1.0:
            raise ValueError(f"{field}={rate} must be at least 0 and below 1")


def check_heads(config: Any) -> None:
    """Check that heads divide the width, unless the config sets `head_width`, and that `kv_heads` divide heads.

    Raises:
      ValueError: Sizes do not divide.
    """
    if getattr(config, "head_width", None) is None and config.width % config.heads:
        raise ValueError(f"width {config.width} must be a multiple of heads {config.heads}")
    kv_heads = getattr(config, "kv_heads", config.heads)
    if config.heads % kv_heads:
        raise ValueError(f"heads {config.heads} must be a multiple of kv_heads {kv_heads}")


def check_recurrent_sizes(config: Any) -> None:
    """Check that the sizes of a recurrent model are at least 1 and that dropout is a rate.

    Raises:
      ValueError: A field is out of range.
    """
    check_minimum(config, 1, "vocab_size", "width", "hidden", "layers", "max_length")
    check_rates(config, "dropout")


def parse_text_positions(config: Any) -> None:
    """Replace the text form of `positions`, which JSON files hold, by the object that it describes.

    Raises:
      ValueError: The text does not describe positions, or the value has another type.
    """
    if isinstance(config.positions, str):
        object.__setattr__(config, "positions", parse_positions(config.positions))
    if not isinstance(config.positions, Positions):
        raise ValueError(f"positions={config.positions!r} is neither `Positions` nor their text form")


def parse_rotary_scaling(config: Any) -> None:
    """Replace a dictionary in `rotary_scaling`, which JSON files hold, by a `RotaryScaling`.

    Raises:
      ValueError: A value is out of range.
    """
    if isinstance(config.rotary_scaling, dict):
        object.__setattr__(config, "rotary_scaling", RotaryScaling(**config.rotary_scaling))


def head_width(config: Any) -> int:
    """Return K, which is the config's `head_width` if set, else D / H."""
    return getattr(config, "head_width", None) or config.width // config.heads
