"""Training steps of this package and of torch, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def our_stepper(model: Any, objective: Any, *, rate: float, **adam: Any) -> Callable[[Any], None]:
    """Return a function that trains a model of this package on a batch for one step.

    Args:
      model: The model; its buffers are donated.
      objective: The objective of the training.
      rate: Learning rate.
      **adam: Other keyword arguments of `make_optimizer`.
    """
    import jax

    from transformer_jax.training.optimizers import make_optimizer
    from transformer_jax.training.schedules import make_schedule
    from transformer_jax.training.step import create_state, make_train_step

    schedule = make_schedule("constant", peak=rate, warmup=1, steps=1)
    optimizer = make_optimizer("adam", schedule, model, **adam)
    train_step = make_train_step(objective, optimizer)
    state = create_state(model, optimizer, jax.random.key(0))

    def step(batch: Any) -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready(metrics)

    return step


def torch_stepper(model: Any, *, rate: float) -> Callable[..., None]:
    """Return a function that trains a model of `transformers` for one step, given the model's arguments."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-6, weight_decay=0.01)

    def step(**inputs: Any) -> None:
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
