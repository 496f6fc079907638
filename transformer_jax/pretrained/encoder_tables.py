"""Configs, labels, tokenizer settings and tensor tables that the published text encoders share."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.pretrained.family import Family, Tensor, check_supported, linear, norm, required
from transformer_jax.pretrained.sentence_modules import (
    LIMIT,
    dense_layers,
    sentence_settings,
    written_modules,
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation_of(config: Mapping[str, Any], field: str = "hidden_act") -> str:
    """Return our name of the activation in a `config.json`.

    Raises:
      UserError: The activation is not supported.
    """
    name = config.get(field, "gelu")
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: {field} {name!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(activation: str) -> str:
    """Return the name in a `config.json` of one of our activations.

    Raises:
      UserError: It has none.
    """
    for theirs, ours in ACTIVATIONS.items():
        if ours == activation:
            return theirs
    raise UserError(f"no published encoder has the activation {activation!r}: keep the model as a run")


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a classifier in the order of their numbers; the default is two."""
    labels = config.get("id2label")
    if isinstance(labels, Mapping) and labels:
        return tuple(str(labels[key]) for key in sorted(labels, key=int))
    return tuple(f"LABEL_{n}" for n in range(int(config.get("num_labels") or 2)))


# Our targets by the `problem_type` of `config.json`.
PROBLEMS = {
    "single_label_classification": "label",
    "regression": "score",
    "multi_label_classification": "labels",
}
# Rows of the heads for classification (texts, tokens, images) and question answering.
CLASS_HEAD = linear("classifier", "head", unprefixed=True)
DENSE_CLASS_HEAD = (
    *linear("classifier.dense", "pooling", unprefixed=True),
    *linear("classifier.out_proj", "head", unprefixed=True),
)
ANSWER_HEAD = linear("qa_outputs", "head", unprefixed=True)
# Task settings without a field in `transformers`; they have a field of our own in `config.json`.
_TASK_SETTINGS, _SETTING_NAMES = "task_settings", ("pairs", "stride", "longest", "unanswerable")


