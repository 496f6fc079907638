"""The episodes of a policy's run: its data config, and its splits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from transformer_jax.data.corpora.held_out import held_out
from transformer_jax.data.corpora.trajectories import Trajectories, open_trajectories
from transformer_jax.errors import UserError
from transformer_jax.tasks.decisions.environments import ENVIRONMENTS, Environment
from transformer_jax.tasks.decisions.playing import GYMNASIUM
from transformer_jax.tasks.decisions.rollouts import episodes_of_behavior
from transformer_jax.training.config import FREE, RunConfig, check_at_least, choose


@dataclasses.dataclass(frozen=True)
class OfflineDecisionsConfig:
    """The episodes of a policy's run, and how it is scored.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    environment: str = ""
    """Environment to score the policy in: key_door, cart_pole, gymnasium:NAME, or "" for none. Without `data`
    its own episodes are the training data."""
    data: str = ""
    """Episodes to train on: a .npz or .jsonl file, or minari:NAME; "" samples them in `environment`."""
    valid: str = ""
    """Episodes to validate on, as in `data`; "" holds out the share `held_out` of `data`."""
    test: str = ""
    """Episodes to score predicted actions on; "" scores those for validation."""
    held_out: float = 0.05
    """Share of the episodes to hold out for validation, unless `valid` is set."""
    episodes: int = 4_000
    """Number of episodes to sample in `environment` without `data`, half of them with random actions."""
    max_skill: float = 0.7
    """Largest share of good actions in the other half of the sampled episodes."""
    batch_size: int = 32
    """Windows of episodes per batch, B."""
    hidden_returns: float = 0.25
    """Share of the training windows whose returns are masked. From these the model learns the baseline, to
    imitate all episodes alike (behavior cloning); 1 trains only the baseline, 0 trains none."""
    targets: tuple[float, ...] = dataclasses.field(default=(), metadata=FREE)
    """Target returns to score the trained model with; () means five, from the smallest to the largest return of
    the training data."""
    score_episodes: int = dataclasses.field(default=200, metadata=FREE)
    """Number of episodes to play for each return."""
    temperature: float = dataclasses.field(default=0.5, metadata=FREE)
    """Divisor of the logits that actions are sampled from; 0 takes the most probable action."""

    def __post_init__(self) -> None:
        if (self.valid or self.test) and not self.data:
            raise UserError("`valid` and `test` need `data`")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        sampling = ("episodes", "max_skill")
        if self.data and any(getattr(self, name) != defaults[name] for name in sampling):
            raise UserError("`episodes` and `max_skill` are for sampled episodes: leave them out with `data`")
        if self.targets and self.data and not self.environment:
            raise UserError("`targets` need an `environment` to play in")
        if not all(math.isfinite(target) for target in self.targets):
            raise UserError(f"`targets` {' '.join(map(str, self.targets))} must be finite")
        if self.environment and not self.environment.startswith(GYMNASIUM):
            choose("environment", self.environment, (*ENVIRONMENTS, "gymnasium:NAME"))
        if not 0 < self.held_out < 1:
            raise UserError(f"`held_out` {self.held_out} must be above 0 and below 1")
        check_at_least(
            self, episodes=2, max_skill=0, batch_size=1, hidden_returns=0, score_episodes=1, temperature=0
        )
        for name in ("max_skill", "hidden_returns"):
            if getattr(self, name) > 1:
                raise UserError(f"`{name}` {getattr(self, name)} must be at most 1")


def sampled_episodes(environment: Environment, count: int, max_skill: float, seed: int = 0) -> Trajectories:
    """Play episodes of random and of mixed policies.

    Args:
      environment: The environment.
      count: Number of episodes.
      max_skill: Every second episode has random actions, and each other one a skill from 0 to this.
      seed: Seed of the episodes.
    """
    skill_key, key = jax.random.split(jax.random.key(seed))
    skills = jax.random.uniform(skill_key, (count,)) * max_skill * (np.arange(count) % 2)
    played = jax.device_get(episodes_of_behavior(environment, jax.random.split(key, count), skills))
    arrays = (played.states, played.actions, played.rewards)
    parts = ([values[n, :length] for n, length in enumerate(played.lengths)] for values in arrays)
    return Trajectories(f"episodes of {environment.name}", *parts)


def open_splits(config: RunConfig, note: Callable[[str], None]) -> tuple[Trajectories, ...]:
    """Return the training, validation and test episodes of a run.

    Raises:
      UserError: See `open_trajectories`; there is neither `data` nor an environment to draw episodes in; or the
        episodes do not fit together, or are longer than the model's `max_steps`.
    """
    task: OfflineDecisionsConfig = config.task
    if task.data:
        train = open_trajectories(task.data)
    elif task.environment not in ENVIRONMENTS:
        raise UserError(f"name episodes with `data`, or as `environment` one of {', '.join(ENVIRONMENTS)}")
    else:
        train = sampled_episodes(ENVIRONMENTS[task.environment], task.episodes, task.max_skill)
    if task.valid:
        valid = open_trajectories(task.valid)
    else:
        rows, held = held_out(np.arange(len(train)), task.held_out)
        train, valid = train.select(rows), train.select(held)
    test = open_trajectories(task.test) if task.test else valid
    for split in (train, valid, test):
        split.check_like(train)
        longest, limit = int(split.lengths.max()), config.model.max_steps
        if longest > limit:
            raise UserError(
                f"{split.path}: an episode has {longest:,} steps, but the model takes `max_steps` {limit:,}"
            )
    actions = f"continuous actions of {train.action_count} values" if train.continuous else "discrete actions"
    note(
        f"{len(train):,} episodes ({int(train.lengths.sum()):,} steps, {actions}) for training, mean return "
        f"{train.returns.mean():.3f}; {len(valid):,} for validation"
    )
    return train, valid, test
