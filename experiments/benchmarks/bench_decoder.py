"""GPT-2 here and in `transformers` on torch: training steps and generation, in interleaved rounds.

    python -m experiments.benchmarks.bench_decoder [--rounds 7] [--json]

Training: 6 layers, width 384, 6 heads, vocabulary 65, 16 rows of 256 tokens, float32, no dropout, AdamW.
Generation: GPT-2 124M with the very same random weights, float32, greedy, 64 tokens behind a prompt of 16, for
1 and for 8 rows; `transformers` uses its own key/value cache. Each side has a process of its own, and their
measurements alternate; medians are compared, and every ratio is this package's throughput over torch's. The
bandwidth is that of products of a 1 GiB matrix and a vector, measured in the same rounds as the generation,
since the memory of a shared machine varies in speed: the better of NumPy's and torch's. The fraction of it
counts each weight once a token. Needs torch and transformers; seven rounds took four minutes on two cores of an
AMD EPYC (2026-11-21).
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # the processes of both sides inherit it

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.interleaved_rounds import compare

ROWS, LENGTH = 16, 256
SMALL: dict[str, Any] = dict(layers=6, width=384, heads=6, kv_heads=6, feed_forward=4 * 384, max_length=LENGTH)
PROMPT, NEW = 16, 64
GENERATION = ("first", "generation_1", "generation_8")
RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Throughput of this package over that of transformers on torch at the same sizes."""

    rounds: int = 7
    """Measurements of each side."""
    preset: str = "124M"
    """GPT-2's size for the generation; another only to test the command."""
    json: bool = False
    """Print one JSON object last on standard output."""


def training_tokens() -> np.ndarray:
    """(ROWS, LENGTH + 1) token ids."""
    return np.random.default_rng(0).integers(0, 65, (ROWS, LENGTH + 1), np.int64)


def prompts(rows: int) -> np.ndarray:
    """(rows, PROMPT) token ids."""
    return np.random.default_rng(1).integers(0, 50_257, (rows, PROMPT), np.int64)


def weights(preset: str, folder: str) -> int:
    """Writes random weights as a published folder; returns the bytes that a token reads of them."""
    from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
    from transformer_jax.models.decoders.gpt import GPT, GPTConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    model = make_model(GPT, GPTConfig.preset(preset))
    save(folder, model, TextTokenizer.characters(["a"]))
    return 4 * (model.parameter_count - model.config.max_length * model.config.width)


# --- this package ------------------------------------------------------------


def our_training(_: Any) -> dict[str, Callable[[], Any]]:
    """One step a call."""
    import jax

    from transformer_jax.models.decoders.gpt import GPT, GPTConfig
    from transformer_jax.tasks.decoders.language_modeling import NextToken
    from transformer_jax.training.optimizers import make_optimizer
    from transformer_jax.training.schedules import make_schedule
    from transformer_jax.training.step import create_state, make_train_step
    from transformer_jax.training.trained_model import make_model

    model = make_model(GPT, GPTConfig(vocab_size=65, **SMALL))
    schedule = make_schedule("constant", peak=RATE, warmup=1, steps=1)
    optimizer = make_optimizer("adam", schedule, model, weight_decay=0.1, clip=0, b1=0.9, b2=0.95, epsilon=1e-8)
    train_step = make_train_step(NextToken(), optimizer)
    tokens = training_tokens().astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((ROWS, LENGTH), np.float32)}
    state = create_state(model, optimizer, jax.random.key(0))

    def step() -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)

    return {"training": step}


def our_generation(folder: str) -> dict[str, Callable[[], Any]]:
    """`NEW` tokens a call, or one for "first"."""
    import jax

    from transformer_jax.decoding.generation import Generator, Sampling
    from transformer_jax.pretrained import load

    model, _ = load(folder)
    generator = Generator(model, sampling=Sampling(temperature=0))
    del model  # the generator has its own copy, split into blocks
    key = jax.random.key(0)

    def generate(rows: int, count: int) -> np.ndarray:
        return np.array(generator(prompts(rows).tolist(), count, [key] * rows))

    return {
        "first": lambda: generate(1, 1),
        "generation_1": lambda: generate(1, NEW),
        "generation_8": lambda: generate(8, NEW),
    }


