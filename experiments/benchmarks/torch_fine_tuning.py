"""Fine-tuning of `transformers` on torch with the batches, schedule and optimizer of a run of this package."""

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
    """A model of `transformers` from a published folder, and its training by a config of this package.

    Args:
      config: Config of a run with one label per text or word, which starts from a published folder.

    Raises:
      UserError: See `TaskEntry.prepare`.
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
        """Compute the logits of the classes for a batch of this package."""
        names = {"input_ids": "tokens", "token_type_ids": "types", "attention_mask": "segments"}
        return self.model(**{theirs: torch.tensor(batch[ours]).long() for theirs, ours in names.items()}).logits

    def outputs(self, split: str) -> list[np.ndarray]:
        """Compute the logits of each example of "valid" or "test"."""
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
        """Compute the metrics of "valid" or "test" in percent."""
        return dict(self.task.scores(split, self.outputs(split)))

    def _optimizer(self) -> torch.optim.AdamW:
        optimization = self._config.optimization
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
        matrices = [p for p in self.model.parameters() if p.ndim > 1 and id(p) not in tables]
        rest = [p for p in self.model.parameters() if p.ndim < 2 or id(p) in tables]
        return torch.optim.AdamW(
            [
                dict(params=matrices, weight_decay=optimization.weight_decay),
                dict(params=rest, weight_decay=0.0),
            ],
            lr=optimization.learning_rate,
            betas=(optimization.b1, optimization.b2),
            eps=optimization.epsilon,
        )

    def _loss(self, batch: Mapping[str, np.ndarray]) -> torch.Tensor:
        rows = torch.tensor(batch["weight"]) > 0
        logits, target = self.logits(batch)[rows], torch.tensor(batch["target"]).long()[rows]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=-1
        )

    def train(self) -> float:
        """Train, restore the parameters of the best validation, and return the seconds without validation."""
        optimization, optimizer = self._config.optimization, self._optimizer()
        steps = optimization.steps
        rates = make_schedule(optimization.schedule, peak=1.0, warmup=optimization.warmup, steps=steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(rates(step)))
        metric = self.task.best[0].removeprefix("valid_")
        best_value, best_parameters, seconds = -np.inf, None, 0.0
        for step, batch in zip(range(1, steps + 1), self.task.batches.from_step(0), strict=False):
            start_time = time.monotonic()
            self.model.train()
            self._loss(batch).backward()
            if optimization.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimization.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            seconds += time.monotonic() - start_time
            if step % optimization.evaluate_every == 0 or step == steps:
                value = self.scores("valid")[metric]
                if value > best_value:
                    best_value = value
                    best_parameters = {n: v.clone() for n, v in self.model.state_dict().items()}
        assert best_parameters is not None
        self.model.load_state_dict(best_parameters)
        return seconds
