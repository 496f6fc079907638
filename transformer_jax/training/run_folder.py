"""Run folders: everything that a trained model needs, in files that other tools can read.

`config.json` (format version, task, model, `RunConfig`, model config with the sizes of the data, fingerprint),
the files of the processor, `checkpoints/`, `metrics.jsonl` with TensorBoard event files, `results.json`,
pictures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from transformer_jax.distributed.processes import agreed, broadcast_from_first, on_every_process
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_bytes, read_object
from transformer_jax.models.registry import MODELS, name_of
from transformer_jax.training.checkpoints import Checkpoints, saved_steps
from transformer_jax.training.config import RunConfig, as_json, from_json, run_config_from_json
from transformer_jax.training.manifests import MANIFEST, write_text_atomically
from transformer_jax.training.run_lock import LOCK
from transformer_jax.training.schedules import extends
from transformer_jax.training.task import OpenedStart, Task, TaskEntry

FORMAT_VERSION = 2
CONFIG, RESULTS, CHECKPOINTS = "config.json", "results.json", "checkpoints"
AVERAGED = "averaged"


class _Description(msgspec.Struct, forbid_unknown_fields=True):
    """Contents of a run's `config.json`.

    `files` holds the digest of each file by name, and only the names in folders older than the digests, which
    have no `identity` and no digest of this file either.
    """

    format_version: int
    task: str
    model: str
    run: dict[str, Any]
    model_config: dict[str, Any]
    fingerprint: str
    files: dict[str, str] | list[str]
    starts: list[str] = []
    identity: str = ""
    sha256: str = ""


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file of a run, completely or not at all.

    Raises:
      UserError: The folder cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another `run_dir`") from None


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Write a file of a run, completely or not at all.

    Raises:
      UserError: The folder cannot be written, or the disk is full.
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
    """Return whether a folder holds a run's config.

    Raises:
      UserError: The folder cannot be read.
    """
    try:
        path = pathlib.Path(folder) / CONFIG
        return path.exists() and "format_version" in read_object(path)
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another `run_dir`") from None


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """Read a run's `config.json`.

    Raises:
      UserError: The folder is not a run, or a run of another format.
    """
    path = pathlib.Path(folder) / CONFIG
    if not path.exists():
        raise UserError(f"{path}: no such file; is {path.parent} the folder of a run, or of weights?")
    config = read_object(path)
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version}, and this package reads {FORMAT_VERSION}: "
            "install the version that wrote it"
        )
    description = convert(config, _Description, str(path))
    if description.sha256 not in ("", _digest({n: v for n, v in config.items() if n != "sha256"})):
        raise UserError(f"{path} does not match its digest; it was changed by hand: restore it")
    return config


def _digest(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Stored:
    """Contents of a run's `config.json` and of the files that it lists.

    Attributes:
      task: Name of the task.
      model: Name of the model.
      run: The run's config.
      model_config: The model's config, with the sizes of the data.
      fingerprint: Digest of the data.
      files: Files of the processor and the task, by name.
      starts: Digests of the folders in `run.start`, in the same order; empty in runs older than this field.
      identity: Digest of the config that the run was created with; "" in runs older than this field.
    """

    task: str
    model: str
    run: RunConfig
    model_config: Any
    fingerprint: str
    files: dict[str, bytes]
    starts: tuple[str, ...] = ()
    identity: str = ""


def read_run(folder: str | pathlib.Path, tasks: Mapping[str, TaskEntry]) -> Stored:
    """Read a run's config and the files of its processor.

    Args:
      folder: The run's folder.
      tasks: Task entries by name.

    Raises:
      UserError: The folder is not a run, its task or model is unknown, or a file is missing.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    path = str(folder / CONFIG)
    if config["task"] not in tasks:
        raise UserError(f"{path}: unknown task {config['task']!r}; known are {', '.join(tasks)}")
    entry = tasks[config["task"]]
    models = models_of(entry)
    if config["model"] not in models:
        raise UserError(f"{path}: unknown model {config['model']!r}; known are {', '.join(models)}")
    model_type = models[config["model"]].config
    run = run_config_from_json(config["run"], task=entry.config, model=model_type, source=path)
    files = {}
    for name in config["files"]:
        if name not in {*entry.processor.FILES, *entry.files}:
            raise UserError(f"{path}: {name!r} is not a file of a run of {config['task']}")
        files[name] = read_bytes(folder / name)
        digest = config["files"][name] if isinstance(config["files"], dict) else None
        if digest not in (None, hashlib.sha256(files[name]).hexdigest()):
            raise UserError(f"{folder / name} does not match its digest in {CONFIG}: restore it")
    model_config = from_json(model_type, config["model_config"], f"{path}, model_config")
    starts = tuple(config.get("starts", ()))
    return Stored(
        config["task"], config["model"], run, model_config, config["fingerprint"], files, starts,
        config.get("identity", ""),
    )  # fmt: skip


