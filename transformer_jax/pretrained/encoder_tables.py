"""What the published text encoders share: how a config reads, how labels read, and rows of their tables."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
from transformer_jax.errors import UserError
from transformer_jax.pretrained.family import Tensor, check_supported, required
from transformer_jax.pretrained.tensor_files import read_json

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation_of(config: Mapping[str, Any], field: str = "hidden_act") -> str:
    """Our name of the activation that a `config.json` names.

    Raises:
      UserError: none that is computed here.
    """
    name = config.get(field, "gelu")
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: {field} {name!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def their_activation(activation: str) -> str:
    """The name in a `config.json` of one of our activations.

    Raises:
      UserError: it has none.
    """
    for theirs, ours in ACTIVATIONS.items():
        if ours == activation:
            return theirs
    raise UserError(f"no published encoder has the activation {activation!r}: keep the model as a run")


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a classifier's labels, in the order of their numbers; two where none are named."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    return tuple(f"LABEL_{n}" for n in range(int(config.get("num_labels") or 2)))


# What `problem_type` calls the kinds of targets.
PROBLEMS = {
    "single_label_classification": "label",
    "regression": "score",
    "multi_label_classification": "labels",
}


# Settings of a task that `transformers` has no fields for, under a name of ours in `config.json`.
_TASK_SETTINGS, _KEPT = "task_settings", ("pairs", "stride", "longest", "unanswerable")


def read_encoder_tokenizer(folder: pathlib.Path, described: Mapping[str, Any]) -> EncoderTokenizer:
    """The tokenizer of an encoder's folder, with the labels of `config.json` where its head has classes."""
    tokenizer = EncoderTokenizer.open(folder)
    tokenizer.settings |= sentence_settings(folder)
    kept = described.get(_TASK_SETTINGS)
    tokenizer.settings |= {n: kept[n] for n in _KEPT if n in kept} if isinstance(kept, Mapping) else {}
    architecture = next(iter(described.get("architectures") or ()), "")
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return tokenizer
    labels = labels_of(described)
    problem = described.get("problem_type")
    if problem is None and architecture.endswith("ForSequenceClassification") and len(labels) == 1:
        problem = "regression"
    target = PROBLEMS.get(str(problem), "label")
    return tokenizer.with_labels(labels, **{**tokenizer.settings, "target": target})


def sentence_settings(folder: pathlib.Path) -> dict[str, Any]:
    """How a folder of sentence-transformers makes vectors: `pooling`, `normalise` and `max_length`.

    Raises:
      UserError: a way of pooling that is not computed here, or further modules.
    """
    if not (folder / "modules.json").is_file():
        return {}
    found: dict[str, Any] = {"normalise": False}
    try:
        modules = [
            (module["type"].rpartition(".")[2], folder / module["path"])
            for module in json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder / 'modules.json'}: not modules with type and path ({error!r})") from None
    for kind, path in modules:
        if kind == "Pooling":
            described = read_json(path / "config.json")
            found["pooling"] = _pooling_of(path, described)
        elif kind == "Normalize":
            found["normalise"] = True
        elif kind != "Transformer":
            raise UserError(f"{folder / 'modules.json'}: a module {kind} is not computed here")
    # The tokenizer's limit is that of the vectors where nothing else is said, as since version 6.
    for name, field in (("sentence_bert_config.json", "max_seq_length"), _LIMIT):
        length = read_json(folder / name).get(field) if (folder / name).is_file() else None
        if isinstance(length, (int, float)) and length < _NO_LIMIT:
            return found | {"max_length": int(length)}
    return found


def _pooling_of(path: pathlib.Path, described: Mapping[str, Any]) -> str:
    """The way of pooling in a module's `config.json`: a flag of each, or since version 6 a name or several."""
    asked = described.get("pooling_mode")
    if asked is None:
        asked = [name for name, on in described.items() if name.startswith("pooling_mode_") and on is True]
    names = [asked] if isinstance(asked, str) else list(asked)
    if len(names) != 1 or names[0] not in _POOLINGS | _NAMED_POOLINGS:
        raise UserError(f"{path}: pooling by {' and '.join(map(str, names)) or 'nothing'} is not computed here")
    return (_POOLINGS | _NAMED_POOLINGS)[names[0]]


