"""Compare GPT-2 with `transformers` on torch: training steps and generation.

    python -m experiments.benchmarks.bench_decoder [--rounds 7] [--json]

Training: 6 layers, width 384, 6 heads, vocabulary 65, 16 rows of 256 tokens, float32, no dropout, AdamW.
Generation: GPT-2 124M with the same random weights, float32, greedy, 64 tokens after a prompt of 16, for 1 and
for 8 rows; `transformers` uses its key/value cache. Each side runs in a separate process, and their
measurements alternate. Ratios are this package's median throughput over torch's. The memory bandwidth is that
of products of a 1 GiB matrix and a vector, the better of NumPy's and torch's, measured in the same rounds as
the generation, because it varies on a shared machine. The fraction of it counts each weight once per token.
Needs torch and transformers; seven rounds take four minutes on two cores of an AMD EPYC.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.training_step import our_stepper
from transformer_jax.commands.interleaved_rounds import compare, compare_throughput

ROWS, LENGTH = 16, 256
SMALL: dict[str, Any] = dict(layers=6, width=384, heads=6, kv_heads=6, feed_forward=4 * 384, max_length=LENGTH)
PROMPT, NEW = 16, 64
GENERATION = ("first", "generation_1", "generation_8")
RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 7
    """Measurements per side."""
    preset: str = "124M"
    """Size of GPT-2 for the generation; smaller ones are for tests of the command."""
    json: bool = False
    """Print a JSON object as the last line."""


def training_tokens() -> np.ndarray:
    """Return token ids (ROWS, LENGTH + 1)."""
    return np.random.default_rng(0).integers(0, 65, (ROWS, LENGTH + 1), np.int64)


def prompts(rows: int) -> np.ndarray:
    """Return token ids (rows, PROMPT)."""
    return np.random.default_rng(1).integers(0, 50_257, (rows, PROMPT), np.int64)


def weights(preset: str, folder: str) -> int:
    """Write random weights as a published folder, and return the number of bytes that a decoding step reads."""
    from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
    from transformer_jax.models.decoders.gpt import GPT, GPTConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    model = make_model(GPT, GPTConfig.preset(preset))
    save(folder, model, TextTokenizer.characters(["a"]))
    return 4 * (model.parameter_count - model.config.max_length * model.config.width)


# --- this package ------------------------------------------------------------


def our_training(_: Any) -> dict[str, Callable[[], Any]]:
    """Return a job that trains for one step."""
    from transformer_jax.models.decoders.gpt import GPT, GPTConfig
    from transformer_jax.tasks.decoders.language_modeling import NextToken
    from transformer_jax.training.trained_model import make_model

    model = make_model(GPT, GPTConfig(vocab_size=65, **SMALL))
    step = our_stepper(model, NextToken(), rate=RATE, weight_decay=0.1, clip=0, b1=0.9, b2=0.95, epsilon=1e-8)
    tokens = training_tokens().astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((ROWS, LENGTH), np.float32)}
    return {"training": lambda: step(batch)}


def our_generation(folder: str) -> dict[str, Callable[[], Any]]:
    """Return jobs that generate one token ("first") or `NEW` tokens for 1 and 8 rows."""
    import jax

    from transformer_jax.decoding.generation import Generator, Sampling
    from transformer_jax.pretrained import load

    model, _ = load(folder)
    generator = Generator(model, sampling=Sampling(temperature=0))
    del model  # The generator has an unstacked copy.
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
    """Return a job that trains for one step."""
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
    """Return jobs that generate one token ("first") or `NEW` tokens for 1 and 8 rows."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(rows: int, count: int) -> np.ndarray:
        ids = torch.from_numpy(prompts(rows))
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return output[:, PROMPT:].numpy()

    return {
        "first": lambda: generate(1, 1),
        "generation_1": lambda: generate(1, NEW),
        "generation_8": lambda: generate(8, NEW),
    }


# --- memory bandwidth ------------------------------------------------------------

READS = 10  # number of products with the matrix per measurement


def numpy_memory(_: Any) -> dict[str, Callable[[], Any]]:
    """Return jobs that multiply a 1 GiB matrix and a vector in NumPy."""
    matrix = np.ones((2**14, 2**14), np.float32)
    vector = np.ones(2**14, np.float32)

    def read() -> None:
        for _ in range(READS):
            matrix @ vector

    return dict.fromkeys(GENERATION, read)


def torch_memory(_: Any) -> dict[str, Callable[[], Any]]:
    """Return jobs that multiply a 1 GiB matrix and a vector in torch."""
    import torch

    matrix, vector = torch.ones((2**14, 2**14)), torch.ones(2**14)

    def read() -> None:
        for _ in range(READS):
            torch.mv(matrix, vector)

    return dict.fromkeys(GENERATION, read)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    sides: dict[str, Callable] = {"ours": our_training, "torch": torch_training}
    training = compare({"training": 3}, sides, None, arguments.rounds)["training"]
    with tempfile.TemporaryDirectory() as folder:
        bytes_per_token = weights(arguments.preset, f"{folder}/model")
        sides = {"ours": our_generation, "torch": torch_generation}
        sides |= {"numpy's memory": numpy_memory, "torch's memory": torch_memory}
        generation = compare(dict.fromkeys(GENERATION, 1), sides, f"{folder}/model", arguments.rounds)
    row = generation["generation_1"]
    bandwidth = max(READS * 2**30 / row[f"{side}'s memory"]["seconds"] for side in ("numpy", "torch"))

    def report(name: str, medians: dict[str, Any], tokens: int) -> float:
        ratio, line = compare_throughput(medians, tokens, "tokens")
        ours, theirs = (medians["results"][side] for side in ("ours", "torch"))
        equal = "" if ours is None else f", {100 * (ours == theirs).mean():.1f} % of the tokens equal"
        print(f"{name:12} ratio {ratio:.2f}: {line}{equal}", flush=True)
        return ratio

    summary = {"training_ratio": report("training", training, ROWS * LENGTH)}
    for rows in (1, 8):
        ratio = report(f"generation_{rows}", generation[f"generation_{rows}"], rows * NEW)
        summary[f"generation_ratio_{rows}"] = ratio
    first = {side: generation["first"][side]["seconds"] for side in ("ours", "torch")}
    print(f"first token  ours {1e3 * first['ours']:.0f} ms, torch {1e3 * first['torch']:.0f} ms")
    # Each token after the first reads every weight once.
    tokens_per_second = (NEW - 1) / (generation["generation_1"]["ours"]["seconds"] - first["ours"])
    read_rate = tokens_per_second * bytes_per_token
    summary["bandwidth_fraction"] = read_rate / bandwidth
    print(
        f"memory       generation_1 reads {read_rate / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s, "
        f"{100 * summary['bandwidth_fraction']:.0f} %"
    )
    summary |= {f"first_token_{side}_seconds": seconds for side, seconds in first.items()}
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
