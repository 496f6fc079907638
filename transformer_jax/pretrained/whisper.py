"""Whisper (Radford et al. 2022) as `transformers` publishes it: `WhisperForConditionalGeneration`."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from transformer_jax.data.tokenizers.speech_processor import SpeechProcessor, SpeechSettings
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_json
from transformer_jax.models.speech.whisper import Whisper, WhisperConfig
from transformer_jax.pretrained.family import (
    CONFIG,
    Count,
    Family,
    Rate,
    Size,
    Tensor,
    check_supported,
    linear,
    norm,
)

_GENERATION = "generation_config.json"
# Smallest vocabulary of the published models of several languages.
_MULTILINGUAL = 51_865


class _Fields(msgspec.Struct):
    vocab_size: Size
    d_model: Size
    encoder_layers: Size
    decoder_layers: Size
    encoder_attention_heads: Size
    decoder_attention_heads: Size
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    num_mel_bins: Size = 80
    max_source_positions: Size = 1_500
    max_target_positions: Size = 448
    activation_function: Literal["gelu"] = "gelu"
    dropout: Rate = 0.0
    scale_embedding: bool = False
    tie_word_embeddings: bool = True
    decoder_start_token_id: Count = 50_257
    eos_token_id: Count = 50_256
    pad_token_id: Count | None = None
    suppress_tokens: list[Count] | None = None
    begin_suppress_tokens: list[Count] | None = None


class _Generation(msgspec.Struct):
    """Fields of `generation_config.json`."""

    decoder_start_token_id: Count | None = None
    eos_token_id: Count | None = None
    pad_token_id: Count | None = None
    is_multilingual: bool | None = None
    lang_to_id: dict[str, Count] | None = None
    task_to_id: dict[str, Count] | None = None
    no_timestamps_token_id: Count | None = None
    max_initial_timestamp_index: Count | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[Count] | None = None


def _config(hf_config: Mapping[str, Any]) -> WhisperConfig:
    fields = convert(hf_config, _Fields, CONFIG)
    check_supported(
        fields, scale_embedding=False, tie_word_embeddings=True,
        decoder_attention_heads=fields.encoder_attention_heads, decoder_ffn_dim=fields.encoder_ffn_dim,
    )  # fmt: skip
    return WhisperConfig(
        vocab_size=fields.vocab_size, width=fields.d_model, encoder_layers=fields.encoder_layers,
        decoder_layers=fields.decoder_layers, heads=fields.encoder_attention_heads,
        feed_forward=fields.encoder_ffn_dim, mel_bins=fields.num_mel_bins,
        max_frames=2 * fields.max_source_positions, max_length=fields.max_target_positions,
    )  # fmt: skip


def _describe(config: WhisperConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.width,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": config.feed_forward,
        "decoder_ffn_dim": config.feed_forward,
        "num_mel_bins": config.mel_bins,
        "max_source_positions": config.max_states,
        "max_target_positions": config.max_length,
        "activation_function": "gelu",
        "dropout": config.dropout,
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }


def _attention(theirs: str, ours: str) -> tuple[Tensor, ...]:
    """Return the table entries of an attention, whose keys have no bias."""
    projections = (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output"))
    rows = [row for a, b in projections for row in linear(f"{theirs}.{a}_proj", f"{ours}/{b}")]
    return tuple(row for row in rows if not row.theirs.endswith("k_proj.bias"))


def _layers(attention: str) -> tuple[Tensor, ...]:
    """Return the table entries that the layers of encoder and decoder share."""
    layer = "layers.{layer}"
    return (
        *_attention(f"{layer}.self_attn", f"blocks/{attention}"),
        *norm(f"{layer}.self_attn_layer_norm", f"blocks/{attention}_norm"),
        *linear(f"{layer}.fc1", "blocks/feed_forward/expand"),
        *linear(f"{layer}.fc2", "blocks/feed_forward/contract"),
        *norm(f"{layer}.final_layer_norm", "blocks/feed_forward_norm"),
        *norm("layer_norm", "norm"),
    )


def _convolution(number: int) -> tuple[Tensor, ...]:
    ours, theirs = f"convolutions/{number}", f"conv{number + 1}"
    return (
        Tensor(f"{theirs}.weight", (f"{ours}/kernel",), layout="signal"),
        Tensor(f"{theirs}.bias", (f"{ours}/bias",)),
    )


_ENCODER = (
    *_convolution(0),
    *_convolution(1),
    Tensor("embed_positions.weight", ("positions/embedding",)),
    *_layers("self_attention"),
)
_DECODER = (
    Tensor("embed_tokens.weight", ("embedding/table/embedding",)),
    Tensor("embed_positions.weight", ("positions/table/embedding",)),
    *_layers("attention"),
    *_attention("layers.{layer}.encoder_attn", "blocks/cross_attention"),
    *norm("layers.{layer}.encoder_attn_layer_norm", "blocks/cross_attention_norm"),
)


def _read_processor(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> SpeechProcessor:
    fields = convert(hf_config, _Fields, CONFIG)
    tokenizer = TextTokenizer.open(folder, model_type="whisper")
    file = folder / _GENERATION
    generation = read_json(file, _Generation) if file.is_file() else _Generation()

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    end = first(generation.eos_token_id, fields.eos_token_id)
    # The vocabularies of models of English alone are smaller.
    multilingual = first(generation.is_multilingual, fields.vocab_size >= _MULTILINGUAL or None)
    named = generation.lang_to_id or {}
    tasks = generation.task_to_id or {}
    if multilingual and not named:  # older folders list them in the tokenizer only
        special = {name: number for number, name in tokenizer.special_names().items()}
        named = {name: number for name, number in special.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", name)}
        tasks = {
            name: special[f"<|{name}|>"] for name in ("transcribe", "translate") if f"<|{name}|>" in special
        }
        if not named or not tasks:
            raise UserError(f"{folder}: neither {_GENERATION} nor the tokenizer names the languages and tasks")
    if multilingual is False:
        named, tasks = {}, {}
    languages = {name.strip("<|>"): number for name, number in named.items()}
    suppressed = first(generation.suppress_tokens, fields.suppress_tokens, ())
    settings = SpeechSettings(
        mel_bins=fields.num_mel_bins,
        max_frames=2 * fields.max_source_positions,
        max_length=fields.max_target_positions,
        start=first(generation.decoder_start_token_id, fields.decoder_start_token_id),
        end=end,
        pad=first(generation.pad_token_id, fields.pad_token_id, end),
        languages=languages,
        tasks=tasks,
        no_timestamps=first(generation.no_timestamps_token_id, tokenizer.id_of("<|notimestamps|>")),
        suppressed=tuple(token for token in suppressed if token >= 0),
        first_suppressed=tuple(first(generation.begin_suppress_tokens, fields.begin_suppress_tokens, ())),
        last_initial=generation.max_initial_timestamp_index,
    )
    largest = max([settings.start, settings.end, settings.pad, *languages.values(), *settings.tasks.values()])
    if largest >= fields.vocab_size:
        raise UserError(f"{folder}: the control token {largest} exceeds the vocabulary of {fields.vocab_size}")
    return SpeechProcessor(tokenizer, settings)


def _settings(processor: SpeechProcessor, config: WhisperConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = processor.settings
    generation: dict[str, Any] = {
        "decoder_start_token_id": settings.start,
        "bos_token_id": settings.end,
        "eos_token_id": settings.end,
        "pad_token_id": settings.pad,
        "max_length": settings.max_length,
        "is_multilingual": bool(settings.languages),
        "return_timestamps": False,
        "suppress_tokens": list(settings.suppressed),
        "begin_suppress_tokens": list(settings.first_suppressed),
    }
    if settings.languages:
        generation["lang_to_id"] = {f"<|{name}|>": number for name, number in settings.languages.items()}
        generation["task_to_id"] = settings.tasks
    if settings.no_timestamps is not None:
        generation["no_timestamps_token_id"] = settings.no_timestamps
    if settings.last_initial is not None:
        generation["max_initial_timestamp_index"] = settings.last_initial
    tokenizer = processor.tokenizer.published()[1] | {"tokenizer_class": "WhisperTokenizer"}
    files = {
        _GENERATION: generation,
        "tokenizer.json": processor.tokenizer.files()["tokenizer.json"],
        "tokenizer_config.json": tokenizer,
    }
    return {}, files


WHISPER = Family(
    model_type="whisper",
    architecture="WhisperForConditionalGeneration",
    module=Whisper,
    config=_config,
    describe=_describe,
    table=(
        *(row.moved("encoder.", "encoder/", layers="encoder_layers") for row in _ENCODER),
        *(row.moved("decoder.", "decoder/", layers="decoder_layers") for row in _DECODER),
    ),
    prefix="model.",
    head="proj_out.weight",
    processor=_read_processor,
    settings=_settings,
    fits=lambda config: (
        (config.kernel, config.strides) == (3, (1, 2)) and not config.ctc and config.norm_epsilon == 1e-5
    ),
)
