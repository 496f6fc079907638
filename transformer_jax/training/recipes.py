"""What recipes share: the config of a preset, the model of a start folder, and an optimization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.models.registry import MODELS
from transformer_jax.training.config import Optimization, Start, choose
from transformer_jax.training.starts import started_config


def preset_config(kind: str, model: str, preset: str, **changes: Any) -> Any:
    """Return the config of a model's preset.

    Args:
      kind: Kind of the model, a key of `MODELS`.
      model: Name of the model.
      preset: Name of the model's size.
      **changes: Fields that differ from the preset.

    Raises:
      UserError: `model` or `preset` is unknown.
    """
    choose("model", model, tuple(MODELS[kind]))
    choose("preset", preset, MODELS[kind][model].presets)
    return MODELS[kind][model].preset(preset, **changes)


def fine_tuned_start(start: Sequence[str | Start], kind: str) -> tuple[tuple[Start, ...], str, Any]:
    """Return (starts, model name, model config) of the recipe fine_tune, without reading weights.

    Args:
      start: Folders of the recipe's `start`, or their text forms.
      kind: Kind of the model, a key of `MODELS`.

    Raises:
      UserError: `start` is empty, or its first folder holds another kind of model.
    """
    if not start:
        raise UserError("the recipe fine_tune needs a `start`")
    starts = Start.parse_all(start)
    return starts, *started_config(starts[0].folder, kind)


def cosine_optimization(steps: int, **values: Any) -> Optimization:
    """Return an optimization with a cosine schedule, with a tenth of the steps as warmup and between saves.

    Args:
      steps: Number of training steps.
      **values: Fields to change.
    """
    tenth = max(1, steps // 10)
    defaults: dict[str, Any] = dict(
        steps=steps, schedule="cosine", warmup=tenth, b1=0.9, b2=0.95, epsilon=1e-8, weight_decay=0.05,
        learning_rate=1e-3, save_every=tenth, evaluate_every=tenth,
    )  # fmt: skip
    return Optimization(**(defaults | values))
