"""Llama (Touvron et al. 2023, Dubey et al. 2024) as `transformers` publishes it: `LlamaForCausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.layers.positions.rotary import RotaryScaling
from transformer_jax.models.decoders.llama import Llama, LlamaConfig
from transformer_jax.pretrained.family import Family, Tensor, check_supported, required


def _scaling(config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Read theta and scaling from `rope_parameters` (transformers v5) or `rope_theta`, `rope_scaling` (v4)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config.json: partial_rotary_factor {rope['partial_rotary_factor']} is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(
            f"config.json: rope scaling {kind!r} is not supported: known are default, linear, llama3, yarn"
        )
    factor = float(required(rope, "factor"))
    if kind == "linear":
        return theta, RotaryScaling("linear", factor)
    length = int(rope.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048))
    if kind == "llama3":
        low, high = float(required(rope, "low_freq_factor")), float(required(rope, "high_freq_factor"))
        return theta, RotaryScaling("llama3", factor, length, low_factor=low, high_factor=high)
    if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
        raise UserError("config.json: yarn with mscale or without truncation is not supported")
    return theta, RotaryScaling(
        "yarn",
        factor,
        length,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=rope.get("attention_factor"),
    )


def _config(config: Mapping[str, Any]) -> LlamaConfig:
    check_supported(config, hidden_act="silu")
    theta, scaling = _scaling(config)
    heads = required(config, "num_attention_heads")
    return LlamaConfig(
        vocab_size=required(config, "vocab_size"),
        width=required(config, "hidden_size"),
        layers=required(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim"),
        feed_forward=required(config, "intermediate_size"),
        max_length=config.get("max_position_embeddings", 2048),
        rotary_theta=theta,
        rotary_scaling=scaling,
        attention_bias=config.get("attention_bias", False),
        feed_forward_bias=config.get("mlp_bias", False),
        tie=config.get("tie_word_embeddings", False),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
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


def _linear(theirs: str, ours: str, bias: str) -> tuple[Tensor, Tensor]:
    """Return the rows of a torch Linear; `bias` is the field of our config that enables its bias."""
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
)
