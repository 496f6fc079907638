"""Families of published checkpoints: a table of names each, and how their configs read.

A new family is one `Family` more: its table says which tensor of theirs holds which parameters of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.layers.position_configs import Learned
from transformer_jax.layers.rotary import RotaryScaling
from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.llama import Llama, LlamaConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs, which holds one parameter of ours or several next to each other.

    Attributes:
      theirs: its name; "{layer}" stands for the number of each layer.
      ours: canonical names, without the layer, in the order in which they stand along the last axis.
      transposed: theirs is (outputs, inputs), as torch's Linear keeps it.
      in_config: the tensor is there only where this field of our config is true.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    in_config: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """How one family of published models and ours read each other.

    Attributes:
      model_type: what `config.json` calls the family.
      architecture: its class with a language-model head.
      module: ours.
      config: from their `config.json` to our config.
      describe: from our config to what their `config.json` says beyond names and dtype.
      table: every tensor.
      prefix: in front of all names but the head's, which some files leave out.
      head: name of the logits' table; tied models may have it or not.
      passed_over: regular expression of buffers that hold nothing trained.
    """

    model_type: str
    architecture: str
    module: type
    config: Callable[[Mapping[str, Any]], Any]
    describe: Callable[[Any], dict[str, Any]]
    table: tuple[Tensor, ...]
    prefix: str
    head: str
    passed_over: str


def _unsupported(config: Mapping[str, Any], **usual: Any) -> None:
    """That fields have the only values that our models compute.

    Raises:
      UserError: one has another.
    """
    for field, value in usual.items():
        if config.get(field, value) != value:
            raise UserError(f"config.json: {field} is {config[field]!r}; only {value!r} is computed here")


def _field(config: Mapping[str, Any], name: str) -> Any:
    try:
        return config[name]
    except KeyError:
        raise UserError(f"config.json: {name} is missing") from None


_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def _gpt2_config(config: Mapping[str, Any]) -> GPTConfig:
    _unsupported(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise UserError(
            f"config.json: activation_function {activation!r} is none of {', '.join(_GPT2_ACTIVATIONS)}"
        )
    width, heads = _field(config, "n_embd"), _field(config, "n_head")
    return GPTConfig(
        vocab_size=_field(config, "vocab_size"),
        width=width,
        layers=_field(config, "n_layer"),
        heads=heads,
        kv_heads=heads,
        feed_forward=config.get("n_inner") or 4 * width,
        max_length=config.get("n_positions", 1024),
        activation=_GPT2_ACTIVATIONS[activation],
        tie=config.get("tie_word_embeddings", True),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


def _describe_gpt2(config: GPTConfig) -> dict[str, Any]:
    if config.positions != Learned() or not config.use_bias or config.kv_heads != config.heads:
        raise UserError(
            "a gpt with other than learned positions, without biases or with grouped heads is no GPT-2 that "
            "others could read: keep it as a run"
        )
    theirs = {ours: name for name, ours in reversed(_GPT2_ACTIVATIONS.items())}
    if config.activation not in theirs:
        raise UserError(f"no GPT-2 has the activation {config.activation!r}: keep the model as a run")
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


def _norm(theirs: str, ours: str) -> tuple[Tensor, Tensor]:
    return Tensor(f"{theirs}.weight", (f"{ours}/scale",)), Tensor(f"{theirs}.bias", (f"{ours}/bias",))


def _dense(theirs: str, ours: str) -> tuple[Tensor, Tensor]:
    """Of GPT-2, whose dense layers keep (inputs, outputs)."""
    return Tensor(f"{theirs}.weight", (f"{ours}/kernel",)), Tensor(f"{theirs}.bias", (f"{ours}/bias",))


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    module=GPT,
    config=_gpt2_config,
    describe=_describe_gpt2,
    table=(
        Tensor("wte.weight", ("embedding/table/embedding",)),
        Tensor("wpe.weight", ("positions/table/embedding",)),
        *_norm("h.{layer}.ln_1", "blocks/attention_norm"),
        Tensor("h.{layer}.attn.c_attn.weight", _projections("kernel")),
        Tensor("h.{layer}.attn.c_attn.bias", _projections("bias")),
        *_dense("h.{layer}.attn.c_proj", "blocks/attention/output"),
        *_norm("h.{layer}.ln_2", "blocks/feed_forward_norm"),
        *_dense("h.{layer}.mlp.c_fc", "blocks/feed_forward/expand"),
        *_dense("h.{layer}.mlp.c_proj", "blocks/feed_forward/contract"),
        *_norm("ln_f", "norm"),
    ),
    prefix="transformer.",
    head="lm_head.weight",
    # The causal mask, which older files keep.
    passed_over=r"h\.\d+\.attn\.(bias|masked_bias)",
)


def _scaling(config: Mapping[str, Any]) -> tuple[float, RotaryScaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers v5) or `rope_theta` and `rope_scaling` (v4)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']} is not computed here"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(
            f"config.json: rope scaling {kind!r} is not computed here: known are default, linear, llama3, yarn"
        )
    factor = float(_field(rope, "factor"))
    if kind == "linear":
        return theta, RotaryScaling("linear", factor)
    length = int(rope.get("original_max_position_embeddings") or config.get("max_position_embeddings", 2048))
    if kind == "llama3":
        low, high = float(_field(rope, "low_freq_factor")), float(_field(rope, "high_freq_factor"))
        return theta, RotaryScaling("llama3", factor, length, low_factor=low, high_factor=high)
    if rope.get("mscale") or rope.get("mscale_all_dim") or rope.get("truncate") is False:
        raise UserError("config.json: yarn with mscale or without truncation is not computed here")
    return theta, RotaryScaling(
        "yarn",
        factor,
        length,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=rope.get("attention_factor"),
    )


def _llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    _unsupported(config, hidden_act="silu")
    theta, scaling = _scaling(config)
    heads = _field(config, "num_attention_heads")
    return LlamaConfig(
        vocab_size=_field(config, "vocab_size"),
        width=_field(config, "hidden_size"),
        layers=_field(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim"),
        feed_forward=_field(config, "intermediate_size"),
        max_length=config.get("max_position_embeddings", 2048),
        rotary_theta=theta,
        rotary_scaling=scaling,
        attention_bias=config.get("attention_bias", False),
        feed_forward_bias=config.get("mlp_bias", False),
        tie=config.get("tie_word_embeddings", False),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


def _describe_llama(config: LlamaConfig) -> dict[str, Any]:
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
        # As transformers v5 reads it, and as v4 does.
        "rope_parameters": rope,
        "rope_theta": config.rotary_theta,
        "rope_scaling": None if config.rotary_scaling is None else rope,
    }


def _linear(theirs: str, ours: str, bias: str) -> tuple[Tensor, Tensor]:
    """Of torch's Linear; `bias` is the field of our config that says whether there is one."""
    return (
        Tensor(f"layers.{{layer}}.{theirs}.weight", (f"blocks/{ours}/kernel",), transposed=True),
        Tensor(f"layers.{{layer}}.{theirs}.bias", (f"blocks/{ours}/bias",), in_config=bias),
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    module=Llama,
    config=_llama_config,
    describe=_describe_llama,
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
    passed_over=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA)}


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
      UserError: none that is known.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UserError(
            f"config.json: unknown architecture, model_type is {name!r}: known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def family_of_model(model: Any) -> Family:
    """The family that a model of ours is published as.

    Raises:
      UserError: none.
    """
    for family in FAMILIES.values():
        if type(model) is family.module:
            return family
    raise UserError(
        f"{type(model).__name__} has no published format: known are "
        f"{', '.join(f'{f.module.__name__} ({f.model_type})' for f in FAMILIES.values())}"
    )
