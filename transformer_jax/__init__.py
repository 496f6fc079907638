"""A functional model zoo in JAX and Flax, from the LSTM translator to today's decoder.

Importing this package imports nothing else: each name imports its module on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.models.bahdanau import Bahdanau, BahdanauConfig
    from transformer_jax.models.bert import (
        Bert,
        BertClassifier,
        BertConfig,
        BertMaskedLM,
        BertReader,
        BertTagger,
    )
    from transformer_jax.models.dino import Dino, DinoConfig
    from transformer_jax.models.distilbert import (
        DistilBert,
        DistilBertClassifier,
        DistilBertConfig,
        DistilBertMaskedLM,
        DistilBertReader,
        DistilBertTagger,
    )
    from transformer_jax.models.electra import (
        Electra,
        ElectraClassifier,
        ElectraConfig,
        ElectraDiscriminator,
        ElectraGenerator,
        ElectraPretraining,
        ElectraReader,
        ElectraTagger,
    )
    from transformer_jax.models.gpt import GPT, GPTConfig
    from transformer_jax.models.hard_attention import HardAttention, HardAttentionConfig
    from transformer_jax.models.kernel_regression import KernelRegression, KernelRegressionConfig
    from transformer_jax.models.llama import Llama, LlamaConfig
    from transformer_jax.models.luong import Luong, LuongConfig
    from transformer_jax.models.masked_autoencoder import MaskedAutoencoder, MaskedAutoencoderConfig
    from transformer_jax.models.modern_gpt import ModernGPT, ModernGPTConfig
    from transformer_jax.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
    from transformer_jax.models.roberta import (
        Roberta,
        RobertaClassifier,
        RobertaConfig,
        RobertaMaskedLM,
        RobertaReader,
        RobertaTagger,
    )
    from transformer_jax.models.seq2seq import Seq2Seq, Seq2SeqConfig
    from transformer_jax.models.transformer import Transformer, TransformerConfig
    from transformer_jax.models.vit import ViT, ViTClassifier, ViTConfig
    from transformer_jax.tasks import configure, load, train

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "Bahdanau",
    "BahdanauConfig",
    "Bert",
    "BertClassifier",
    "BertConfig",
    "BertMaskedLM",
    "BertReader",
    "BertTagger",
    "Dino",
    "DinoConfig",
    "DistilBert",
    "DistilBertClassifier",
    "DistilBertConfig",
    "DistilBertMaskedLM",
    "DistilBertReader",
    "DistilBertTagger",
    "Electra",
    "ElectraClassifier",
    "ElectraConfig",
    "ElectraDiscriminator",
    "ElectraGenerator",
    "ElectraPretraining",
    "ElectraReader",
    "ElectraTagger",
    "GPTConfig",
    "HardAttention",
    "HardAttentionConfig",
    "KernelRegression",
    "KernelRegressionConfig",
    "Llama",
    "LlamaConfig",
    "Luong",
    "LuongConfig",
    "MaskedAutoencoder",
    "MaskedAutoencoderConfig",
    "ModernGPT",
    "ModernGPTConfig",
    "RecurrentLM",
    "RecurrentLMConfig",
    "Roberta",
    "RobertaClassifier",
    "RobertaConfig",
    "RobertaMaskedLM",
    "RobertaReader",
    "RobertaTagger",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTClassifier",
    "ViTConfig",
    "configure",
    "load",
    "load_run",
    "train",
]

# The module of each name; a model's config is in its model's module.
_MODULES = {
    "Bert": "models.bert",
    "BertClassifier": "models.bert",
    "BertMaskedLM": "models.bert",
    "BertReader": "models.bert",
    "BertTagger": "models.bert",
    "DistilBert": "models.distilbert",
    "DistilBertClassifier": "models.distilbert",
    "DistilBertMaskedLM": "models.distilbert",
    "DistilBertReader": "models.distilbert",
    "DistilBertTagger": "models.distilbert",
    "Electra": "models.electra",
    "ElectraClassifier": "models.electra",
    "ElectraDiscriminator": "models.electra",
    "ElectraGenerator": "models.electra",
    "ElectraPretraining": "models.electra",
    "ElectraReader": "models.electra",
    "ElectraTagger": "models.electra",
    "Roberta": "models.roberta",
    "RobertaClassifier": "models.roberta",
    "RobertaMaskedLM": "models.roberta",
    "RobertaReader": "models.roberta",
    "RobertaTagger": "models.roberta",
    "Dino": "models.dino",
    "MaskedAutoencoder": "models.masked_autoencoder",
    "ViT": "models.vit",
    "ViTClassifier": "models.vit",
    "Bahdanau": "models.bahdanau",
    "GPT": "models.gpt",
    "HardAttention": "models.hard_attention",
    "KernelRegression": "models.kernel_regression",
    "Llama": "models.llama",
    "Luong": "models.luong",
    "ModernGPT": "models.modern_gpt",
    "RecurrentLM": "models.recurrent_lm",
    "Seq2Seq": "models.seq2seq",
    "Transformer": "models.transformer",
    "configure": "tasks",
    "load": "tasks",
    "train": "tasks",
}


def load_run(folder: Any, **options: Any) -> Any:
    """The former name of `load`."""
    import warnings

    warnings.warn("load_run is now transformer_jax.load", DeprecationWarning, stacklevel=2)
    return __getattr__("load")(folder, **options)


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name.removesuffix("Config"))
    if module is None or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
