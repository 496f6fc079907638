"""The list of published families; each is one file in this package and one entry here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.json_files import convert
from transformer_jax.models.encoders.heads import SequenceClassifier
from transformer_jax.pretrained.bert import BERT
from transformer_jax.pretrained.clip import CLIP, SIGLIP
from transformer_jax.pretrained.distilbert import DISTILBERT
from transformer_jax.pretrained.electra import ELECTRA
from transformer_jax.pretrained.family import CONFIG, Family
from transformer_jax.pretrained.gpt2 import GPT2
from transformer_jax.pretrained.llama import LLAMA, MISTRAL
from transformer_jax.pretrained.longformer import LONGFORMER
from transformer_jax.pretrained.open_clip import OPEN_CLIP
from transformer_jax.pretrained.roberta import ROBERTA
from transformer_jax.pretrained.timm_vit import TIMM, TIMM_ENCODER, has_classes
from transformer_jax.pretrained.vision_decoder import VISION_DECODER
from transformer_jax.pretrained.vit import DEIT, DINOV2, DINOV2_REGISTERS, VIT
from transformer_jax.pretrained.whisper import WHISPER

# Architectures by model type; the first is the default for files that name none.
FAMILIES: dict[str, tuple[Family, ...]] = {
    families[0].model_type: families
    for families in (
        (GPT2,), (LLAMA,), (MISTRAL,), BERT, ROBERTA, ELECTRA, DISTILBERT, LONGFORMER, VIT, DEIT, DINOV2,
        DINOV2_REGISTERS, (CLIP,), (SIGLIP,), (VISION_DECODER,), (WHISPER,),
    )
}  # fmt: skip


class _Kind(msgspec.Struct):
    """The fields of a `config.json` that determine the family."""

    model_type: str | None = None
    architectures: list[str] | None = None
    architecture: str | None = None
    model_cfg: dict[str, Any] | None = None


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Return the family of a published folder.

    Args:
      config: Contents of its `config.json`.

    Raises:
      UserError: The `model_type` or the architecture is unknown.
    """
    kind = convert(config, _Kind, CONFIG)
    name = kind.model_type
    if name is None and kind.model_cfg is not None:
        return OPEN_CLIP
    if name is None and kind.architecture is not None:
        return TIMM if has_classes(config) else TIMM_ENCODER  # only timm's files have this field
    if name not in FAMILIES:
        raise UserError(
            f"config.json: unknown architecture, model_type is {name!r}: known are {', '.join(FAMILIES)}"
        )
    families = FAMILIES[name]
    architectures = kind.architectures or [families[0].architecture]
    for family in families:
        if family.architecture in architectures and family.accepts(config):
            return family
    if len(families) == 1:
        return families[0]
    raise UserError(
        f"config.json: unknown architecture {architectures[0]}: known of {name} are "
        f"{', '.join(family.architecture for family in families)}"
    )


def family_of_model(model: Any) -> Family:
    """Return the family in whose format one of our models is saved.

    Raises:
      UserError: No published family matches the model.
    """
    if isinstance(model, SequenceClassifier) and model.config.classifier_pooling != "first":
        raise UserError(
            f"a classifier with {model.config.classifier_pooling} pooling has no published format: "
            "classifiers of transformers read the first token"
        )
    families = [family for architectures in FAMILIES.values() for family in architectures]
    module, config = type(model), model.config
    matching = [f for f in families if module is f.module and f.writable and f.fits(config)]
    if matching:
        # BERT's masked LM with a pooler also has the next-sentence head, which is another architecture.
        return matching[-1] if getattr(config, "pooler", False) else matching[0]
    known = {f"{family.module.__name__} ({family.model_type})": None for family in families}
    raise UserError(f"{type(model).__name__} has no published format: known are {', '.join(known)}")