def models_of(entry: TaskEntry) -> Mapping[str, Any]:
    """Return the models that a task trains, by name."""
    return MODELS[entry.kind] if entry.models is None else entry.models


class RunFolder:
    """The folder of a run that is trained.

    Attributes:
      path: The folder.
      entry: The task's entry.
      stored: The run that exists in the folder, or None.
    """

    def __init__(self, path: pathlib.Path, entry: TaskEntry, stored: Stored | None):
        self.path, self.entry, self.stored = path, entry, stored

    @classmethod
    def open(cls, path: pathlib.Path, entry: TaskEntry, config: RunConfig) -> RunFolder:
        """Open the folder of a new run, or of an existing run with the same config; nothing is written.

        Raises:
          UserError: The folder holds another run or something else, or cannot be read or written.
        """

        def check() -> bool:
            if not is_run(path):
                check_free(path, {CONFIG, *entry.processor.FILES, *entry.files})
                return False
            existing = read_config(path)
            if existing["task"] != entry.name:
                raise UserError(
                    f"{path} holds a run of another task ({existing['task']}): name another `run_dir`"
                )
            model = name_of(models_of(entry), config.model)
            if existing["model"] != model:
                raise UserError(
                    f"{path} holds a run of {existing['model']}, not of {model}: name another `run_dir`"
                )
            check_same_config(path, read_run(path, {entry.name: entry}).run, config)
            return True

        exists = broadcast_from_first(check)
        stored = on_every_process(lambda: read_run(path, {entry.name: entry}) if exists else None)
        return cls(path, entry, stored)

    @agreed
    def check_same_data(self, task: Task) -> None:
        """Check that the data of an existing run have not changed.

        Raises:
          UserError: The data or the model sizes that follow from them have changed.
        """
        if self.stored is None:
            return
        if self.stored.fingerprint != task.fingerprint:
            raise UserError(
                f"{self.path} holds a run on other data: use the same to resume it, or name another `run_dir`"
            )
        if self.stored.model_config != task.model_config:
            differences = _differences(as_json(self.stored.model_config), as_json(task.model_config))
            raise UserError(f"{self.path} holds a run of another model ({'; '.join(differences[:4])})")

    def has_checkpoint(self) -> bool:
        """Return whether a save of this run was ever completed; without one the run starts from step 0."""
        return broadcast_from_first(lambda: bool(saved_steps(self.path / CHECKPOINTS)))

    def describe(self, config: RunConfig, task: Task, starts: Sequence[OpenedStart] = ()) -> dict[str, Any]:
        """Return the contents of `config.json`; a new run stores the digests of its `starts`."""
        digests = [start.digest for start in starts] if self.stored is None else self.stored.starts
        # The files of an existing run are not written again, and may be fewer than those of this version.
        files = {**task.processor.files(), **task.files} if self.stored is None else self.stored.files
        description: dict[str, Any] = dict(
            format_version=FORMAT_VERSION,
            task=self.entry.name,
            model=name_of(models_of(self.entry), config.model),
            run=as_json(config),
            model_config=as_json(task.model_config),
            fingerprint=task.fingerprint,
            files={name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)},
            starts=list(digests),
        )
        identity = _digest(description) if self.stored is None else self.stored.identity
        description |= {"identity": identity}
        return description | {"sha256": _digest(description)}

    def create(self, config: RunConfig, task: Task, starts: Sequence[OpenedStart] = ()) -> None:
        """Write what a new run needs to be resumed, `config.json` last; update an existing run's free fields.

        Raises:
          UserError: The folder cannot be written, or a process does not see what the first one wrote.
        """

        def write() -> None:
            description = self.describe(config, task, starts)
            if self.stored is None:
                for name, content in {**task.processor.files(), **task.files}.items():
                    write_file(self.path / name, content)
            elif as_json(self.stored.run) == description["run"]:
                return
            write_json(self.path / CONFIG, description)

        broadcast_from_first(write)
        on_every_process(lambda: read_config(self.path))

    def checkpoints(self, config: RunConfig, identity: str) -> Checkpoints:
        """Return the checkpoints of the run, a context manager."""
        optimization = config.optimization
        return Checkpoints(
            self.path / CHECKPOINTS, keep_last=optimization.average, save_every=optimization.save_every,
            run=identity,
        )  # fmt: skip

    def finish(self, results: Mapping[str, Any], metrics: Sequence[dict[str, Any]]) -> None:
        """Draw the losses and write `results.json`.

        Raises:
          UserError: The folder cannot be written.
        """

        def write() -> None:
            from transformer_jax.plotting.curves import plot_losses  # matplotlib takes seconds to import

            picture = self.path / "loss.png"
            try:
                plot_losses(metrics, picture)
            except OSError as error:
                raise UserError(f"{picture}: cannot be written ({error}); free some space") from None
            write_json(self.path / RESULTS, results)

        broadcast_from_first(write)


