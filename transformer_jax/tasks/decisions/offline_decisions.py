"""Offline decisions: a policy learned from recorded episodes, conditioned on their returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax.data.batches.decision_batches import DecisionViews
from transformer_jax.data.batches.row_batches import RowBatches
from transformer_jax.data.corpora.tables import fingerprint
from transformer_jax.data.corpora.trajectories import Trajectories
from transformer_jax.data.tokenizers.decision_processor import DecisionProcessor
from transformer_jax.distributed.mesh import place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.tasks.decisions.data import OfflineDecisionsConfig, open_splits
from transformer_jax.tasks.decisions.environments import ENVIRONMENTS
from transformer_jax.tasks.decisions.playing import check_environment
from transformer_jax.tasks.decisions.trained import TrainedPolicy, target_returns
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.training.config import RunConfig, check_accumulation
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization, fine_tuned_start, preset_config
from transformer_jax.training.task import Files, TaskEntry, processor_of, shared_processor
from transformer_jax.training.totals import Totals

KIND = "policy"
# Number of episodes to play during training.
_PLAYED_WHILE_TRAINING = 50


def _config_of(
    task: OfflineDecisionsConfig, model: str, preset: str, steps: int, recipe: str, **sizes: Any
) -> RunConfig:
    config = preset_config(KIND, model, preset, **sizes)
    # An evaluation plays episodes, and a save writes files: each takes longer than many training steps.
    half = max(1, steps // 2)
    optimization = cosine_optimization(
        steps, learning_rate=3e-3, b2=0.99, weight_decay=1e-2, evaluate_every=half, save_every=half
    )
    return RunConfig(task=task, model=config, optimization=optimization, recipe=recipe, preset=preset)


def _in_environment(name: str, context: int, model: str, preset: str, steps: int) -> RunConfig:
    environment = ENVIRONMENTS[name]
    return _config_of(
        OfflineDecisionsConfig(environment=name), model, preset, steps, name, context=context,
        max_steps=environment.max_steps, state_width=environment.state_width, actions=environment.actions,
    )  # fmt: skip


def key_door(*, model: str = "decision_transformer", preset: str = "mini", steps: int = 600) -> RunConfig:
    """Fetch a key and open a door in a grid world, two minutes on a CPU."""
    return _in_environment("key_door", ENVIRONMENTS["key_door"].max_steps, model, preset, steps)


def cart_pole(*, model: str = "decision_transformer", preset: str = "mini", steps: int = 1_000) -> RunConfig:
    """Balance a pole on a cart."""
    return _in_environment("cart_pole", 20, model, preset, steps)


def recorded(*, model: str = "decision_transformer", preset: str = "mini", steps: int = 5_000) -> RunConfig:
    """Train on your own episodes.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
    """
    sizes = {"max_steps": 1_000} if preset == "mini" else {}
    return _config_of(OfflineDecisionsConfig(), model, preset, steps, "recorded", **sizes)


def fine_tune(*, start: tuple[str, ...] = (), steps: int = 1_000) -> RunConfig:
    """Continue to train a policy on other episodes.

    Args:
      start: Folder of the run.
      steps: Number of training steps.

    Raises:
      UserError: `start` is empty or holds another model.
    """
    starts, _, model = fine_tuned_start(start, KIND)
    optimization = cosine_optimization(steps, learning_rate=1e-4, b2=0.99, weight_decay=1e-2)
    task = OfflineDecisionsConfig()
    return RunConfig(task=task, model=model, optimization=optimization, recipe="fine_tune", start=starts)


class ActionLoss(Objective):
    """Cross-entropy of each action of a window, or the squared error of continuous ones (section 3)."""

    def losses(
        self, model: Any, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return sums over a batch: loss, correctly predicted actions, and number of actions.

        Args:
          model: A policy.
          batch: See `DecisionViews`; `weight` (B,).
          key: Random key of dropout; None disables it.
        """
        predicted = model(
            batch["states"], batch["actions"], batch["returns"], batch["steps"],
            is_conditioned=batch["is_conditioned"], dropout_key=key,
        )  # fmt: skip
        weights = batch["is_step"] * batch["weight"][:, None]
        if model.config.continuous:
            losses = jnp.square(predicted - batch["actions"]).mean(axis=-1)
            correct = jnp.zeros_like(losses)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(predicted, batch["actions"])
            correct = (predicted.argmax(axis=-1) == batch["actions"]).astype(jnp.float32)
        return (losses * weights).sum(), (correct * weights).sum(), weights.sum()

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss and the accuracy."""
        loss, correct, weight = self.losses(model, batch, key)
        sums = {"loss": loss} | ({} if model.config.continuous else {"accuracy": 100 * correct})
        return sums, dict.fromkeys(sums, weight)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    check_accumulation(config.task.batch_size, config.optimization)
    return ActionLoss()


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    B, T, model = config.task.batch_size, config.model.context, config.model
    width, actions = max(1, model.state_width), max(1, model.actions)
    return {
        "states": jax.ShapeDtypeStruct((B, T, width), jnp.float32),
        "actions": (
            jax.ShapeDtypeStruct((B, T, actions), jnp.float32)
            if model.continuous
            else jax.ShapeDtypeStruct((B, T), jnp.int32)
        ),
        "returns": jax.ShapeDtypeStruct((B, T), jnp.float32),
        "steps": jax.ShapeDtypeStruct((B, T), jnp.int32),
        "is_step": jax.ShapeDtypeStruct((B, T), jnp.float32),
        "is_conditioned": jax.ShapeDtypeStruct((B,), jnp.bool_),
        "weight": jax.ShapeDtypeStruct((B,), jnp.float32),
    }


class OfflineDecisions:
    """A task on recorded episodes, a `training.task.Task`."""

    best: tuple[str, Literal["min", "max"]]
    unit = "actions"

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Trajectories],
        processor: DecisionProcessor,
        loss: ActionLoss,
        mesh: Mesh | None,
    ):
        task: OfflineDecisionsConfig = config.task
        self._config, self._settings, self._mesh, self.processor = config, task, mesh, processor
        train, valid, test = splits
        self._train = train
        # Held-out episodes may have an action that no other one has.
        known = [train] if task.valid else [train, valid]
        sizes = {
            "state_width": train.state_width,
            "actions": config.model.actions or max(split.action_count for split in known),
            "continuous": train.continuous,
        }
        self.model_config = config.model if config.start else dataclasses.replace(config.model, **sizes)
        for split in splits:
            self._check_sizes(split)
        if processor.settings.environment:
            check_environment(processor.settings.environment, self.model_config)
        self.files: Files = {}
        self.fingerprint = fingerprint([split.fingerprint() for split in splits])
        self._is_played = bool(processor.settings.environment)
        self.best = ("valid_return", "max") if self._is_played else ("valid_loss", "min")

        context = self.model_config.context
        views = DecisionViews(train, processor, context, hidden_returns=task.hidden_returns)
        self._trains_policy, self._trains_baseline = task.hidden_returns < 1, task.hidden_returns > 0
        self._valid, self._test = (
            DecisionViews(split, processor, context, step=context, conditioned=self._trains_policy)
            for split in (valid, test)
        )
        batches = RowBatches(views.windows, task.batch_size, config.seed, views=views)
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} windows of {context} steps a batch, {epochs:.1f} epochs"
        self._losses = jax.jit(lambda model, batch: loss.losses(model, batch, None))

    def _check_sizes(self, episodes: Trajectories) -> None:
        model = self.model_config
        if episodes.state_width != model.state_width or episodes.continuous != model.continuous:
            raise UserError(
                f"{episodes.path}: states of {episodes.state_width} values and "
                f"{'continuous' if episodes.continuous else 'discrete'} actions do not fit the model's "
                f"`state_width` {model.state_width} and `continuous` {model.continuous}"
            )
        episodes.check_actions(model.actions)

    def _returns(self, model: Any, target: float, count: int, *, conditioned: bool) -> np.ndarray:
        """Return (returns, optimal returns) (2, count) of played episodes."""
        # The same episodes for every target.
        policy = TrainedPolicy(model, self.processor, self._config)
        episodes = policy.play(count, target=target, conditioned=conditioned, seed=1)
        return np.stack([episodes.returns, episodes.optimal])

    def _mean_losses(self, model: Any, views: DecisionViews) -> dict[str, float]:
        batches = (place_batch(batch, self._mesh) for batch in views.batches(self._settings.batch_size))
        sums = np.sum([[float(x) for x in self._losses(model, batch)] for batch in batches], axis=0)
        loss, correct, weight = sums
        scores = {"loss": loss / weight}
        return scores if model.config.continuous else scores | {"accuracy": 100 * correct / weight}

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the loss of the validation episodes, and the mean return of played ones."""
        for name, value in self._mean_losses(model, self._valid).items():
            yield f"valid_{name}", value
        if self._is_played:
            target = self.processor.settings.target_return
            count, conditioned = _PLAYED_WHILE_TRAINING, self._trains_policy
            yield "valid_return", float(self._returns(model, target, count, conditioned=conditioned)[0].mean())

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model: predicted actions, and the returns of played episodes."""
        task, settings = self._settings, self.processor.settings
        results: dict[str, Any] = {
            f"test_{name}": value for name, value in self._mean_losses(kept_model, self._test).items()
        }
        results |= {
            "data_return": float(self._train.returns.mean()),
            "actions_per_second": totals.weight / max(totals.seconds, 1e-9),
        }
        lines = [", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in results.items())]
        if not self._is_played:
            return results, lines
        count, largest = task.score_episodes, settings.target_return
        scores, optimal = [], np.array([np.nan])
        if self._trains_policy:
            targets = target_returns(task.targets, settings)
            played = {t: self._returns(kept_model, t, count, conditioned=True) for t in {*targets, largest}}
            means = {target: float(played[target][0].mean()) for target in targets}
            returns, optimal = played[largest]
            results |= {
                "return_mean": float(returns.mean()),
                "return_at_target": {f"{target:g}": mean for target, mean in means.items()},
            }
            if len(means) > 2 and np.std(list(means.values())) > 0:
                results["target_correlation"] = float(np.corrcoef(list(means), list(means.values()))[0, 1])
            lines += ["", "   target return   mean return"]
            lines += [f"{target:16.3f}   {mean:11.3f}" for target, mean in means.items()]
            scores.append(f"mean return {results['return_mean']:.3f}")
        if self._trains_baseline:
            returns, optimal = self._returns(kept_model, largest, count, conditioned=False)
            results["baseline_return"] = float(returns.mean())
            scores.append(f"behavior cloning {results['baseline_return']:.3f}")
        scores.append(f"training data {results['data_return']:.3f}")
        if np.isfinite(optimal).all():
            results["optimal_return"] = float(optimal.mean())
            scores.append(f"optimal {results['optimal_return']:.3f}")
        lines += ["", f"{', '.join(scores)}, {count:,} episodes each"]
        return results, lines


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the episodes, compute scales, and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: open_splits(config, note))

    def make() -> DecisionProcessor:
        environment = config.task.environment
        if (processor := processor_of(starts)) is None:
            return DecisionProcessor.of(splits[0], environment)
        return processor.with_episodes(splits[0], environment)

    processor = shared_processor(DecisionProcessor, make, stored)
    return on_every_process(lambda: OfflineDecisions(config, splits, processor, objective, mesh))


ENTRY = TaskEntry(
    "offline_decisions",
    OfflineDecisionsConfig,
    KIND,
    {"key_door": key_door, "cart_pole": cart_pole, "recorded": recorded, "fine_tune": fine_tune},
    DecisionProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedPolicy,
    check_mesh=check_mesh,
)
