"""A functional model zoo in JAX and Flax, from the LSTM translator to today's decoder.

Importing this package imports model definitions only; data sets, tokenizers and command lines are
imported by the functions that need them.
"""

from transformer_jax.models.gpt import GPT, GPTConfig
from transformer_jax.models.llama import Llama, LlamaConfig
from transformer_jax.models.modern_gpt import ModernGPT, ModernGPTConfig
from transformer_jax.models.transformer import Transformer, TransformerConfig

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "ModernGPT",
    "ModernGPTConfig",
    "Transformer",
    "TransformerConfig",
    "load_run",
]


def __getattr__(name: str):
    # A run needs a tokenizer and a checkpoint reader, which the model definitions do not.
    if name == "load_run":
        from transformer_jax.runs import load_run

        return load_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
