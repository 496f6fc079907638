"""Published checkpoints and our trees: `load` a Hugging Face folder, `save` one that `transformers` loads."""

from transformer_jax.pretrained.folder import load, save

__all__ = ["load", "save"]
