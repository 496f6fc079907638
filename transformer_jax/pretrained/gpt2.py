"""GPT-2 (Radford et al. 2019) as `transformers` publishes it: `GPT2LMHeadModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.layers.positions.configs import Learned
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.pretrained.family import CONFIG, Family, Positive, Size, Tensor, check_supported, norm

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


class _Fields(msgspec.Struct):
    vocab_size: Size
    n_embd: Size
    n_layer: Size
    n_head: Size
    n_inner: Size | None = None
    n_positions: Size = 1024
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "relu"] = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False


def _config(hf_config: Mapping[str, Any]) -> GPTConfig:
    fields = convert(hf_config, _Fields, CONFIG)
    check_supported(
        fields, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    return GPTConfig(
        vocab_size=fields.vocab_size,
        width=fields.n_embd,
        layers=fields.n_layer,
        heads=fields.n_head,
        kv_heads=fields.n_head,
        feed_forward=fields.n_inner or 4 * fields.n_embd,
        max_length=fields.n_positions,
        activation=_ACTIVATIONS[fields.activation_function],
        tie=fields.tie_word_embeddings,
        norm_epsilon=fields.layer_norm_epsilon,
    )


def _describe(config: GPTConfig) -> dict[str, Any]:
    if config.positions != Learned() or not config.use_bias or config.kv_heads != config.heads:
        raise UserError(
            "GPT-2's format needs learned positions, biases and ungrouped heads: keep the model as a run"
        )
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    if config.activation not in theirs:
        raise UserError(f"GPT-2's format has no activation {config.activation!r}: keep the model as a run")
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.feed_forward,
        "n_positions": config.max_length,
        "activation_function": theirs[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


def _projections(kind: str) -> tuple[str, ...]:
    return tuple(f"blocks/attention/{name}/{kind}" for name in ("query", "key", "value"))


def dense(theirs: str, ours: str) -> tuple[Tensor, Tensor]:
    """Return the table entries of a dense layer, whose weight GPT-2 stores as (inputs, outputs)."""
    return Tensor(f"{theirs}.weight", (f"{ours}/kernel",)), Tensor(f"{theirs}.bias", (f"{ours}/bias",))


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    module=GPT,
    config=_config,
    describe=_describe,
    table=(
        Tensor("wte.weight", ("embedding/table/embedding",)),
        Tensor("wpe.weight", ("positions/table/embedding",)),
        *norm("h.{layer}.ln_1", "blocks/attention_norm"),
        Tensor("h.{layer}.attn.c_attn.weight", _projections("kernel")),
        Tensor("h.{layer}.attn.c_attn.bias", _projections("bias")),
        *dense("h.{layer}.attn.c_proj", "blocks/attention/output"),
        *norm("h.{layer}.ln_2", "blocks/feed_forward_norm"),
        *dense("h.{layer}.mlp.c_fc", "blocks/feed_forward/expand"),
        *dense("h.{layer}.mlp.c_proj", "blocks/feed_forward/contract"),
        *norm("ln_f", "norm"),
    ),
    prefix="transformer.",
    head="lm_head.weight",
    # Older files store the causal mask.
    ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
)
