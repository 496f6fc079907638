"""A fine-tuning of ours with `transformers` on torch: the same batches, schedule, optimizer and choice."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers

from transformer_jax import tasks
from transformer_jax.training.config import RunConfig
from transformer_jax.training.schedules import make_schedule
from transformer_jax.training.starts import open_start
from transformer_jax.training.task import entry_of

_MODELS = {
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
}


class TorchFineTuning:
    """The model of a published folder, trained as a config of ours says.

    Args:
      config: of a run with one label for each text or word; its start is a published folder.

    Raises:
      UserError: see `TaskEntry.prepare`.
    """

    def __init__(self, config: RunConfig):
        entry = entry_of(config)
        starts = [open_start(start, tasks.TASKS, pathlib.Path("torch")) for start in config.start]
        self._config = config
        self.task: Any = entry.prepare(
            config, entry.objective(config, config.model), mesh=None, stored=None, starts=starts,
            note=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
        torch.manual_seed(config.seed)
        self.model = _MODELS[entry.name].from_pretrained(
            config.start[0].folder, num_labels=self.task.model_config.classes, dtype=torch.float32
        )

    def logits(self, batch: Mapping[str, np.ndarray]) -> torch.Tensor:
        """Of the classes, of a batch of ours."""
        given = {"input_ids": "tokens", "token_type_ids": "types", "attention_mask": "segments"}
        return self.model(**{name: torch.tensor(batch[ours]).long() for name, ours in given.items()}).logits

    def outputs(self, split: str) -> list[np.ndarray]:
        """Logits of each example of "valid" or "test"."""
        self.model.eval()
        outputs = []
        with torch.inference_mode():
            for example in self.task.examples(split):
                batch = dict(
                    tokens=example.tokens[None],
                    types=example.types[None],
                    segments=np.ones((1, len(example.tokens))),
                )
                outputs.append(self.logits(batch)[0].numpy())
        return outputs

    def scores(self, split: str) -> dict[str, float]:
        """Metrics of "valid" or "test" in percent."""
        return dict(self.task.scores(split, self.outputs(split)))

    def _optimizer(self) -> torch.optim.AdamW:
        own = self._config.optimization
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        decayed = [p for p in self.model.parameters() if p.ndim > 1 and id(p) not in tables]
        others = [p for p in self.model.parameters() if p.ndim < 2 or id(p) in tables]
        return torch.optim.AdamW(
            [dict(params=decayed, weight_decay=own.weight_decay), dict(params=others, weight_decay=0.0)],
            lr=own.learning_rate, betas=(own.b1, own.b2), eps=own.epsilon,
        )  # fmt: skip

    def _loss(self, batch: Mapping[str, np.ndarray]) -> torch.Tensor:
        rows = torch.tensor(batch["weight"]) > 0
        logits, target = self.logits(batch)[rows], torch.tensor(batch["target"]).long()[rows]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=-1
        )

    def train(self) -> float:
        """Trains, keeps the checkpoint of the best validation, and returns the seconds without validation."""
        own, optimizer = self._config.optimization, self._optimizer()
        rates = make_schedule(own.schedule, peak=1.0, warmup=own.warmup, steps=own.steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(rates(step)))
        metric = self.task.best[0].removeprefix("valid_")
        best, kept, seconds = -np.inf, None, 0.0
        for step, batch in zip(range(1, own.steps + 1), self.task.batches.from_step(0), strict=False):
            begin = time.monotonic()
            self.model.train()
            self._loss(batch).backward()
            if own.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), own.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seconds += time.monotonic() - begin
            if step % own.evaluate_every == 0 or step == own.steps:
                value = self.scores("valid")[metric]
                if value > best:
                    best, kept = value, {n: v.clone() for n, v in self.model.state_dict().items()}
        assert kept is not None
        self.model.load_state_dict(kept)
        return seconds
