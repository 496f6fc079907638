"""Models by the name that configs and run folders carry."""

from typing import Any, NamedTuple

from transformer_jax.models import transformer


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
