"""Compare the training steps of an LSTM translator with attention in this package and in torch.

    python -m experiments.benchmarks.bench_recurrent [--rounds 7] [--json]

The model is Luong's with an LSTM of width 256 in the encoder and in the decoder, embeddings of width 256,
"general" scores, vocabulary 10,000, and one matrix for both embeddings and the logits; 64 rows of 20 tokens,
float32, dropout 0.3, Adam. Without input feeding, torch runs `torch.nn.LSTM` over the complete target and
attends for all steps at once; with it, torch runs a loop of `torch.nn.LSTMCell`. Each side runs in a separate
process, and their measurements alternate. Ratios are this package's median throughput over torch's. Needs
torch.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.training_step import our_stepper
from transformer_jax.commands.interleaved_rounds import compare, compare_throughput

ROWS, LENGTH, VOCAB, WIDTH, DROPOUT, RATE = 64, 20, 10_000, 256, 0.3, 1e-3
JOBS = {"fed": True, "unfed": False}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 7
    """Measurements per side."""
    json: bool = False
    """Print a JSON object as the last line."""


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Return token ids without padding: source (ROWS, LENGTH) and target (ROWS, LENGTH + 1)."""
    rng = np.random.default_rng(0)
    return rng.integers(3, VOCAB, (ROWS, LENGTH)), rng.integers(3, VOCAB, (ROWS, LENGTH + 1))


def ours(_: Any) -> dict[str, Callable[[], Any]]:
    """Return jobs that train for one step."""
    from transformer_jax.models.translators.luong import Luong, LuongConfig
    from transformer_jax.tasks.translators.objective import TokenLoss
    from transformer_jax.training.trained_model import make_model

    source, target = (a.astype(np.int32) for a in tokens())
    batch = {"source": source, "target_in": target[:, :-1], "target_out": target[:, 1:]}

    def job(feeding: bool) -> Callable[[], None]:
        config = LuongConfig(
            vocab_size=VOCAB, width=WIDTH, hidden=WIDTH, layers=1, dropout=DROPOUT, input_feeding=feeding
        )
        step = our_stepper(
            make_model(Luong, config), TokenLoss(0.0),
            rate=RATE, weight_decay=0.0, clip=0, b1=0.9, b2=0.999, epsilon=1e-8,
        )  # fmt: skip
        return lambda: step(batch)

    return {name: job(feeding) for name, feeding in JOBS.items()}


def torch_side(_: Any) -> dict[str, Callable[[], Any]]:
    """Return jobs that train for one step."""
    import torch

    class Attentional(torch.nn.Module):
        def __init__(self, feeding: bool):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
            self.encoder = torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.cell = torch.nn.LSTMCell(2 * WIDTH, WIDTH) if feeding else None
            self.decoder = None if feeding else torch.nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.key = torch.nn.Linear(WIDTH, WIDTH, bias=False)
            self.readout = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)
            self.dropout = torch.nn.Dropout(DROPOUT)

        def attentional(self, top, keys, values, mask):
            scores = (top @ keys.transpose(1, 2)).masked_fill(~mask, float("-inf"))
            context = torch.softmax(scores, dim=-1) @ values
            return self.dropout(torch.tanh(self.readout(torch.cat([context, top], dim=-1))))

        def forward(self, source, target):
            mask = (source != 0)[:, None]
            values, (h, c) = self.encoder(self.dropout(self.embedding(source.flip(1))))
            keys = self.key(values)
            mask = mask.flip(2)
            x = self.dropout(self.embedding(target))
            if self.decoder is not None:
                top, _ = self.decoder(x, (h, c))
                outputs = self.attentional(top, keys, values, mask)
            else:
                assert self.cell is not None
                state, output, steps = (h[0], c[0]), torch.zeros_like(x[:, 0]), []
                for t in range(x.shape[1]):
                    state = self.cell(torch.cat([x[:, t], output], dim=-1), state)
                    output = self.attentional(state[0][:, None], keys, values, mask)[:, 0]
                    steps.append(output)
                outputs = torch.stack(steps, dim=1)
            return outputs @ self.embedding.weight.T

    torch.manual_seed(0)
    source, target = (torch.from_numpy(a) for a in tokens())
    loss = torch.nn.CrossEntropyLoss()

    def job(feeding: bool) -> Callable[[], None]:
        model = Attentional(feeding).train()
        optimizer = torch.optim.Adam(model.parameters(), RATE)

        def step() -> None:
            optimizer.zero_grad()
            logits = model(source, target[:, :-1])
            loss(logits.reshape(-1, VOCAB), target[:, 1:].reshape(-1)).backward()
            optimizer.step()

        return step

    return {name: job(feeding) for name, feeding in JOBS.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__, args=argv)
    sides: dict[str, Callable] = {"ours": ours, "torch": torch_side}
    report = compare(dict.fromkeys(JOBS, 5), sides, None, arguments.rounds)
    summary = {}
    for name in JOBS:
        ratio, line = compare_throughput(report[name], ROWS * LENGTH, "tokens")
        summary[f"{name}_ratio"] = ratio
        print(f"{name:6} ratio {ratio:.2f}: {line}", flush=True)
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
