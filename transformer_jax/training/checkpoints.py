"""Checkpoints: written by asynchronous Orbax, with a manifest that holds a digest of every file.

Layout of `<folder>/<step>/`: `model/` and `training/` (Orbax, plain dictionaries of canonical names),
and `manifest.json`, written last. A folder without a manifest, or whose files do not match it, is not a
checkpoint.

Several processes save and read together, each its shards of the arrays, in one folder that all of them
see. Only the first process writes manifests, removes old checkpoints and chooses the checkpoint to read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from transformer_jax.distributed.processes import broadcast_from_first, is_first, on_every_process
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import map_names, named_leaves, with_leaves
from transformer_jax.training.manifests import (
    MANIFEST,
    digests,
    manifest_text,
    read_manifest,
    write_text_atomically,
)
from transformer_jax.training.objective import Objective
from transformer_jax.training.step import TrainState
from transformer_jax.training.stored_arrays import (
    copy_to_host,
    join_parts,
    local_parts,
    restore_args_for,
    restored_like,
    storable,
)
from transformer_jax.training.totals import Totals

_log = logging.getLogger(__name__)

# Suffix of the file that marks an unfinished save; it is removed once the manifest is written.
_BEGUN = ".begun"
# Suffix of the folder of a checkpoint that replaces another one when it is complete.
_DRAFT = ".draft"
# Name of the folder of a step.
_STEP = r"0|[1-9][0-9]{0,17}"


def _parts(state: TrainState) -> dict[str, Any]:
    """Return the parts of a checkpoint, each of which becomes a folder that can be read separately."""
    training = {field: getattr(state, field) for field in ("step", "optimizer_state", "key", "ema")}
    parts = {"model": state.trained | state.frozen, "training": training}
    return parts if state.extra is None else parts | {"extra": state.extra}


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Return the steps with a manifest, in ascending order, without comparing digests."""
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    return sorted(int(name) for name in names if re.fullmatch(_STEP, name))


