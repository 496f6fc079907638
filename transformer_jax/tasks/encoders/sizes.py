"""Which encoder a run trains and of which sizes: those of what it starts from, or a preset's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.models.registry import MODELS
from transformer_jax.training.config import RunConfig, Start, choose, field_names
from transformer_jax.training.starts import started_config

# Of a preset, until a tokenizer is trained or read.
_VOCABULARY = 8_000


def chosen_encoder(
    kind: str, starts: Sequence[Start], *, model: str, preset: str, leave_out: Sequence[str] = ()
) -> tuple[str, Any, str]:
    """The model that a recipe's keywords name, without classes.

    Args:
      kind: of the model, a key of `MODELS`.
      starts: the first gives model and sizes; empty for a model from nothing.
      model: its name; "" is that of the start, or the first of its kind.
      preset: size of a model from nothing; "" is mini.
      leave_out: names of the kind that the task does not train.

    Returns:
      (name, config, preset); the preset of a start is "".

    Raises:
      UserError: a start that holds another model, or one that cannot be read.
      ValueError: an unknown name.
    """
    models = {name: entry for name, entry in MODELS[kind].items() if name not in leave_out}
    if starts:
        name, config = started_config(starts[0].folder, kind)
        if name not in models:
            raise UserError(f"`start` {starts[0].folder} holds a {name}: this task takes {', '.join(models)}")
        if model and model != name:
            raise UserError(f"`start` {starts[0].folder} holds a {name}, not a {model}: leave `model` out")
        if preset:
            raise UserError(
                "`preset` is the size of a model from nothing, and a start brings its own: leave it out"
            )
    else:
        name = model or next(iter(models))
        choose("model", name, tuple(models))
        preset = preset or "mini"
        choose("preset", preset, models[name].presets)
        config = models[name].preset(preset, _VOCABULARY)
    without: dict[str, Any] = {"classes": 0}
    if kind != "sequence_classifier":
        without["classifier_pooling"] = "first"  # of a start that classified
    own = {field: value for field, value in without.items() if field in field_names(config)}
    return name, dataclasses.replace(config, **own), preset


def check_lowercase(config: RunConfig) -> None:
    """That `lowercase` is left alone where a start brings its vocabulary.

    Raises:
      UserError: it is not.
    """
    if config.start and not config.task.lowercase:
        raise UserError(
            "`lowercase` is for a vocabulary that is trained, and a start brings its own: leave it out"
        )


def vocabulary_size(config: RunConfig, tokenizer: EncoderTokenizer) -> int:
    """Rows of the embeddings: a start's table may have some that its tokenizer has no token for.

    Raises:
      UserError: a tokenizer with more tokens than the start has rows.
    """
    if not config.start:
        return tokenizer.vocab_size
    tokenizer.check_fits(config.model.vocab_size)
    return config.model.vocab_size
