"""Run folders: everything that a trained model needs, in one place, readable by other tools.

`config.json` (format version, task, model, `RunConfig`, true model config, fingerprint), the files of the
processor, `checkpoints/`, `metrics.jsonl` with TensorBoard event files, `results.json`, pictures.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformer_jax.distributed.processes import broadcast_from_first
from transformer_jax.errors import UserError
from transformer_jax.models.registry import MODELS, name_of
from transformer_jax.training.checkpoints import Checkpoints, saved_steps, write_text_atomically
from transformer_jax.training.config import RunConfig, as_json, from_json, run_config_from_json
from transformer_jax.training.schedules import extends
from transformer_jax.training.task import Task, TaskEntry

FORMAT_VERSION = 2
CONFIG, RESULTS, CHECKPOINTS = "config.json", "results.json", "checkpoints"
AVERAGED = "averaged"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file of a run.

    Raises:
      UserError: no such file, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path}: no such file; is {path.parent} the folder of a run?") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file of a run, completely or not at all.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another `run_dir`") from None


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file of a run, completely or not at all.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free some space or choose another `run_dir`"
        ) from None


def is_run(folder: str | pathlib.Path) -> bool:
    """Whether a folder holds a run's config.

    Raises:
      UserError: the folder cannot be read.
    """
    try:
        path = pathlib.Path(folder) / CONFIG
        return path.exists() and "format_version" in read_json(path)
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another `run_dir`") from None


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """A run's `config.json`.

    Raises:
      UserError: not a run, or one of another format.
    """
    path = pathlib.Path(folder) / CONFIG
    config = read_json(path)
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version}, and this package reads {FORMAT_VERSION}: "
            "install the version that wrote it"
        )
    return config


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a run's `config.json` says.

    Attributes:
      task: name of the task.
      model: name of the model.
      run: its `RunConfig`.
      model_config: with the sizes that the data gave.
      fingerprint: of the data.
      files: of the processor and the task, by name.
      starts: digests of the folders in `run.start`, in the same order; empty in a run that was written before
        they were kept.
    """

    task: str
    model: str
    run: RunConfig
    model_config: Any
    fingerprint: str
    files: dict[str, bytes]
    starts: tuple[str, ...] = ()


def read_run(folder: str | pathlib.Path, tasks: Mapping[str, TaskEntry]) -> Stored:
    """A run's config with the files of its processor.

    Args:
      folder: of the run.
      tasks: by name.

    Raises:
      UserError: not a run, one of an unknown task or model, or a file is missing.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    what = str(folder / CONFIG)
    if config["task"] not in tasks:
        raise UserError(f"{what}: unknown task {config['task']!r}; known are {', '.join(tasks)}")
    entry = tasks[config["task"]]
    models = models_of(entry)
    if config["model"] not in models:
        raise UserError(f"{what}: unknown model {config['model']!r}; known are {', '.join(models)}")
    model_type = models[config["model"]].config
    run = run_config_from_json(config["run"], task=entry.config, model=model_type, what=what)
    files = {}
    for name in config["files"]:
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"{folder / name}: cannot be read ({error.strerror})") from None
    model_config = from_json(model_type, config["model_config"], f"{what}, model_config")
    starts = tuple(config.get("starts", ()))
    return Stored(config["task"], config["model"], run, model_config, config["fingerprint"], files, starts)


def models_of(entry: TaskEntry) -> Mapping[str, Any]:
    """The models that a task trains, by name."""
    return MODELS[entry.kind] if entry.models is None else entry.models


class RunFolder:
    """The folder of a run that is trained.

    Attributes:
      path: of the folder.
      stored: the run that exists there, or None.
    """

    def __init__(self, path: pathlib.Path, entry: TaskEntry, stored: Stored | None):
        self.path, self.entry, self.stored = path, entry, stored

    @classmethod
    def open(cls, path: pathlib.Path, entry: TaskEntry, config: RunConfig) -> RunFolder:
        """The folder of a new run, or of the run that exists there and has the same config.

        Raises:
          UserError: another run, something else, or a folder that cannot be read or written; nothing was
            changed.
        """

        def check() -> bool:
            if not is_run(path):
                check_free(path, {CONFIG, *entry.processor.FILES, *entry.files})
                return False
            found = read_config(path)
            if found["task"] != entry.name:
                raise UserError(f"{path} holds a run of another task ({found['task']}): name another `run_dir`")
            model = name_of(models_of(entry), config.model)
            if found["model"] != model:
                raise UserError(
                    f"{path} holds a run of {found['model']}, not of {model}: name another `run_dir`"
                )
            compare(path, read_run(path, {entry.name: entry}).run, config)
            return True

        exists = broadcast_from_first(check)
        return cls(path, entry, read_run(path, {entry.name: entry}) if exists else None)

    def compare_data(self, task: Task) -> None:
        """Checks that the data of a run that exists have not changed.

        Raises:
          UserError: they have.
        """
        if self.stored is None:
            return
        if self.stored.fingerprint != task.fingerprint:
            raise UserError(
                f"{self.path} holds a run on other data: use the same to resume it, or name another `run_dir`"
            )
        if self.stored.model_config != task.model_config:
            differ = _different(as_json(self.stored.model_config), as_json(task.model_config))
            raise UserError(f"{self.path} holds a run of another model ({'; '.join(differ[:4])})")

    def has_checkpoint(self) -> bool:
        """Return whether a save of this run was ever completed; without one the run starts from step 0."""
        return broadcast_from_first(lambda: bool(saved_steps(self.path / CHECKPOINTS)))

    def describe(self, config: RunConfig, task: Task, starts: Sequence[str] = ()) -> dict[str, Any]:
        """Return the contents of `config.json`; `starts` are the digests of a new run's start folders."""
        return dict(
            format_version=FORMAT_VERSION,
            task=self.entry.name,
            model=name_of(models_of(self.entry), config.model),
            run=as_json(config),
            model_config=as_json(task.model_config),
            fingerprint=task.fingerprint,
            files=sorted({**task.processor.files(), **task.files}),
            starts=list(starts if self.stored is None else self.stored.starts),
        )

    def begin(self, config: RunConfig, task: Task, starts: Sequence[str] = ()) -> None:
        """Write what a new run needs to be resumed, `config.json` last; update an existing run's free fields.

        Raises:
          UserError: the folder cannot be written.
        """
        described = self.describe(config, task, starts)
        if self.stored is None:
            for name, content in {**task.processor.files(), **task.files}.items():
                write_file(self.path / name, content)
            write_json(self.path / CONFIG, described)
        elif as_json(self.stored.run) != described["run"]:
            write_json(self.path / CONFIG, described)

    def checkpoints(self, config: RunConfig) -> Checkpoints:
        """The checkpoints of the run; a context manager."""
        optimization = config.optimization
        return Checkpoints(
            self.path / CHECKPOINTS, keep_last=optimization.average, save_every=optimization.save_every
        )

    def finish(self, results: Mapping[str, Any], record: Sequence[dict[str, Any]]) -> None:
        """Draws the losses and writes `results.json`.

        Raises:
          UserError: the folder cannot be written.
        """
        from transformer_jax.plotting.curves import plot_losses  # matplotlib takes seconds to import

        try:
            plot_losses(record, self.path / "loss.png")
        except OSError as error:
            raise UserError(f"{self.path / 'loss.png'}: cannot be written ({error}); free some space") from None
        write_json(self.path / RESULTS, results)


