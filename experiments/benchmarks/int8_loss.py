"""Compare the loss of a language model with that of its weights in 8 bits.

    python -m experiments.benchmarks.int8_loss --model FOLDER_OR_RUN --text FILE [--windows 64] [--json]

Both read the same windows of the text through the programs of decoding; the loss is in nats per token.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from transformer_jax import load
from transformer_jax.commands.run_command import run_command
from transformer_jax.decoding.generation import check_int8, for_decoding
from transformer_jax.errors import UserError
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.tasks.decoders.language_modeling import TrainedLanguageModel

ROWS = 8


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    model: str
    """Published folder or run folder of a language model."""
    text: str
    """Text that the model was not trained on."""
    windows: int = 64
    """Maximum number of windows of the model's context."""
    json: bool = False
    """Print a JSON object as the last line."""


def windows_of(ids: list[int], length: int, count: int) -> np.ndarray:
    """Split token ids into rows (N, length), N a multiple of `ROWS`, evenly spread over the text.

    Raises:
      UserError: The text is shorter than `ROWS` windows.
    """
    rows = len(ids) // length // ROWS * ROWS
    if not rows:
        raise UserError(f"`text` has {len(ids)} tokens and needs {ROWS * length}")
    chosen = np.linspace(0, rows - 1, min(count // ROWS * ROWS or ROWS, rows)).astype(int)
    return np.asarray(ids[: rows * length]).reshape(rows, length)[chosen]


def loss_of(model: Any, rows: np.ndarray) -> float:
    """Return the mean loss of each next token in rows (N, L), with a decoder prepared by `for_decoding`."""

    @jax.jit
    def losses(model: Any, tokens: jax.Array) -> jax.Array:
        cache = model.start(ROWS, max_length=tokens.shape[1])
        logits = model.step_function()(cache, tokens)[0].logits
        return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()

    return float(np.mean([losses(model, jnp.asarray(part)) for part in np.split(rows, len(rows) // ROWS)]))


def main() -> None:
    """Run the benchmark and print both losses."""
    arguments = tyro.cli(Arguments, description=__doc__)
    loaded = load(arguments.model)
    if not isinstance(loaded, TrainedLanguageModel):
        raise UserError(f"`model` {arguments.model} is not a language model")
    check_int8(loaded.model.config)
    (ids,) = loaded.tokenizer.encode([pathlib.Path(arguments.text).read_text()])
    rows = windows_of(ids, loaded.model.config.max_length, arguments.windows)
    results: dict[str, float] = {"tokens": rows[:, 1:].size}
    for name, int8 in (("float", False), ("int8", True)):
        model = for_decoding(loaded.model, int8=int8)
        size, loss = sum(leaf.nbytes for leaf in jax.tree.leaves(model)), loss_of(model, rows)
        results |= {f"{name}_loss": loss, f"{name}_bytes": size}
        print(f"{name:<6} {loss:.4f} nats per token, {size / 1e6:,.1f} MB", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(run_command(main))
