"""Time a training step with and without the fusion barriers of `layers/fusion_barrier.py`.

    python -m experiments.benchmarks.bench_fusion_barrier [--preset tiny] [--rows 85] [--length 24] [--rounds 5]

The measurements alternate; their medians and the ratio are printed. Fusion barriers only have an effect on a
CPU.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
import optax
import tyro

from transformer_jax.layers import fusion_barrier
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig
from transformer_jax.tasks.translators.objective import TokenLoss
from transformer_jax.training.step import create_state, make_train_step
from transformer_jax.training.trained_model import make_model


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    preset: str = "tiny"
    """Size of the Transformer."""
    rows: int = 85
    """Sentences in a batch."""
    length: int = 24
    """Tokens of each source and target."""
    vocab_size: int = 1_500
    """Size of the vocabulary."""
    rounds: int = 5
    """Number of rounds, each with five steps of both programs."""


def main() -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__)
    tokens = np.random.default_rng(0).integers(
        3, arguments.vocab_size, (arguments.rows, arguments.length), np.int32
    )
    batch = {"source": tokens, "target_in": tokens, "target_out": tokens}
    model = make_model(
        Transformer, TransformerConfig.preset(arguments.preset, arguments.vocab_size, dropout=0.0)
    )
    optimizer = optax.adam(1e-3)
    with_barriers = fusion_barrier._branch
    steps: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, barrier in (("with barriers", with_barriers), ("without", lambda x: x)):
        fusion_barrier._branch = barrier  # The name is looked up when the step is lowered.
        states[name] = create_state(jax.tree.map(lambda x: x.copy(), model), optimizer, jax.random.key(0))
        jax.clear_caches()  # Cached traces contain the other barrier.
        step: Any = make_train_step(TokenLoss(0.1), optimizer)
        steps[name] = step.lower(states[name], batch).compile()
    fusion_barrier._branch = with_barriers
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, compiled in steps.items():
            for _ in range(5):
                start_time = time.perf_counter()
                states[name], metrics = compiled(states[name], batch)
                jax.block_until_ready(metrics)
                seconds[name].append(time.perf_counter() - start_time)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:14} {value:.3f} s per step")
    print(f"ratio          {medians['without'] / medians['with barriers']:.2f}")


if __name__ == "__main__":
    main()
