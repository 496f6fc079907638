"""The list of published families. A family is one file in this package, and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError
from transformer_jax.models.encoders.heads import SequenceClassifier
from transformer_jax.pretrained.bert import BERT
from transformer_jax.pretrained.distilbert import DISTILBERT
from transformer_jax.pretrained.electra import ELECTRA
from transformer_jax.pretrained.family import Family
from transformer_jax.pretrained.gpt2 import GPT2
from transformer_jax.pretrained.llama import LLAMA
from transformer_jax.pretrained.roberta import ROBERTA
from transformer_jax.pretrained.timm_vit import TIMM, TIMM_ENCODER, has_classes
from transformer_jax.pretrained.vit import DEIT, DINOV2, DINOV2_REGISTERS, VIT

# By model type, its classes; the first is taken where a file names none.
FAMILIES: dict[str, tuple[Family, ...]] = {
    families[0].model_type: families
    for families in (
        (GPT2,), (LLAMA,), BERT, ROBERTA, ELECTRA, DISTILBERT, VIT, DEIT, DINOV2, DINOV2_REGISTERS
    )
}  # fmt: skip


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family of a published folder.

    Args:
      config: contents of its `config.json`.

    Raises:
      UserError: its `model_type` is not in the list, or none of its classes is the file's.
    """
    name = config.get("model_type")
    if name is None and "architecture" in config:
        return TIMM if has_classes(config) else TIMM_ENCODER  # whose files name a model of timm
    if name not in FAMILIES:
        raise UserError(
            f"config.json: unknown architecture, model_type is {name!r}: known are {', '.join(FAMILIES)}"
        )
    families = FAMILIES[name]
    named = config.get("architectures") or [families[0].architecture]
    for family in families:
        if family.architecture in named and family.chosen(config):
            return family
    if len(families) == 1:
        return families[0]
    raise UserError(
        f"config.json: unknown architecture {named[0]}: known of {name} are "
        f"{', '.join(family.architecture for family in families)}"
    )


def family_of_model(model: Any) -> Family:
    """The family that a model of ours is written as.

    Raises:
      UserError: no family has this module.
    """
    if isinstance(model, SequenceClassifier) and model.config.classifier_pooling != "first":
        raise UserError(
            f"a classifier that reads the {model.config.classifier_pooling} of a text's states has no "
            "published format: those of transformers read the first token"
        )
    every: list[Family] = [family for families in FAMILIES.values() for family in families]
    kind, config = type(model), model.config
    own = [f for f in every if kind is f.module and f.written and f.fits(config)]
    if own:
        # BERT's masked LM with a pooler has the head of next sentences, and another class of theirs.
        return own[-1] if getattr(config, "pooler", False) else own[0]
    known = {f"{family.module.__name__} ({family.model_type})": None for family in every}
    raise UserError(f"{type(model).__name__} has no published format: known are {', '.join(known)}")
