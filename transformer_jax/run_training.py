"""What every training command does around the loop: its folder, its state, and the parameters it ends with."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import jax
import optax
from jax.sharding import Mesh

from transformer_jax import runs
from transformer_jax.data.tokenizers.tokenizer_file import TokenizerFile
from transformer_jax.distributed.mesh import place_batch
from transformer_jax.distributed.processes import broadcast_from_first
from transformer_jax.distributed.sharding import state_shardings
from transformer_jax.errors import UserError
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.loop import fit
from transformer_jax.training.metrics import MetricsLog
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.schedules import extends, make_schedule
from transformer_jax.training.step import Loss, TrainState, create_state, make_train_step

Kind = TypeVar("Kind", bound=TokenizerFile)


class TrainingConfig(Protocol):
    """The fields of a command's config that the loop reads."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def ema(self) -> float: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def average(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    @property
    def evaluate_every(self) -> int: ...


def stored_config(folder: pathlib.Path) -> dict[str, Any] | None:
    """The config of the run that stands in the folder, or None where a new one may be made; all processes see
    what the first one sees.

    Raises:
      UserError: something else is there, or the folder cannot be read or written.
    """

    def read() -> dict[str, Any] | None:
        if runs.is_run(folder):
            return runs.read_config(folder)
        check_free(folder)
        return None

    return broadcast_from_first(read)


def first_tokenizer(kind: type[Kind], make: Callable[[], Kind]) -> Kind:
    """The tokenizer that `make` gives in the first process, in all of them.

    Raises:
      UserError: what it raised.
    """
    if jax.process_count() == 1:
        return make()
    return kind.from_text(broadcast_from_first(lambda: make().text))


def check_same_run(
    folder: pathlib.Path,
    stored: dict[str, Any],
    wanted: dict[str, Any],
    steps_done: int,
    *,
    defaults: dict[str, Any],
    free: Container[str],
) -> None:
    """That the config asked for is the one of the run that stands in the folder.

    Args:
      folder: of the run.
      stored: its `config.json`.
      wanted: what `config.json` would be now.
      steps_done: steps that are saved.
      defaults: of the training config's fields, for a run from before a field existed.
      free: fields that may differ.

    Raises:
      UserError: another config, with the fields that differ; the run is left as it is.
    """
    if stored["model"] != wanted["model"]:
        raise UserError(
            f"{folder} holds a run of {stored['model']}, not of {wanted['model']}: name another --run-dir"
        )
    if stored.get("task", wanted["task"]) != wanted["task"]:
        raise UserError(f"{folder} holds a run of another task ({stored['task']}): name another --run-dir")
    old = {field: _as_json(value) for field, value in defaults.items()} | stored["training"]
    new = wanted["training"]
    differ = [
        f"--{field.replace('_', '-')} is {old.get(field)!r} there, not {new[field]!r}"
        for field in new
        if field not in free and _as_json(new[field]) != old.get(field)
    ]
    differ += [
        f"its {field} differs"
        for field in ("model_config", "corpus_fingerprint")
        if stored[field] != _as_json(wanted[field])
    ]
    if differ:
        raise UserError(
            f"{folder} holds a run of another config ({'; '.join(differ[:4])}): use the same flags to "
            "resume it, or name another --run-dir"
        )
    if new["steps"] > old["steps"] and not extends(old["schedule"]):
        raise UserError(
            f"{folder} was trained for {old['steps']} steps on a {old['schedule']} schedule, which ends there: "
            f"--steps {new['steps']} needs another --run-dir, or --schedule inverse_sqrt from the start"
        )
    least = steps_done if extends(old["schedule"]) else old["steps"]
    if new["steps"] < least:
        raise UserError(
            f"{folder} is a run of {least} steps: --steps {new['steps']} would cut it short; "
            "name another --run-dir"
        )


