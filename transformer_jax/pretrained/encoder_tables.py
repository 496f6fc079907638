"""Configs, labels, tokenizer settings and tensor tables that the published text encoders share."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer, with_current_settings
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.limits import CLASSES
from transformer_jax.pretrained import transformer_folder
from transformer_jax.pretrained.family import (
    CONFIG,
    Count,
    Family,
    Positive,
    Rate,
    Size,
    Tensor,
    check_supported,
    linear,
    norm,
)
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
    "quick_gelu": "quick_gelu",
}
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "quick_gelu"]


def activation_name(activation: str) -> str:
    """Return the name in a `config.json` of one of our activations.

    Raises:
      UserError: It has none.
    """
    for theirs, ours in ACTIVATIONS.items():
        if ours == activation:
            return theirs
    raise UserError(f"no published encoder has the activation {activation!r}: keep the model as a run")


class TaskSettings(msgspec.Struct):
    """Task settings without a field in `transformers`, which our folders store in `config.json`."""

    pairs: bool | None = None
    passages: bool | None = None
    stride: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_answer_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    unanswerable: bool | None = None


class HeadFields(msgspec.Struct):
    """Fields of a `config.json` that describe the head of a classifier, a tagger or a reader."""

    architectures: list[str] | None = None
    id2label: dict[str, str | int] | None = None
    num_labels: Annotated[int, msgspec.Meta(ge=1)] | None = None
    problem_type: Literal["single_label_classification", "regression", "multi_label_classification"] | None = (
        None
    )
    task_settings: TaskSettings | None = None


def labels_of(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of a classifier in the order of their numbers; the default is two.

    Raises:
      UserError: The numbers of `id2label` are not 0 to n - 1, or there are too many.
    """
    head = convert(hf_config, HeadFields, CONFIG)
    if not head.id2label:
        count = head.num_labels or 2
        CLASSES.check(count, f"{CONFIG}: num_labels")
        return tuple(f"LABEL_{n}" for n in range(count))
    numbers = {key: int(key) if re.fullmatch(r"0|[1-9]\d{0,9}", key) else -1 for key in head.id2label}
    if sorted(numbers.values()) != list(range(len(numbers))):
        key = next((k for k, n in numbers.items() if not 0 <= n < len(numbers)), "")
        raise UserError(
            f"{CONFIG}: id2label has the key {key!r}: its keys must be the numbers 0 to {len(numbers) - 1}"
        )
    return tuple(str(label) for _, label in sorted(head.id2label.items(), key=lambda item: numbers[item[0]]))


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


def read_encoder_tokenizer(folder: pathlib.Path, hf_config: Mapping[str, Any]) -> EncoderTokenizer:
    """Open the tokenizer of an encoder's folder, with the labels of `config.json` if its head has classes."""
    model_type = str(hf_config.get("model_type"))
    tokenizer = EncoderTokenizer.open(transformer_folder(folder), model_type=model_type)
    settings = sentence_settings(folder)
    if settings.pop("lowercase", False):
        tokenizer.lowercase()
    tokenizer.settings |= settings
    width = hf_config.get("hidden_size", hf_config.get("dim"))
    tokenizer.dense_layers = dense_layers(folder, width)
    head = convert(with_current_settings(hf_config, "task_settings"), HeadFields, CONFIG)
    if head.task_settings is not None:
        tokenizer.settings |= {
            name: value for name, value in msgspec.to_builtins(head.task_settings).items() if value is not None
        }
    architecture = next(iter(head.architectures or ()), "")
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return tokenizer
    labels = labels_of(hf_config)
    problem = head.problem_type
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
    names = TaskSettings.__struct_fields__
    if task_settings := {name: settings[name] for name in names if name in settings}:
        fields["task_settings"] = task_settings
    limit = min(settings.get("max_length", config.max_length), config.max_length)
    types = ["token_type_ids"] if getattr(config, "token_types", 0) > 1 else []
    # `transformers` needs the first field to return token types and the second one to truncate.
    tokenizer_config = {"model_input_names": ["input_ids", *types, "attention_mask"], LIMIT[1]: limit}
    further: dict[str, Any] = {LIMIT[0]: tokenizer_config}
    if "pooling" not in settings:
        return fields, further
    return fields, further | written_modules(tokenizer, config.width, limit)


class BertFields(msgspec.Struct):
    """Fields of a `config.json` with BERT's names."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size = 512
    type_vocab_size: Count | None = None
    layer_norm_eps: Positive | None = None
    hidden_dropout_prob: Rate = 0.1
    attention_probs_dropout_prob: Rate = 0.1
    classifier_dropout: Rate | None = None
    hidden_act: Activation = "gelu"
    pad_token_id: Count | None = None
    embedding_size: Size = 128
    position_embedding_type: str | None = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True


def bert_fields(hf_config: Mapping[str, Any]) -> BertFields:
    """Return the fields of a `config.json` with BERT's names.

    Raises:
      UserError: A field is missing or has another type or range, or the model is not supported.
    """
    fields = convert(hf_config, BertFields, CONFIG)
    check_supported(
        fields,
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    return fields


def common_fields(
    hf_config: Mapping[str, Any], *, classes: bool, token_types: int = 2, norm_epsilon: float = 1e-12
) -> dict[str, Any]:
    """Return the fields of our encoders' configs from a `config.json` with BERT's names.

    Args:
      hf_config: Contents of `config.json`.
      classes: Whether the head has classes.
      token_types: Number of token types if `config.json` does not contain it.
      norm_epsilon: Epsilon of the normalizations if `config.json` does not contain it.

    Raises:
      UserError: See `bert_fields`.
    """
    fields = bert_fields(hf_config)
    return dict(
        vocab_size=fields.vocab_size,
        width=fields.hidden_size,
        layers=fields.num_hidden_layers,
        heads=fields.num_attention_heads,
        feed_forward=fields.intermediate_size,
        max_length=fields.max_position_embeddings,
        token_types=token_types if fields.type_vocab_size is None else fields.type_vocab_size,
        norm_epsilon=fields.layer_norm_eps or norm_epsilon,
        dropout=fields.hidden_dropout_prob,
        attention_dropout=fields.attention_probs_dropout_prob,
        classifier_dropout=fields.classifier_dropout,
        activation=ACTIVATIONS[fields.hidden_act],
        classes=len(labels_of(hf_config)) if classes else 0,
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
    """Return the table entries of embeddings and blocks with BERT's names; `ours` prefixes our names."""
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
    """Return the table entries of `bert_body` and of the pooler, if the config has one."""
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
    unembedding: str | None = None,
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
      unembedding: Name under which the files of a masked LM may store the token embeddings.
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
        head=unembedding,
    )
