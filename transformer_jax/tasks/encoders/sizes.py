"""Sizes of the encoder that a run trains: those of its start or of a preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.models.encoders.longformer import BUILT_FROM, LongformerConfig
from transformer_jax.models.registry import MODELS
from transformer_jax.training.config import RunConfig, Start, choose, field_names
from transformer_jax.training.starts import started_config

# Size of a preset's vocabulary until a tokenizer is trained or read.
_VOCABULARY = 8_000


def choose_encoder(
    kind: str,
    starts: Sequence[Start],
    *,
    model: str,
    preset: str,
    excluded: Sequence[str] = (),
    max_length: int | None = None,
) -> tuple[str, Any, str]:
    """Choose the model that a recipe's arguments describe, without classes.

    Args:
      kind: Kind of the model, a key of `MODELS`.
      starts: Starts, of which the first determines model and sizes; empty to train from scratch.
      model: Name of the model; "" means that of the start, or the first of its kind. A longformer can be built
        from the start of a bert or roberta.
      preset: Size of a model that is trained from scratch; "" means mini.
      excluded: Names of models of the kind that the task does not train.
      max_length: Maximum length of a text of a longformer that is built from a start; None means its default.

    Returns:
      (name, config, preset); the preset is "" for a start.

    Raises:
      UserError: The start cannot be read, it holds another model, or a preset is given too.
      ValueError: A name is unknown.
    """
    models = {name: entry for name, entry in MODELS[kind].items() if name not in excluded}
    if starts:
        name, config = started_config(starts[0].folder, kind)
        if name not in models:
            raise UserError(f"`start` {starts[0].folder} holds a {name}: this task takes {', '.join(models)}")
        if model == "longformer" and type(config) in BUILT_FROM:
            lengths = {} if max_length is None else {"max_length": max_length}
            name, config = model, LongformerConfig.of_encoder(config, **lengths)
        if model and model != name:
            raise UserError(f"`start` {starts[0].folder} holds a {name}, not a {model}: leave `model` out")
        if preset:
            raise UserError(
                "`preset` is the size of a model that is trained from scratch, and a start brings its own: "
                "leave it out"
            )
    else:
        name = model or next(iter(models))
        choose("model", name, tuple(models))
        preset = preset or "mini"
        choose("preset", preset, models[name].presets)
        config = models[name].preset(preset, _VOCABULARY)
    changes: dict[str, Any] = {"classes": 0}
    if kind != "sequence_classifier":
        changes["classifier_pooling"] = "first"  # the start may have been a classifier
    changes = {field: value for field, value in changes.items() if field in field_names(config)}
    return name, dataclasses.replace(config, **changes), preset


def check_lowercase(config: RunConfig) -> None:
    """Check that `lowercase` keeps its default if a start brings its vocabulary.

    Raises:
      UserError: It was changed.
    """
    if config.start and not config.task.lowercase:
        raise UserError(
            "`lowercase` is for a vocabulary that is trained, and a start brings its own: leave it out"
        )


def fit_to_tokenizer(config: RunConfig, tokenizer: EncoderTokenizer) -> Any:
    """Return the model's config with the tokenizer's vocabulary size and padding id.

    A start keeps the rows of its token embedding, which may exceed the tokens of its tokenizer.

    Raises:
      UserError: The tokenizer has more tokens than the start's token embedding has rows.
    """
    changes = {}
    if config.start:
        tokenizer.check_fits(config.model.vocab_size)
    else:
        changes["vocab_size"] = tokenizer.vocab_size
    ids = {"padding_id": tokenizer.pad, "separator_id": tokenizer.separator}
    changes |= {name: value for name, value in ids.items() if name in field_names(config.model)}
    return dataclasses.replace(config.model, **changes)
