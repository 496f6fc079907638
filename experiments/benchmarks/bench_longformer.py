"""Compare a training step of Longformer with `transformers` on torch.

    python -m experiments.benchmarks.bench_longformer [--rounds 5] [--length 4096] [--json]

A classifier of 6 layers and width 384 with 12 heads and a window of 512 (MiniLM's size), one text of the given
length per step, dropout 0.1 (including attention weights), AdamW, float32, all cores. Each side runs in a
separate process, and their measurements alternate. Needs torch and transformers.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.training_step import our_stepper, torch_stepper
from transformer_jax.commands.interleaved_rounds import compare, print_rates, processor

V = 8_000
OPTIMIZER: dict[str, Any] = dict(rate=1e-4, weight_decay=0.01, clip=1, b1=0.9, b2=0.999, epsilon=1e-6)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 5
    """Measurements per side."""
    length: int = 4_096
    """Tokens of a text."""
    rows: int = 1
    """Texts per step."""
    window: int = 512
    """Width of the window."""
    json: bool = False
    """Print a JSON object as the last line."""


def tokens_of(arguments: Arguments) -> np.ndarray:
    """Return random tokens (rows, length)."""
    return np.random.default_rng(0).integers(5, V, (arguments.rows, arguments.length))


def ours(arguments: Arguments) -> dict[str, Callable[[], Any]]:
    """Return a job of one training step."""
    from transformer_jax.models.encoders.longformer import LongformerClassifier, LongformerConfig
    from transformer_jax.tasks.encoders.sequence_classification import Classes
    from transformer_jax.training.trained_model import make_model

    config = LongformerConfig(
        vocab_size=V, width=384, layers=6, heads=12, feed_forward=1_536, max_length=arguments.length,
        window=arguments.window, classes=2,
    )  # fmt: skip
    tokens = tokens_of(arguments).astype(np.int32)
    batch = {
        "tokens": tokens,
        "types": np.zeros_like(tokens),
        "segments": np.ones_like(tokens),
        "weight": np.ones(arguments.rows, np.float32),
        "target": np.zeros(arguments.rows, np.int32),
    }
    step = our_stepper(make_model(LongformerClassifier, config), Classes(), **OPTIMIZER)
    return {"training": lambda: step(batch)}


def torch_training(arguments: Arguments) -> dict[str, Callable[[], Any]]:
    """Return a job of one training step."""
    import torch
    from transformers import LongformerConfig, LongformerForSequenceClassification

    config = LongformerConfig(
        vocab_size=V, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1_536,
        max_position_embeddings=arguments.length + 2, type_vocab_size=1, attention_window=arguments.window,
    )  # fmt: skip
    tokens = torch.tensor(tokens_of(arguments))
    inputs = dict(
        input_ids=tokens, attention_mask=torch.ones_like(tokens),
        labels=torch.zeros(arguments.rows, dtype=torch.long),
    )  # fmt: skip
    step = torch_stepper(LongformerForSequenceClassification(config), rate=OPTIMIZER["rate"])
    return {"training": lambda: step(**inputs)}


def main() -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__)
    report = compare({"training": 1}, {"ours": ours, "torch": torch_training}, arguments, arguments.rounds)
    summary = {"processor": processor(), **print_rates(report, {"training": arguments.rows}, "examples")}
    print(summary["processor"])
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