def read_encoder_tokenizer(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> EncoderTokenizer:
    """Open the tokenizer of an encoder's folder, with the labels of `config.json` if its head has classes."""
    tokenizer = EncoderTokenizer.open(folder)
    tokenizer.settings |= sentence_settings(folder)
    tokenizer.dense_layers = dense_layers(folder)
    saved = hf_config.get(_TASK_SETTINGS)
    if isinstance(saved, Mapping):
        tokenizer.settings |= {name: saved[name] for name in _SETTING_NAMES if name in saved}
    architecture = next(iter(hf_config.get("architectures") or ()), "")
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return tokenizer
    labels = labels_of(hf_config)
    problem = hf_config.get("problem_type")
    if problem is None and architecture.endswith("ForSequenceClassification") and len(labels) == 1:
        problem = "regression"
    target = PROBLEMS.get(str(problem), "label")
    return tokenizer.with_labels(labels, **{**tokenizer.settings, "target": target})


def written_settings(tokenizer: EncoderTokenizer, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the files that store a tokenizer's settings, as `read_encoder_tokenizer` reads them.

    Args:
      tokenizer: The model's tokenizer.
      config: The model's config.

    Returns:
      (fields of `config.json`, contents of further files by path). With a `pooling` setting the files include
      those of sentence-transformers.
    """
    settings = tokenizer.settings
    problems = {ours: theirs for theirs, ours in PROBLEMS.items()}
    fields: dict[str, Any] = {}
    if settings.get("target") in problems:
        fields["problem_type"] = problems[settings["target"]]
    if task_settings := {name: settings[name] for name in _SETTING_NAMES if name in settings}:
        fields[_TASK_SETTINGS] = task_settings
    limit = min(settings.get("max_length", config.max_length), config.max_length)
    types = ["token_type_ids"] if getattr(config, "token_types", 0) > 1 else []
    # `transformers` needs the first field to return token types and the second one to truncate.
    tokenizer_config = {"model_input_names": ["input_ids", *types, "attention_mask"], LIMIT[1]: limit}
    further: dict[str, Any] = {LIMIT[0]: tokenizer_config}
    if "pooling" not in settings:
        return fields, further
    return fields, further | written_modules(tokenizer, config.width, limit)


def common_fields(
    config: Mapping[str, Any], *, classes: bool, token_types: int = 2, norm_epsilon: float = 1e-12
) -> dict[str, Any]:
    """Return the fields of our encoders' configs from a `config.json` with BERT's names.

    Args:
      config: Contents of `config.json`.
      classes: Whether the head has classes.
      token_types: Number of token types if `config.json` does not contain it.
      norm_epsilon: Epsilon of the normalizations if `config.json` does not contain it.

    Raises:
      UserError: A field is missing, or the model is not supported.
    """
    check_supported(
        config,
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    return dict(
        vocab_size=required(config, "vocab_size"),
        width=required(config, "hidden_size"),
        layers=required(config, "num_hidden_layers"),
        heads=required(config, "num_attention_heads"),
        feed_forward=required(config, "intermediate_size"),
        max_length=config.get("max_position_embeddings", 512),
        token_types=config.get("type_vocab_size", token_types),
        norm_epsilon=config.get("layer_norm_eps", norm_epsilon),
        dropout=config.get("hidden_dropout_prob", 0.1),
        attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
        classifier_dropout=config.get("classifier_dropout"),
        activation=activation_of(config),
        classes=len(labels_of(config)) if classes else 0,
    )


def common_description(config: Any) -> dict[str, Any]:
    """Return the contents of a `config.json` with BERT's names from our config."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.classifier_dropout,
        "hidden_act": activation_name(config.activation),
        "max_position_embeddings": config.max_length + config.position_offset,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_epsilon,
        **({"num_labels": config.classes} if config.classes else {}),
    }


def bert_body(ours: str) -> tuple[Tensor, ...]:
    """Return the rows of embeddings and blocks with BERT's names; `ours` is the prefix of our names."""
    layer, block = "encoder.layer.{layer}", f"{ours}blocks"
    return (
        Tensor("embeddings.word_embeddings.weight", (f"{ours}embeddings/tokens/table/embedding",)),
        Tensor("embeddings.position_embeddings.weight", (f"{ours}embeddings/positions/table/embedding",)),
        Tensor("embeddings.token_type_embeddings.weight", (f"{ours}embeddings/types/embedding",)),
        *norm("embeddings.LayerNorm", f"{ours}embeddings/norm"),
        *linear(f"{layer}.attention.self.query", f"{block}/self_attention/query"),
        *linear(f"{layer}.attention.self.key", f"{block}/self_attention/key"),
        *linear(f"{layer}.attention.self.value", f"{block}/self_attention/value"),
        *linear(f"{layer}.attention.output.dense", f"{block}/self_attention/output"),
        *norm(f"{layer}.attention.output.LayerNorm", f"{block}/self_attention_norm"),
        *linear(f"{layer}.intermediate.dense", f"{block}/feed_forward/expand"),
        *linear(f"{layer}.output.dense", f"{block}/feed_forward/contract"),
        *norm(f"{layer}.output.LayerNorm", f"{block}/feed_forward_norm"),
    )


def bert_body_with_pooler(ours: str) -> tuple[Tensor, ...]:
    """Return the rows of `bert_body` and of the pooler, if the config has one."""
    return (*bert_body(ours), *linear("pooler.dense", f"{ours}pooler", in_config="pooler"))


def encoder_family(
    model_type: str,
    architecture: str,
    module: type,
    *heads: Tensor,
    config: Callable[[Mapping[str, Any]], Any],
    body: Callable[[str], tuple[Tensor, ...]],
    describe: Callable[[Any], dict[str, Any]] = common_description,
    ignored: str,
    optional: tuple[str, ...] | None = None,
) -> Family:
    """Return the family of a text encoder, alone or with a head; see `Family`.

    Args:
      model_type: The `model_type` in `config.json`, and the prefix of the tensors' names.
      architecture: Class name in the `architectures` of `config.json`.
      module: Our model class; one with a head holds the encoder as `encoder`.
      *heads: Rows of the head.
      config: Function from the contents of `config.json` to our config.
      body: Function from the prefix of our names to the rows of the encoder.
      describe: Function from our config to the contents of `config.json`.
      ignored: Regular expression for tensors that are not read, besides stored positions and types.
      optional: See `Family`.
    """
    return Family(
        model_type=model_type,
        architecture=architecture,
        module=module,
        config=config,
        describe=describe,
        table=(*body("encoder/" if heads else ""), *heads),
        prefix=f"{model_type}.",
        ignored=rf"embeddings\.(position|token_type)_ids|{ignored}",
        processor=read_encoder_tokenizer,
        settings=written_settings,
        optional=optional,
    )