def written_settings(tokenizer: EncoderTokenizer, config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a saved folder says of the tokenizer's settings, as `read_encoder_tokenizer` reads them.

    Args:
      tokenizer: of the model.
      config: of the model.

    Returns:
      (fields of `config.json`, the contents of further JSON files by their paths: those of
      sentence-transformers where the settings say how vectors are made).
    """
    settings = tokenizer.settings
    problems = {ours: theirs for theirs, ours in PROBLEMS.items()}
    fields: dict[str, Any] = {}
    if settings.get("target") in problems:
        fields["problem_type"] = problems[settings["target"]]
    if kept := {name: settings[name] for name in _KEPT if name in settings}:
        fields[_TASK_SETTINGS] = kept
    limit = min(settings.get("max_length", config.max_length), config.max_length)
    types = ["token_type_ids"] if getattr(config, "token_types", 0) > 1 else []
    # What `transformers` makes of a text: without the first no types of a pair, without the second no cut.
    read = {"model_input_names": ["input_ids", *types, "attention_mask"], _LIMIT[1]: limit}
    further: dict[str, Any] = {_LIMIT[0]: read}
    if "pooling" not in settings:
        return fields, further
    kinds = ["Transformer", "Pooling", *(["Normalize"] if settings.get("normalise") else [])]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    pooling = {name: ours == settings["pooling"] for name, ours in _POOLINGS.items()}
    return fields, {
        **further,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": config.width, **pooling},
        "sentence_bert_config.json": {"max_seq_length": limit, "do_lower_case": False},
    }


_NAMED_POOLINGS = {"mean": "mean", "cls": "first", "max": "max"}
# The file and field of a tokenizer's limit, and what stands for none.
_LIMIT, _NO_LIMIT = ("tokenizer_config.json", "model_max_length"), 10**6
_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
}


def common_fields(config: Mapping[str, Any], *, classes: bool) -> dict[str, Any]:
    """The fields of our encoders' configs that a `config.json` in BERT's names gives.

    Args:
      config: contents of `config.json`.
      classes: whether the head has classes.

    Raises:
      UserError: a field that is missing, or a model that is not computed here.
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
        dropout=config.get("hidden_dropout_prob", 0.1),
        attention_dropout=config.get("attention_probs_dropout_prob", 0.1),
        classifier_dropout=config.get("classifier_dropout"),
        activation=activation_of(config),
        classes=len(labels_of(config)) if classes else 0,
    )


def common_description(config: Any) -> dict[str, Any]:
    """The contents of a `config.json` in BERT's names, from our config."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.classifier_dropout,
        "hidden_act": their_activation(config.activation),
        "max_position_embeddings": config.max_length + config.position_offset,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_epsilon,
        **({"num_labels": config.classes} if config.classes else {}),
    }


def linear(
    theirs: str, ours: str, *, outside: bool = False, in_config: str | None = None
) -> tuple[Tensor, ...]:
    """Weight and bias of a torch Linear."""
    options: dict[str, Any] = dict(outside=outside, in_config=in_config)
    return (
        Tensor(f"{theirs}.weight", (f"{ours}/kernel",), transposed=True, **options),
        Tensor(f"{theirs}.bias", (f"{ours}/bias",), **options),
    )


def norm(theirs: str, ours: str, *, outside: bool = False) -> tuple[Tensor, ...]:
    """Scale and bias of a torch LayerNorm."""
    return (
        Tensor(f"{theirs}.weight", (f"{ours}/scale",), outside=outside),
        Tensor(f"{theirs}.bias", (f"{ours}/bias",), outside=outside),
    )


def bert_body(ours: str, *, types: bool = True) -> tuple[Tensor, ...]:
    """Rows of the embeddings and blocks in BERT's names; `ours` is in front of our names."""
    layer, block = "encoder.layer.{layer}", f"{ours}blocks"
    return (
        Tensor("embeddings.word_embeddings.weight", (f"{ours}embeddings/tokens/table/embedding",)),
        Tensor("embeddings.position_embeddings.weight", (f"{ours}embeddings/positions/table/embedding",)),
        *(
            (Tensor("embeddings.token_type_embeddings.weight", (f"{ours}embeddings/types/embedding",)),)
            if types
            else ()
        ),
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