class Checkpoints:
    """The checkpoints of a run.

    Args:
      folder: Folder of the checkpoints, created at the first save.
      keep_last: Number of newest scheduled checkpoints to keep, in addition to the best and the newest.
      save_every: Steps between scheduled checkpoints.
      run: `RunFolder.identity` of the run, which its manifests contain; "" accepts those of any run.
    """

    def __init__(self, folder: str | pathlib.Path, keep_last: int = 1, save_every: int = 1, *, run: str = ""):
        self.folder, self.run = pathlib.Path(folder).absolute(), run
        self.keep_last, self.save_every = keep_last, save_every
        self.best: int | None = None
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._finisher: threading.Thread | None = None
        self._failure: BaseException | None = None

    # --- writing ------------------------------------------------------------

    def save(self, state: TrainState, totals: Totals = Totals(), *, best: bool = False) -> None:
        """Start writing a checkpoint and return once the state may be changed.

        An existing complete checkpoint of this step is not written again.

        Args:
          state: The state to save.
          totals: The run's totals so far, part of the manifest.
          best: Keep this checkpoint until a better one is saved.

        Raises:
          UserError: The disk is full or the folder cannot be written, in this save or the previous one. Earlier
            checkpoints stay.
        """
        step = int(state.step)
        self.wait()
        if best:
            self.best = step
        if self.is_complete(step):
            return
        self._write(str(step), {name: storable(part) for name, part in _parts(state).items()}, step, totals)

    def save_model(self, name: str, model: Any, *, step: int) -> None:
        """Write a checkpoint of parameters only, and wait until it is complete.

        An existing checkpoint of this name stays until the new one is complete.

        Args:
          name: Name of its folder, such as "averaged".
          model: The module with the parameters.
          step: The step that the parameters belong to.

        Raises:
          UserError: The disk is full or the folder cannot be written.
        """
        self.wait()
        draft, target = self.folder / f"{name}{_DRAFT}", self.folder / name
        self._write(draft.name, {"model": storable(model)}, step)
        self.wait()

        def replace() -> None:
            with _saving(target):
                shutil.rmtree(target, ignore_errors=True)
                draft.rename(target)

        broadcast_from_first(replace)

    def _write(self, name: str, parts: dict[str, Any], step: int, totals: Totals | None = None) -> None:
        target = self.folder / name

        def make_room() -> None:
            with _saving(target):
                # A killed save leaves a folder without a manifest.
                shutil.rmtree(target, ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._check_room(parts)
                (self.folder / f"{name}{_BEGUN}").touch()

        def start() -> None:
            with _saving(target):
                args = {part: ocp.args.PyTreeSave(copy_to_host(tree)) for part, tree in parts.items()}
                self._orbax.save(target, args=ocp.args.Composite(**args))

        broadcast_from_first(make_room)
        on_every_process(start)
        self._finisher = threading.Thread(
            target=self._finish, args=(target, step, totals), name="checkpoint-manifest"
        )
        self._finisher.start()

    def _check_room(self, parts: dict[str, Any]) -> None:
        """Check that the arrays fit on the disk before any is written.

        If the disk becomes full during a save, Orbax's threads print tracebacks around the error.
        """
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:,.1f} MB to write, {free / 1e6:,.1f} MB free")

    def _finish(self, target: pathlib.Path, step: int, totals: Totals | None) -> None:
        try:
            self._orbax.wait_until_finished()
            if not is_first():
                return
            name = target.name.removesuffix(_DRAFT)
            manifest: dict[str, Any] = {
                "format_version": 3, "step": step, "sha256": digests(target), "name": name, "run": self.run
            }  # fmt: skip
            if totals is not None:
                manifest["totals"] = dataclasses.asdict(totals)
            write_text_atomically(target / MANIFEST, manifest_text(manifest))
            for begun in self.folder.glob(f"*{_BEGUN}"):
                begun.unlink()
            self._remove_old()
        except Exception as error:  # noqa: BLE001  handed to the thread that saves
            self._failure = _saving_error(target, error)

    def _remove_old(self) -> None:
        steps = self._steps()
        kept = {self.best, *steps[-1:], *[s for s in steps if s % self.save_every == 0][-self.keep_last :]}
        for step in steps:
            if step not in kept:
                # The manifest goes first: a half-removed folder must not look complete.
                (self.folder / str(step) / MANIFEST).unlink()
                shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def wait(self) -> None:
        """Wait until the current save is complete in every process.

        Raises:
          UserError: The save failed.
        """
        on_every_process(self._wait)

    def _wait(self) -> None:
        if self._finisher is not None:
            self._finisher.join()
            self._finisher = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for the current save in this process and release Orbax's threads.

        Raises:
          UserError: The save failed.
        """
        try:
            self._wait()
        finally:
            # Orbax raises the error of a failed save again, which `wait` has already reported.
            with contextlib.suppress(Exception):
                self._orbax.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The current save may be waiting for a process that has ended; this one must not wait as well.
        if kind is not None and jax.process_count() > 1 and issubclass(kind, (RuntimeError, ValueError)):
            return
        # The error that stopped the run matters more than a save that failed after it.
        with contextlib.suppress(*([UserError] if kind else [])):
            self.close()

    # --- reading ------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps with a manifest, in ascending order, without comparing digests."""
        return broadcast_from_first(self._steps)

    def _steps(self) -> list[int]:
        return saved_steps(self.folder)

    def scheduled_steps(self) -> list[int]:
        """Return the scheduled steps and the newest, in ascending order: the checkpoints to average.

        Checkpoints saved at a stop or a best evaluation are excluded, so that an interrupted run ends with the
        same average as an uninterrupted one.
        """
        steps = self.steps()
        return [step for step in steps if step % self.save_every == 0 or step == steps[-1]]

    def step_of(self, name: str) -> int | None:
        """Return the step of the complete checkpoint of this name, or None if there is none."""
        return broadcast_from_first(lambda: self._step_of(name))

    def _step_of(self, name: str) -> int | None:
        manifest = read_manifest(self.folder / name) if self._is_complete(name) else None
        return None if manifest is None else manifest.step

    def is_complete(self, name: int | str) -> bool:
        """Return whether a checkpoint belongs to its name and run, and all files exist and are unchanged."""
        return broadcast_from_first(lambda: self._is_complete(name))

    def _is_complete(self, name: int | str) -> bool:
        folder = self.folder / str(name)
        manifest = read_manifest(folder)
        try:
            return (
                manifest is not None
                and manifest.name in ("", str(name))
                and (not re.fullmatch(_STEP, str(name)) or manifest.step == int(name))
                and (not self.run or manifest.run in ("", self.run))
                and manifest.sha256 == digests(folder)
            )
        except OSError:
            return False

    def restore(self, target: TrainState) -> tuple[TrainState, Totals] | None:
        """Restore the newest complete checkpoint in the shape of `target`.

        Returns:
          (the state, the run's totals), or None if nothing was ever saved.

        Raises:
          UserError: Folders of checkpoints exist but none is complete; the run never restarts silently.
        """
        step = broadcast_from_first(self._newest)
        if step is None:
            return None
        parts = _parts(target)
        stored = self._read(step, parts)
        restored = {name: restored_like(part, stored[name]) for name, part in parts.items()}
        state = target.replace(**restored["training"], extra=restored.get("extra"))
        totals = self.totals(step)
        self.best = totals.best_step  # protects the best checkpoint from later saves
        return state.with_model(restored["model"]), totals

    def totals(self, step: int) -> Totals:
        """Return the run's totals at a complete checkpoint."""

        def read() -> dict[str, Any]:
            manifest = read_manifest(self.folder / str(step))
            totals = None if manifest is None else manifest.totals
            return {} if totals is None else dataclasses.asdict(totals)

        return Totals(**broadcast_from_first(read))

    def _newest(self) -> int | None:
        """Return the newest complete step and remove the manifests of damaged ones after it."""
        damaged: list[int] = []
        for step in reversed(self._steps()):
            if not self._is_complete(step):
                damaged.append(step)
                _log.warning(
                    "checkpoint %s does not match its manifest; trying an older one", self.folder / str(step)
                )
                continue
            for damaged_step in damaged:
                # Without a manifest it is neither averaged, nor kept, nor mistaken for saved.
                (self.folder / str(damaged_step) / MANIFEST).unlink(missing_ok=True)
            return step
        # An unfinished first save loses nothing; a folder that was complete once holds training time.
        unfinished = {p.name.removesuffix(_BEGUN) for p in self.folder.glob(f"*{_BEGUN}")}
        incomplete = [
            p.name
            for p in self.folder.glob("*")
            if p.is_dir() and ((p / MANIFEST).exists() or p.name.split(".")[0] not in unfinished)
        ]
        if incomplete:
            names = ", ".join(sorted(incomplete)[:3])
            raise UserError(
                f"{self.folder}: {len(incomplete)} checkpoint(s) ({names}), none complete: "
                "a save was interrupted or files were changed; delete the run folder or name another with "
                "`run_dir`"
            )
        return None

    def restore_model(self, target: Any, name: int | str) -> Any:
        """Restore the parameters of one checkpoint in the shape of `target`.

        Raises:
          UserError: The checkpoint is incomplete, or belongs to a model of another shape.
        """
        return self._restore_parts({"model": target}, name)["model"]

    def restore_kept(self, objective: Objective, model: Any, extra: Any, name: int | str) -> Any:
        """Restore the model that was validated at a checkpoint: `kept` of the objective, with moving averages.

        Args:
          objective: The run's objective.
          model: The state's model, or its abstract shape.
          extra: The state's extra state, or its abstract shape.
          name: Name of the checkpoint.

        Raises:
          UserError: See `restore_model`.
        """
        parts = {"model": model} if extra is None else {"model": model, "extra": extra}
        restored = self._restore_parts(parts, name)
        leaves = named_leaves(restored["model"])
        average = self._moving_average(name, leaves)
        return objective.kept(with_leaves(restored["model"], leaves | average), restored.get("extra"))

    def _moving_average(self, name: int | str, leaves: dict[str, Any]) -> dict[str, Any]:
        """Return the moving average of a checkpoint by canonical name, shaped like `leaves`; {} without one."""
        path = self.folder / str(name)
        stored = ocp.PyTreeCheckpointHandler().metadata(path / "training").tree.get("ema")
        if not stored:
            return {}
        # A partial restore skips the optimizer's moments in the same part.
        targets = {leaf_name: leaves[leaf_name] for leaf_name in named_leaves(stored)}
        restore_args = map_names(lambda leaf_name, _: restore_args_for(targets[leaf_name]), stored)
        args = ocp.args.PyTreeRestore(
            item={"ema": stored}, restore_args={"ema": restore_args}, partial_restore=True
        )
        restored = self._orbax.restore(path, args=ocp.args.Composite(training=args))
        return restored_like(targets, restored["training"]["ema"])

    def _restore_parts(self, parts: dict[str, Any], name: int | str) -> dict[str, Any]:
        if not self.is_complete(name):
            raise UserError(f"{self.folder / str(name)}: not a complete checkpoint")
        try:
            stored = self._read(name, parts)
            return {part: restored_like(target, stored[part]) for part, target in parts.items()}
        except ValueError as error:
            raise UserError(f"{self.folder / str(name)} holds another model: {error}") from None

    def average(self, restore: Callable[[int], Any], steps: Iterable[int]) -> Any:
        """Return the mean of the models of several checkpoints, summed in float64.

        The paper evaluates the average of the last checkpoints (Vaswani et al. 2017, section 6.1).

        Args:
          restore: Function from a step to its model, see `restore_model` and `restore_kept`.
          steps: Steps of the checkpoints; incomplete ones are skipped.

        Raises:
          UserError: No checkpoint is complete.
        """
        steps = [step for step in steps if self.is_complete(step)]
        if not steps:
            raise UserError(f"{self.folder}: no complete checkpoint to average")
        total: dict[str, dict[Any, np.ndarray]] = {}
        model = None
        for step in steps:
            model = restore(step)
            for name, leaf in named_leaves(model).items():
                sums = total.setdefault(name, {})
                for device, part in local_parts(leaf).items():
                    sums[device] = sums.get(device, 0) + part.astype(np.float64)
        leaves = named_leaves(model)
        means = {name: {d: part / len(steps) for d, part in parts.items()} for name, parts in total.items()}
        return restored_like(model, {name: join_parts(leaves[name], parts) for name, parts in means.items()})

    def _read(self, name: int | str, targets: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a checkpoint as nested dictionaries.

        Leaves are NumPy arrays, or JAX arrays with this process's shards if the target is sharded over
        processes.
        """
        self.wait()
        path = self.folder / str(name)
        args = {}
        for part, target in targets.items():
            leaves = named_leaves(target)
            stored = ocp.PyTreeCheckpointHandler().metadata(path / part).tree
            restore_args = map_names(lambda name, _, leaves=leaves: restore_args_for(leaves.get(name)), stored)
            args[part] = ocp.args.PyTreeRestore(restore_args=restore_args)
        return dict(self._orbax.restore(path, args=ocp.args.Composite(**args)).items())


@contextlib.contextmanager
def _saving(target: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _saving_error(target, error) from error


def _saving_error(target: pathlib.Path, error: BaseException) -> UserError:
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    detail = f" ({error.strerror})" if isinstance(error, OSError) else ""
    reason = f"the disk is full; free some space{detail}"
    if not full:
        reason = f"{error}; check the folder and its permissions"
    line = " ".join(f"{target}: the checkpoint could not be written: {reason}".split())
    return UserError(line[:500])
