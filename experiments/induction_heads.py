"""Induction heads: the heads that continue a repeated text, and the loss without each.

    python -m experiments.induction_heads

Trains a GPT of two layers with rotary positions on lines that repeat a random word four times, so that only the
earlier copy predicts a letter. On random letters that are repeated once, it then prints for each head its
weight on the token after the earlier copy (the induction score of Olsson et al. 2022), its weight on the
previous token, and the loss on the second copy if the head's output is replaced by its mean. Layers and heads
are counted from 0. Writes `heads.json`, `induction.png` and `ablation.png` to the run's folder. It takes a
minute on two cores of a shared AMD EPYC (2026-11-22).
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import dataclasses
import json
import pathlib
import string
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from transformer_jax import tasks
from transformer_jax.commands.run_command import run_command
from transformer_jax.errors import UserError
from transformer_jax.interpretability.ablation import ablate_head
from transformer_jax.interpretability.activations import activations, replaced
from transformer_jax.interpretability.induction import induction_scores, previous_token_scores, repeated_tokens
from transformer_jax.layers.positions.configs import Rotary
from transformer_jax.training.checkpoints import write_text_atomically
from transformer_jax.training.run_folder import is_run

LETTERS = string.ascii_lowercase
HEADS, WEIGHTS = "decoder/self_attention/heads", "decoder/self_attention/weights"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Trains a decoder of two layers on repeated words and ablates its heads one by one."""

    steps: int = 1_000
    """Training steps."""
    rows: int = 64
    """Number of texts that the heads are measured on."""
    period: int = 16
    """Letters before their repetition, 31 at most."""
    seed: int = 0
    """Of words, training and texts."""
    run_dir: str = "runs/induction"
    """Folder of the run, the table and the pictures."""


def repeated_words(rng: np.random.Generator, lines: int) -> str:
    """Lines that each repeat a random word of 2 to 16 letters four times."""
    # Copies must be short: otherwise attention to other tokens of the earlier copy predicts as well.
    return "\n".join(4 * "".join(rng.choice(list(LETTERS), rng.integers(2, 17))) for _ in range(lines))


def measure(model: Any, tokens: jax.Array, period: int) -> dict[str, Any]:
    """Scores of each head on texts that repeat, and the loss without it.

    Args:
      model: a causal decoder.
      tokens: (B, T), the same after `period` tokens.
      period: of the repetition.

    Returns:
      induction and previous: (L, H) scores; loss: of the second copy, nats a token; ablated: (L, H) the same
      loss with each head's output replaced by its mean.
    """
    logits, seen = activations(model, tokens, only=[WEIGHTS, HEADS])

    def loss(logits: jax.Array) -> jax.Array:
        # The first letter of the second copy cannot be predicted.
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, period:-1], tokens[:, period + 1 :])
        return losses.mean()

    means = seen[HEADS].mean(axis=(1, 2))  # (L, H, K)
    layers, heads = means.shape[:2]

    def without(layer: jax.Array, head: jax.Array) -> jax.Array:
        return loss(replaced(model, {HEADS: ablate_head(layer, head, by=means[layer, head])})(tokens))

    ablated = jax.jit(jax.vmap(without))(*(x.ravel() for x in jnp.indices((layers, heads))))
    return {
        "induction": induction_scores(np.asarray(seen[WEIGHTS]), period),
        "previous": previous_token_scores(np.asarray(seen[WEIGHTS])),
        "loss": float(loss(logits)),
        "ablated": np.asarray(ablated).reshape(layers, heads),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    if not 2 <= arguments.period <= 31:
        raise UserError(f"`period` {arguments.period}: two copies must fit 64 tokens, from 2 to 31")
    if arguments.seed < 0:
        raise UserError(f"`seed` {arguments.seed} is below 0")
    if not pathlib.Path(arguments.run_dir).name:
        raise UserError(f"`run_dir` {arguments.run_dir}: give the run a folder of its own")
    if arguments.rows < 1:
        raise UserError(f"`rows` {arguments.rows} is below 1")
    folder = pathlib.Path(arguments.run_dir)
    text = folder.with_name(f"{folder.name}.txt")
    if not is_run(folder) or not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(text, repeated_words(np.random.default_rng(arguments.seed), 16_000))
    config = tasks.configure(
        "language_modeling", "text", model="gpt", preset="micro", context=64, steps=arguments.steps,
        text=(str(text),), tokenizer="char", positions=Rotary(), batch_size=32, optimizer="muon",
        learning_rate=0.01, warmup=50, sample_tokens=0, seed=arguments.seed,
    )  # fmt: skip
    tasks.train(config, folder, note=lambda line: print(line, file=sys.stderr))
    run = tasks.load(folder)
    letters = np.array([ids[0] for ids in run.tokenizer.encode(list(LETTERS))])
    drawn = repeated_tokens(
        np.random.default_rng(arguments.seed + 1), arguments.rows, arguments.period, len(letters)
    )
    found = measure(run.model, jnp.asarray(letters[drawn]), arguments.period)
    print("| layer | head | induction score | previous-token score | loss without it |\n|---|---|---|---|---|")
    for layer, head in np.ndindex(found["ablated"].shape):
        numbers = (found[name][layer, head] for name in ("induction", "previous", "ablated"))
        print(f"| {layer} | {head} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    print(f"loss with all heads {found['loss']:.3f} nats; uniform guess {np.log(len(letters)):.3f}")
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}
    write_text_atomically(folder / "heads.json", json.dumps(plain, indent=1) + "\n")
    from transformer_jax.plotting.attention import plot_head_scores

    plot_head_scores(
        found["induction"],
        folder / "induction.png",
        score="induction score",
        title="Attention to the token after the earlier copy",
    )
    plot_head_scores(
        found["ablated"] - found["loss"], folder / "ablation.png", score="loss added (nats a token)",
        title="Loss without each head",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(main))
