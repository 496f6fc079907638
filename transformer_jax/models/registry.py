"""Models by the name that configs and run folders carry."""

from typing import Any, NamedTuple

from transformer_jax.models import gpt, llama, modern_gpt, transformer


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
}

DECODERS = {
    "gpt": Entry(gpt.GPTConfig, gpt.GPT, gpt.preset, gpt.PRESETS),
    "llama": Entry(llama.LlamaConfig, llama.Llama, llama.preset, llama.PRESETS),
    "modern_gpt": Entry(
        modern_gpt.ModernGPTConfig, modern_gpt.ModernGPT, modern_gpt.preset, modern_gpt.PRESETS
    ),
}

MODELS = TRANSLATORS | DECODERS