def check_same_config(folder: pathlib.Path, stored: RunConfig, config: RunConfig) -> None:
    """Check that a config is that of the run in the folder, or extends it to more steps.

    Raises:
      UserError: The config differs; the message lists the fields.
    """
    old, new, free = stored.values(), config.values(), config.free()
    differences = _differences({n: v for n, v in old.items() if n not in free}, new, mark="`")
    if differences:
        raise UserError(
            f"{folder} holds a run of another config ({'; '.join(differences[:4])}): use the same values to "
            "resume it, or name another `run_dir`"
        )
    before, after = stored.optimization, config.optimization
    if after.steps > before.steps and not before.extends:
        kind = "schedule of weight decay" if extends(before.schedule) else f"{before.schedule} schedule"
        raise UserError(
            f"{folder} was trained for {before.steps} steps on a {kind}, which ends there: "
            f"`steps` {after.steps} needs another `run_dir`, or `schedule` inverse_sqrt from the start"
        )
    steps_done = max(saved_steps(folder / CHECKPOINTS), default=0)
    minimum = steps_done if before.extends else before.steps
    if after.steps < minimum:
        raise UserError(
            f"{folder} is a run of {minimum} steps: `steps` {after.steps} would shorten it; "
            "name another `run_dir`"
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], *, mark: str = "") -> list[str]:
    return [
        f"{mark}{name}{mark} is {value!r} there, not {new.get(name)!r}"
        for name, value in old.items()
        if new.get(name) != value
    ]


def check_free(folder: pathlib.Path, unfinished: set[str]) -> None:
    """Check that a new run may be created in a folder.

    The folder must be absent, or hold only the files that an interrupted creation leaves.

    Args:
      folder: The run's folder.
      unfinished: Names of the files that an interrupted creation leaves.

    Raises:
      UserError: The folder holds something else, or cannot be read or written.
    """
    try:
        names = {p.name.removesuffix(".draft") for p in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another `run_dir`") from None
    if names - unfinished - {LOCK}:
        raise UserError(f"{folder} exists and is not a run: name another `run_dir`")
    # The folder could be read above, so its parents can.
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(
            f"{folder}: cannot be written ({parent} is not a writable folder); name another `run_dir`"
        )


def checkpoint_names(checkpoints: Checkpoints) -> Iterator[str]:
    """Yield the names of a run's complete checkpoints, in the order of preference.

    The averaged parameters come first, unless the run was extended after they were computed.
    """
    steps = checkpoints.steps()
    if (checkpoints.folder / AVERAGED / MANIFEST).exists() and not checkpoints.is_complete(AVERAGED):
        warnings.warn(
            f"{checkpoints.folder / AVERAGED} does not match its manifest; another checkpoint is read instead",
            stacklevel=2,
        )
    elif (checkpoints.step_of(AVERAGED) or -1) >= max(steps, default=0):
        yield AVERAGED
    for step in reversed(steps):
        if checkpoints.is_complete(step):
            yield str(step)
