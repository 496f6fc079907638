"""The models by kind and by the name that configs and run folders use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_jax.models.decisions.decision_transformer import (
    DecisionTransformer,
    DecisionTransformerConfig,
)
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.models.decoders.llama import Llama, LlamaConfig
from transformer_jax.models.decoders.modern_gpt import ModernGPT, ModernGPTConfig
from transformer_jax.models.decoders.recurrent_lm import RecurrentLM, RecurrentLMConfig
from transformer_jax.models.encoders.bert import (
    Bert,
    BertClassifier,
    BertConfig,
    BertMaskedLM,
    BertReader,
    BertTagger,
)
from transformer_jax.models.encoders.distilbert import (
    DistilBert,
    DistilBertClassifier,
    DistilBertConfig,
    DistilBertMaskedLM,
    DistilBertReader,
    DistilBertTagger,
)
from transformer_jax.models.encoders.electra import (
    Electra,
    ElectraClassifier,
    ElectraConfig,
    ElectraDiscriminator,
    ElectraGenerator,
    ElectraPretraining,
    ElectraReader,
    ElectraTagger,
)
from transformer_jax.models.encoders.longformer import (
    Longformer,
    LongformerClassifier,
    LongformerConfig,
    LongformerMaskedLM,
    LongformerReader,
    LongformerTagger,
)
from transformer_jax.models.encoders.roberta import (
    Roberta,
    RobertaClassifier,
    RobertaConfig,
    RobertaMaskedLM,
    RobertaReader,
    RobertaTagger,
)
from transformer_jax.models.graphs.graphormer import Graphormer, GraphormerConfig
from transformer_jax.models.multimodal.captioner import Captioner, CaptionerConfig
from transformer_jax.models.multimodal.clip import Clip, ClipConfig
from transformer_jax.models.regression.kernel_regression import KernelRegression, KernelRegressionConfig
from transformer_jax.models.speech.whisper import Whisper, WhisperConfig
from transformer_jax.models.translators.bahdanau import Bahdanau, BahdanauConfig
from transformer_jax.models.translators.hard_attention import HardAttention, HardAttentionConfig
from transformer_jax.models.translators.luong import Luong, LuongConfig
from transformer_jax.models.translators.seq2seq import Seq2Seq, Seq2SeqConfig
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.models.vision.dino import Dino, DinoConfig
from transformer_jax.models.vision.masked_autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
from transformer_jax.models.vision.vit import ViT, ViTClassifier, ViTConfig


class ModelEntry(NamedTuple):
    """A model's config and module.

    Attributes:
      config: Config dataclass with presets; see `Presets`.
      module: Module class that the config configures.
      changes: Fields whose values under this name differ from the config's defaults.
    """

    config: Any
    module: Any
    changes: Mapping[str, Any] = {}

    def preset(self, name: str, vocab_size: int | None = None, **changes: Any) -> Any:
        """Return the config of a named size; see `Presets.preset`."""
        return self.config.preset(name, vocab_size, **{**self.changes, **changes})

    @property
    def presets(self) -> tuple[str, ...]:
        """Names of the presets."""
        return self.config.presets


def _encoders(bert: Any, roberta: Any, electra: Any, distilbert: Any, longformer: Any) -> dict[str, ModelEntry]:
    """Return the entries of the text encoders with one task's head."""
    return {
        "bert": ModelEntry(BertConfig, bert),
        "roberta": ModelEntry(RobertaConfig, roberta),
        "electra": ModelEntry(ElectraConfig, electra),
        "distilbert": ModelEntry(DistilBertConfig, distilbert),
        "longformer": ModelEntry(LongformerConfig, longformer),
    }