def compare(folder: pathlib.Path, stored: RunConfig, config: RunConfig) -> None:
    """Checks that a config is the one of the run in the folder.

    Raises:
      UserError: another config, with the fields that differ; the run is unchanged.
    """
    old, new, free = stored.values(), config.values(), config.free()
    differ = list(_different({n: v for n, v in old.items() if n not in free}, new, flags=True))
    if differ:
        raise UserError(
            f"{folder} holds a run of another config ({'; '.join(differ[:4])}): use the same values to "
            "resume it, or name another `run_dir`"
        )
    before, after = stored.optimization, config.optimization
    if after.steps > before.steps and not before.extends:
        what = "schedule of weight decay" if extends(before.schedule) else f"{before.schedule} schedule"
        raise UserError(
            f"{folder} was trained for {before.steps} steps on a {what}, which ends there: "
            f"`steps` {after.steps} needs another `run_dir`, or `schedule` inverse_sqrt from the start"
        )
    done = max(saved_steps(folder / CHECKPOINTS), default=0)
    least = done if before.extends else before.steps
    if after.steps < least:
        raise UserError(
            f"{folder} is a run of {least} steps: `steps` {after.steps} would cut it short; "
            "name another `run_dir`"
        )


def _different(old: Mapping[str, Any], new: Mapping[str, Any], *, flags: bool = False) -> list[str]:
    mark = "`" if flags else ""
    return [
        f"{mark}{name}{mark} is {value!r} there, not {new.get(name)!r}"
        for name, value in old.items()
        if new.get(name) != value
    ]


def check_free(folder: pathlib.Path, unfinished: set[str]) -> None:
    """Checks that a new run may be made in the folder: it is absent, or holds only what an interrupted start
    leaves, files of these names.

    Raises:
      UserError: it holds something else, or the folder cannot be read or written.
    """
    try:
        names = {p.name.removesuffix(".draft") for p in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another `run_dir`") from None
    if names - unfinished:
        raise UserError(f"{folder} exists and is not a run: name another `run_dir`")
    # The folder could be read above, so its parents can.
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({parent} is no writable folder); name another `run_dir`")


def checkpoint_names(checkpoints: Checkpoints) -> Iterator[str]:
    """The complete checkpoints of a run by name, the one to use first.

    The averaged parameters come first, unless the run was extended after they were made.
    """
    steps = checkpoints.steps()
    if (checkpoints.step_of(AVERAGED) or -1) >= max(steps, default=0):
        yield AVERAGED
    for step in reversed(steps):
        if checkpoints.is_complete(step):
            yield str(step)