# --- torch ------------------------------------------------------------


def torch_training(_: Any) -> dict[str, Callable[[], Any]]:
    """One step a call."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=65, n_positions=LENGTH, n_embd=SMALL["width"], n_layer=SMALL["layers"],
        n_head=SMALL["heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.from_numpy(training_tokens())
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        loss(logits.reshape(-1, 65), tokens[:, 1:].reshape(-1)).backward()
        optimizer.step()

    return {"training": step}


def torch_generation(folder: str) -> dict[str, Callable[[], Any]]:
    """`NEW` tokens a call, or one for "first"."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(rows: int, count: int) -> np.ndarray:
        ids = torch.from_numpy(prompts(rows))
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return made[:, PROMPT:].numpy()

    return {
        "first": lambda: generate(1, 1),
        "generation_1": lambda: generate(1, NEW),
        "generation_8": lambda: generate(8, NEW),
    }


# --- the memory ------------------------------------------------------------

READ = 10  # times a measurement reads the matrix


def numpy_memory(_: Any) -> dict[str, Callable[[], Any]]:
    """A 1 GiB matrix times a vector, `READ` times a call."""
    matrix = np.ones((2**14, 2**14), np.float32)
    vector = np.ones(2**14, np.float32)

    def read() -> None:
        for _ in range(READ):
            matrix @ vector

    return dict.fromkeys(GENERATION, read)


def torch_memory(_: Any) -> dict[str, Callable[[], Any]]:
    """The same by torch."""
    import torch

    matrix, vector = torch.ones((2**14, 2**14)), torch.ones(2**14)

    def read() -> None:
        for _ in range(READ):
            torch.mv(matrix, vector)

    return dict.fromkeys(GENERATION, read)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints its result."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    sides: dict[str, Callable] = {"ours": our_training, "torch": torch_training}
    training = compare({"training": 3}, sides, None, arguments.rounds)["training"]
    with tempfile.TemporaryDirectory() as folder:
        read = weights(arguments.preset, f"{folder}/model")
        sides = {"ours": our_generation, "torch": torch_generation}
        sides |= {"numpy's memory": numpy_memory, "torch's memory": torch_memory}
        generation = compare(dict.fromkeys(GENERATION, 1), sides, f"{folder}/model", arguments.rounds)
    row = generation["generation_1"]
    fastest = max(READ * 2**30 / row[f"{side}'s memory"]["seconds"] for side in ("numpy", "torch"))

    def report(name: str, rows: dict[str, Any], tokens: int) -> float:
        speeds = {side: tokens / rows[side]["seconds"] for side in ("ours", "torch")}
        ratio = speeds["ours"] / speeds["torch"]
        line = ", ".join(
            f"{side} {speeds[side]:,.1f} tokens/s (peak {rows[side]['peak'] / 2**30:.2f} GiB)"
            for side in speeds
        )
        ours, theirs = (rows["results"][side] for side in ("ours", "torch"))
        same = "" if ours is None else f", {100 * (ours == theirs).mean():.1f} % of the tokens equal"
        print(f"{name:12} ratio {ratio:.2f}: {line}{same}", flush=True)
        return ratio

    summary = {"training_ratio": report("training", training, ROWS * LENGTH)}
    for rows in (1, 8):
        ratio = report(f"generation_{rows}", generation[f"generation_{rows}"], rows * NEW)
        summary[f"generation_ratio_{rows}"] = ratio
    first = {side: generation["first"][side]["seconds"] for side in ("ours", "torch")}
    print(f"first token  ours {1e3 * first['ours']:.0f} ms, torch {1e3 * first['torch']:.0f} ms")
    # Tokens after the first; each reads every weight once.
    steady = (NEW - 1) / (generation["generation_1"]["ours"]["seconds"] - first["ours"])
    summary["bandwidth_fraction"] = steady * read / fastest
    print(
        f"memory       {steady * read / 1e9:.1f} of {fastest / 1e9:.1f} GB/s read in generation_1, "
        f"{100 * summary['bandwidth_fraction']:.0f} %"
    )
    summary |= {f"first_token_{side}_seconds": seconds for side, seconds in first.items()}
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
