"""Baselines in PyTorch for the measurements on a device: a step of GPT-2, and generation by `transformers`.

The step follows nanoGPT's recipe: fused attention, bfloat16 by autocast, a vocabulary padded to 64, fused
AdamW, and `torch.compile` on a GPU. Torch and transformers are imported only here.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from transformer_jax.commands.device_parts import STEPS, generation_jobs, gpt_config, prompts


def missing_baseline(*, needs: str, accelerator: bool) -> str | None:
    """Return the reason why a baseline cannot run, or None.

    Args:
      needs: "torch" or "transformers".
      accelerator: Whether this package runs on an accelerator, so that torch must as well.
    """
    for name in dict.fromkeys(("torch", needs)):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    if accelerator:
        try:
            import torch
        except (ImportError, OSError) as error:
            return f"torch cannot be imported: {error}".splitlines()[0]
        if not torch.cuda.is_available():
            return "torch is installed without CUDA"
    return None


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_step(argument: tuple[str, bool]) -> dict[str, Callable[[], Any]]:
    """Return a job that trains a GPT-2 for one step on the tokens of a batch of `device_parts.STEPS`."""
    import torch

    name, trial = argument
    config = gpt_config(trial=trial)
    task: Any = STEPS[name].config(trial=trial).task
    rows, length = task.batch_size, task.context
    device = _device()
    torch.manual_seed(0)
    model = torch_gpt(config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    forward = torch.compile(model) if device == "cuda" else model
    tokens = torch.from_numpy(prompts(rows, length + 1, config.vocab_size)).to(device)

    def step() -> dict[str, Any]:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # waits for the device
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        return {"loss": value, "units": rows * length, "peak_bytes": peak}

    return {name: step}


def torch_gpt(config: Any) -> Any:
    """Return a GPT-2 of a config's sizes as a torch module; it returns the loss of (tokens, targets)."""
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads, padded = config.width, config.heads, -(-config.vocab_size // 64) * 64

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.expand = nn.Linear(width, config.feed_forward)
            self.contract = nn.Linear(config.feed_forward, width)

        def forward(self, x: Any) -> Any:
            B, T, _ = x.shape
            joined = self.project(self.attention_norm(x)).view(B, T, 3, heads, width // heads)
            query, key, value = joined.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.output(mixed.transpose(1, 2).reshape(B, T, width))
            hidden = functional.gelu(self.expand(self.feed_forward_norm(x)), approximate="tanh")
            return x + self.contract(hidden)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(padded, width), nn.Embedding(config.max_length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.norm = nn.LayerNorm(width)
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: Any, targets: Any) -> Any:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.tokens(tokens) + self.positions(positions)
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.tokens.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Decoder()


def torch_generation(argument: tuple[str, bool]) -> dict[str, Callable[[], Any]]:
    """Return jobs that generate greedily with the GPT-2 of `transformers`, random weights, and its cache."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    _, trial = argument
    config, device = gpt_config(trial=trial), _device()
    sizes = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.max_length, n_embd=config.width, n_layer=config.layers,
        n_head=config.heads,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(sizes)
    model = model.to(device, torch.bfloat16).eval()

    def generate(rows: int, length: int, new: int) -> None:
        ids = torch.from_numpy(prompts(rows, length, config.vocab_size)).to(device)
        with torch.no_grad():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        output.cpu()  # waits for the device

    return {name: functools.partial(generate, *values) for name, values in generation_jobs(trial).items()}
