"""Find induction heads, which continue a repeated text, and measure the loss without each head.

    python -m experiments.induction_heads

A GPT of two layers with rotary positions is trained on lines that repeat a random word four times, so that only
the earlier copy predicts a letter. On random letters that are repeated once, the table lists for each head its
weight on the token after the earlier copy (the induction score of Olsson et al. 2022), its weight on the
previous token, and the loss on the second copy if the head's output is replaced by its mean. Layers and heads
are counted from 0. `heads.json`, `induction.png` and `ablation.png` are saved in the run's folder. It takes one
minute on two cores of an AMD EPYC.
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
from transformer_jax.training.manifests import write_text_atomically
from transformer_jax.training.run_folder import is_run

LETTERS = string.ascii_lowercase
HEADS, WEIGHTS = "decoder/self_attention/heads", "decoder/self_attention/weights"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this experiment."""

    steps: int = 1_000
    """Training steps."""
    rows: int = 64
    """Number of texts for the scores of the heads."""
    period: int = 16
    """Number of letters that are repeated, at most 31."""
    seed: int = 0
    """Seed of the words, the training and the texts."""
    run_dir: str = "runs/induction"
    """Folder of the run, the table and the pictures."""


def repeated_words(rng: np.random.Generator, lines: int) -> str:
    """Return lines that repeat a random word of 2 to 16 letters four times."""
    # With longer words, attention to other tokens of the earlier copy would predict the next letter too.
    return "\n".join(4 * "".join(rng.choice(list(LETTERS), rng.integers(2, 17))) for _ in range(lines))


def measure(model: Any, tokens: jax.Array, period: int) -> dict[str, Any]:
    """Compute the scores of each head on texts with a repetition, and the loss without each head.

    Args:
      model: A causal decoder.
      tokens: Token ids (B, T) that repeat after `period` tokens.
      period: Period of the texts.

    Returns:
      A dictionary with the scores "induction" and "previous" (L, H); "loss", that of the second copy in nats
      per token; and "ablated" (L, H), the same loss with the output of one head replaced by its mean.
    """
    logits, values = activations(model, tokens, only=[WEIGHTS, HEADS])

    def loss(logits: jax.Array) -> jax.Array:
        # The first letter of the second copy cannot be predicted.
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, period:-1], tokens[:, period + 1 :])
        return losses.mean()

    means = values[HEADS].mean(axis=(1, 2))  # (L, H, K)
    layers, heads = means.shape[:2]

    def ablated_loss(layer: jax.Array, head: jax.Array) -> jax.Array:
        return loss(replaced(model, {HEADS: ablate_head(layer, head, by=means[layer, head])})(tokens))

    ablated = jax.jit(jax.vmap(ablated_loss))(*(x.ravel() for x in jnp.indices((layers, heads))))
    return {
        "induction": induction_scores(np.asarray(values[WEIGHTS]), period),
        "previous": previous_token_scores(np.asarray(values[WEIGHTS])),
        "loss": float(loss(logits)),
        "ablated": np.asarray(ablated).reshape(layers, heads),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    if not 2 <= arguments.period <= 31:
        raise UserError(f"`period` {arguments.period} is not between 2 and 31: two copies must fit 64 tokens")
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
    indices = repeated_tokens(
        np.random.default_rng(arguments.seed + 1), arguments.rows, arguments.period, len(letters)
    )
    results = measure(run.model, jnp.asarray(letters[indices]), arguments.period)
    print("| layer | head | induction score | previous-token score | loss without it |\n|---|---|---|---|---|")
    for layer, head in np.ndindex(results["ablated"].shape):
        numbers = (results[name][layer, head] for name in ("induction", "previous", "ablated"))
        print(f"| {layer} | {head} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    print(f"loss with all heads {results['loss']:.3f} nats; uniform guess {np.log(len(letters)):.3f}")
    table = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in results.items()}
    write_text_atomically(folder / "heads.json", json.dumps(table, indent=1) + "\n")
    from transformer_jax.plotting.attention import plot_head_scores

    plot_head_scores(
        results["induction"],
        folder / "induction.png",
        score="induction score",
        title="Attention to the token after the earlier copy",
    )
    plot_head_scores(
        results["ablated"] - results["loss"], folder / "ablation.png", score="added loss (nats per token)",
        title="Loss without each head",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_command(main))
