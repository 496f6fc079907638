"""Models by the name that configs and run folders carry."""

from typing import Any, NamedTuple

from transformer_jax.models import (
    bahdanau,
    gpt,
    hard_attention,
    llama,
    luong,
    modern_gpt,
    recurrent_lm,
    seq2seq,
    transformer,
)


class Entry(NamedTuple):
    """A model's config, its module and its presets."""

    config: type
    module: type
    preset: Any
    presets: tuple[str, ...]


TRANSLATORS = {
    "transformer": Entry(
        transformer.TransformerConfig, transformer.Transformer, transformer.preset, transformer.PRESETS
    ),
    "lstm": Entry(seq2seq.Seq2SeqConfig, seq2seq.Seq2Seq, seq2seq.preset, seq2seq.PRESETS),
    "gru": Entry(seq2seq.Seq2SeqConfig, seq2seq.Seq2Seq, seq2seq.gru_preset, seq2seq.PRESETS),
    "bahdanau": Entry(bahdanau.BahdanauConfig, bahdanau.Bahdanau, bahdanau.preset, bahdanau.PRESETS),
    "hard_attention": Entry(
        hard_attention.HardAttentionConfig,
        hard_attention.HardAttention,
        hard_attention.preset,
        hard_attention.PRESETS,
    ),
    "luong": Entry(luong.LuongConfig, luong.Luong, luong.preset, luong.PRESETS),
}

DECODERS = {
    "gpt": Entry(gpt.GPTConfig, gpt.GPT, gpt.preset, gpt.PRESETS),
    "llama": Entry(llama.LlamaConfig, llama.Llama, llama.preset, llama.PRESETS),
    "modern_gpt": Entry(
        modern_gpt.ModernGPTConfig, modern_gpt.ModernGPT, modern_gpt.preset, modern_gpt.PRESETS
    ),
    "lstm": Entry(
        recurrent_lm.RecurrentLMConfig, recurrent_lm.RecurrentLM, recurrent_lm.preset, recurrent_lm.PRESETS
    ),
    "gru": Entry(
        recurrent_lm.RecurrentLMConfig, recurrent_lm.RecurrentLM, recurrent_lm.gru_preset, recurrent_lm.PRESETS
    ),
}

# What a run's `config.json` calls its kind of model: a name such as "lstm" is a model of both.
TASKS = {"translation": TRANSLATORS, "language": DECODERS}


def module_of(config: Any) -> type:
    """The module that a model's config is of."""
    return next(e.module for models in TASKS.values() for e in models.values() if e.config is type(config))