# A name such as "lstm" may name a model in several kinds.
MODELS: dict[str, dict[str, ModelEntry]] = {
    "translator": {
        "transformer": ModelEntry(TransformerConfig, Transformer),
        "lstm": ModelEntry(Seq2SeqConfig, Seq2Seq),
        "gru": ModelEntry(Seq2SeqConfig, Seq2Seq, {"cell": "gru"}),
        "bahdanau": ModelEntry(BahdanauConfig, Bahdanau),
        "hard_attention": ModelEntry(HardAttentionConfig, HardAttention),
        "luong": ModelEntry(LuongConfig, Luong),
    },
    "decoder": {
        "gpt": ModelEntry(GPTConfig, GPT),
        "llama": ModelEntry(LlamaConfig, Llama),
        "modern_gpt": ModelEntry(ModernGPTConfig, ModernGPT),
        "lstm": ModelEntry(RecurrentLMConfig, RecurrentLM),
        "gru": ModelEntry(RecurrentLMConfig, RecurrentLM, {"cell": "gru"}),
    },
    "encoder": _encoders(Bert, Roberta, Electra, DistilBert, Longformer),
    "masked_lm": _encoders(
        BertMaskedLM, RobertaMaskedLM, ElectraGenerator, DistilBertMaskedLM, LongformerMaskedLM
    ),
    "replaced_token": {"electra": ModelEntry(ElectraConfig, ElectraPretraining)},
    "discriminator": {"electra": ModelEntry(ElectraConfig, ElectraDiscriminator)},
    "sequence_classifier": _encoders(
        BertClassifier, RobertaClassifier, ElectraClassifier, DistilBertClassifier, LongformerClassifier
    ),
    "token_classifier": _encoders(BertTagger, RobertaTagger, ElectraTagger, DistilBertTagger, LongformerTagger),
    "span_predictor": _encoders(BertReader, RobertaReader, ElectraReader, DistilBertReader, LongformerReader),
    "image_encoder": {"vit": ModelEntry(ViTConfig, ViT)},
    "image_classifier": {"vit": ModelEntry(ViTConfig, ViTClassifier)},
    "self_distillation": {"vit": ModelEntry(DinoConfig, Dino)},
    "masked_autoencoder": {"vit": ModelEntry(MaskedAutoencoderConfig, MaskedAutoencoder)},
    "image_text_encoder": {
        "clip": ModelEntry(ClipConfig, Clip),
        "siglip": ModelEntry(ClipConfig, Clip, {"similarity": "sigmoid"}),
    },
    "captioner": {"captioner": ModelEntry(CaptionerConfig, Captioner)},
    "speech_recognizer": {"whisper": ModelEntry(WhisperConfig, Whisper)},
    "policy": {"decision_transformer": ModelEntry(DecisionTransformerConfig, DecisionTransformer)},
    "graph_predictor": {"graphormer": ModelEntry(GraphormerConfig, Graphormer)},
}
TRANSLATORS, DECODERS = MODELS["translator"], MODELS["decoder"]

_CLASSES = [cls for models in MODELS.values() for entry in models.values() for cls in entry[:2]]
# The names that `transformer_jax` exports. Kernel regression is fitted by an experiment instead of a task.
PUBLIC: dict[str, type] = {cls.__name__: cls for cls in (*_CLASSES, KernelRegressionConfig, KernelRegression)}


def module_of(config: Any, kind: str | None = None) -> type:
    """Return the module class that a config configures.

    Args:
      config: The config of any model in `MODELS`.
      kind: The model's kind, needed if several kinds share the config, as the encoders' task models do.
    """
    tables = MODELS.values() if kind is None else (MODELS[kind],)
    return next(e.module for models in tables for e in models.values() if e.config is type(config))


def name_of(models: Mapping[str, ModelEntry], config: Any) -> str:
    """Return the name of the model that a config configures.

    Args:
      models: The models of one kind, by name.
      config: The config of one of them; if several names share it, their `changes` distinguish them.

    Raises:
      ValueError: The config does not belong to any of the models.
    """
    entries = {name: entry for name, entry in models.items() if entry.config is type(config)}
    if not entries:
        raise ValueError(f"{type(config).__name__} does not configure any of {', '.join(models)}")
    matching = [n for n, e in entries.items() if all(getattr(config, f) == v for f, v in e.changes.items())]
    # The name with most changes is the most specific: a config with cell="gru" matches "lstm" too.
    return max(matching, key=lambda name: len(entries[name].changes)) if matching else next(iter(entries))
