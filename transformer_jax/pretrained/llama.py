"""Llama (Touvron et al. 2023, Dubey et al. 2024) and Mistral (Jiang et al. 2023) as `transformers` has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.models.decoders.llama import Llama, LlamaConfig
from transformer_jax.pretrained.family import CONFIG, Family, Positive, Size, Tensor, check_supported


class _Rope(msgspec.Struct):
    rope_type: Literal["default", "linear", "llama3", "yarn"] | None = None
    type: Literal["default", "linear", "llama3", "yarn"] | None = None  # before version 4.43
    rope_theta: Positive | None = None
    factor: Annotated[float, msgspec.Meta(ge=1)] | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float = 1.0


class _Fields(msgspec.Struct):
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Size = 2048
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Positive | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: float | None = None
    sliding_window: Size | None = None


def _scaling(fields: _Fields) -> tuple[float, RotaryScaling | None]:
    """Return theta and the scaling, with the precedence of `transformers`.

    `rope_scaling` (version 4) replaces `rope_parameters` (version 5), a theta in either of them replaces
    `rope_theta`, and the trained length beside them replaces the one in them.
    """
    rope = fields.rope_scaling or fields.rope_parameters or _Rope()
    theta = rope.rope_theta or fields.rope_theta or 10_000.0
    if rope.partial_rotary_factor != 1.0 or fields.partial_rotary_factor not in (None, 1.0):
        raise UserError(f"{CONFIG}: partial_rotary_factor other than 1 is not supported")
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return theta, None

    def required(name: str) -> float:
        if (value := getattr(rope, name)) is None:
            raise UserError(f"{CONFIG}: {name} of rope scaling {kind} is missing")
        return value

    factor = required("factor")
    if kind == "linear":
        return theta, RotaryScaling("linear", factor)
    lengths = (
        fields.original_max_position_embeddings,
        rope.original_max_position_embeddings,
        fields.max_position_embeddings,
    )
    length = next(length for length in lengths if length is not None)
    if kind == "llama3":
        low, high = required("low_freq_factor"), required("high_freq_factor")
        return theta, RotaryScaling("llama3", factor, length, low_factor=low, high_factor=high)
    if rope.mscale or rope.mscale_all_dim or rope.truncate is False:
        raise UserError(f"{CONFIG}: yarn with mscale or without truncation is not supported")
    return theta, RotaryScaling(
        "yarn",
        factor,
        length,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=rope.attention_factor,
    )


def _config(hf_config: Mapping[str, Any]) -> LlamaConfig:
    fields = convert(hf_config, _Fields, CONFIG)
    check_supported(fields, hidden_act="silu")
    theta, scaling = _scaling(fields)
    return LlamaConfig(
        vocab_size=fields.vocab_size,
        width=fields.hidden_size,
        layers=fields.num_hidden_layers,
        heads=fields.num_attention_heads,
        kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_width=fields.head_dim,
        feed_forward=fields.intermediate_size,
        max_length=fields.max_position_embeddings,
        rotary_theta=theta,
        rotary_scaling=scaling,
        attention_bias=fields.attention_bias,
        feed_forward_bias=fields.mlp_bias,
        tie=fields.tie_word_embeddings,
        norm_epsilon=fields.rms_norm_eps,
    )


def _describe(config: LlamaConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_theta}
    if (scaling := config.rotary_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = scaling.original_length
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            rope |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width or config.width // config.heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.feed_forward_bias,
        "tie_word_embeddings": config.tie,
        # transformers v5 reads the first field, v4 the other two.
        "rope_parameters": rope,
        "rope_theta": config.rotary_theta,
        "rope_scaling": None if config.rotary_scaling is None else rope,
    }


def _mistral_config(hf_config: Mapping[str, Any]) -> LlamaConfig:
    fields = convert(hf_config, _Fields, CONFIG)
    # `transformers` takes a missing window as 4,096 tokens, and null as none.
    window = fields.sliding_window if "sliding_window" in hf_config else 4_096
    return dataclasses.replace(_config(hf_config), window=window)


def _describe_mistral(config: LlamaConfig) -> dict[str, Any]:
    names = ("attention_bias", "mlp_bias")
    description = {name: value for name, value in _describe(config).items() if name not in names}
    return {**description, "sliding_window": config.window}


def _is_mistral(config: LlamaConfig) -> bool:
    return config.window is not None and config.dilation == 1


def _linear(theirs: str, ours: str, bias: str) -> tuple[Tensor, Tensor]:
    """Return the table entries for weight and bias of a torch Linear in each layer.

    Args:
      theirs: Path of the module in the published layer.
      ours: Path of the module in our block.
      bias: Field of our config that must be true for the bias to exist.
    """
    return (
        Tensor(f"layers.{{layer}}.{theirs}.weight", (f"blocks/{ours}/kernel",), transposed=True),
        Tensor(f"layers.{{layer}}.{theirs}.bias", (f"blocks/{ours}/bias",), in_config=bias),
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    module=Llama,
    config=_config,
    describe=_describe,
    table=(
        Tensor("embed_tokens.weight", ("embedding/table/embedding",)),
        Tensor("layers.{layer}.input_layernorm.weight", ("blocks/attention_norm/scale",)),
        *_linear("self_attn.q_proj", "attention/query", "attention_bias"),
        *_linear("self_attn.k_proj", "attention/key", "attention_bias"),
        *_linear("self_attn.v_proj", "attention/value", "attention_bias"),
        *_linear("self_attn.o_proj", "attention/output", "attention_bias"),
        Tensor("layers.{layer}.post_attention_layernorm.weight", ("blocks/feed_forward_norm/scale",)),
        *_linear("mlp.gate_proj", "feed_forward/gate", "feed_forward_bias"),
        *_linear("mlp.up_proj", "feed_forward/expand", "feed_forward_bias"),
        *_linear("mlp.down_proj", "feed_forward/contract", "feed_forward_bias"),
        Tensor("norm.weight", ("norm/scale",)),
    ),
    prefix="model.",
    head="lm_head.weight",
    ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    fits=lambda config: config.window is None,
)
MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=_mistral_config,
    describe=_describe_mistral,
    fits=lambda config: _is_mistral(config) and not (config.attention_bias or config.feed_forward_bias),
)