def check_free(folder: pathlib.Path) -> None:
    """That a new run may be made in the folder: it is not there, or holds only an unfinished start.

    Raises:
      UserError: something else is there, or the folder cannot be read or written.
    """
    try:
        there = {p.name.removesuffix(".draft") for p in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another --run-dir") from None
    if there - {runs.TOKENIZER, runs.LENGTHS, runs.CONFIG}:
        raise UserError(f"{folder} exists and is not a run: name another --run-dir")
    # The folder could be looked at above, so its parents can.
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({parent} is no writable folder); name another --run-dir")


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def machine(mesh: Mesh | None) -> dict[str, Any]:
    """What `results.json` says of where a run was made."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "mesh": None if mesh is None else dict(mesh.shape),
        "processes": jax.process_count(),
    }


def optimizer_of(
    config: TrainingConfig, model: Any, *, b1: float, b2: float, epsilon: float
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The schedule and the optimizer that a config names, for a model or its abstract shape."""
    schedule = make_schedule(
        config.schedule, peak=config.learning_rate, warmup=config.warmup, steps=config.steps
    )
    optimizer = make_optimizer(
        config.optimizer, schedule, model,
        weight_decay=config.weight_decay, clip=config.clip, b1=b1, b2=b2, epsilon=epsilon,
    )  # fmt: skip
    return schedule, optimizer


def first_state(config: TrainingConfig, model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of a run before its first step."""
    # The parameters took the seed itself; the steps fold from another key.
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return create_state(model, optimizer, key, with_ema=config.ema > 0)


class Trainer:
    """The state of a run, restored from its checkpoints where it has some, and what trains it.

    Args:
      config: of the command.
      model: the parameters to start from; their memory is given away by `train`.
      checkpoints: of the run.
      mesh: that the state and the batches are spread over; None is the default device.
      b1, b2, epsilon: Adam's constants.

    Attributes:
      state: where training goes on.
      resumed: whether it comes from a checkpoint.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: Any,
        checkpoints: Checkpoints,
        *,
        mesh: Mesh | None = None,
        b1: float,
        b2: float,
        epsilon: float,
    ):
        self.config, self.checkpoints, self.mesh = config, checkpoints, mesh
        self.schedule, self.optimizer = optimizer_of(config, model, b1=b1, b2=b2, epsilon=epsilon)

        def create(model: Any) -> TrainState:
            return first_state(config, model, self.optimizer)

        self.shardings = None
        if mesh is None:
            state = create(model)
        else:
            self.shardings = state_shardings(jax.eval_shape(create, model), mesh)
            state = jax.jit(create, out_shardings=self.shardings, donate_argnums=0)(model)
        restored = checkpoints.restore(state)
        self.resumed = restored is not None
        self.state = state if restored is None else restored

    def train(
        self,
        folder: pathlib.Path,
        batches: Callable[[int], Iterator[Any]],
        loss: Loss,
        evaluate: Callable[[Any], Iterable[tuple[str, float]]],
        *,
        best: str,
        lower_is_better: bool = False,
        step_timeout: float | None = None,
    ) -> Any:
        """Trains to the end, and saves and returns the parameters to use: an average of the run's.

        Args:
          folder: of the run.
          batches: from a step to its batch and those after it.
          loss: the task.
          evaluate: from a model to (name, value) for the record.
          best, lower_is_better, step_timeout: see `fit`.

        Raises:
          Diverged, Stopped, UserError: see `fit`.
        """
        config, step = self.config, int(self.state.step)
        if step == config.steps and self.checkpoints.step_of(runs.AVERAGED) == step:
            return self.checkpoints.restore_model(self.state.model, runs.AVERAGED)
        train_step = make_train_step(
            loss,
            self.optimizer,
            accumulation=config.accumulation,
            ema_decay=config.ema,
            shardings=self.shardings,
        )
        log = MetricsLog(folder, step)
        try:
            self.state = fit(
                self.state,
                train_step,
                (place_batch(b, self.mesh, micro_batches=config.accumulation) for b in batches(step)),
                steps=config.steps,
                schedule=self.schedule,
                log=log,
                checkpoints=self.checkpoints,
                save_every=config.save_every,
                evaluate=lambda state: evaluate(state.model if state.ema is None else state.ema),
                evaluate_every=config.evaluate_every,
                best=best,
                lower_is_better=lower_is_better,
                step_timeout=step_timeout,
            )
        finally:
            log.close()
        model = self.state.ema
        if model is None:
            last = self.checkpoints.scheduled_steps()[-config.average :]
            model = self.checkpoints.average(self.state.model, last)
        self.checkpoints.save_model(runs.AVERAGED, model, step=int(self.state.step))
        return model
