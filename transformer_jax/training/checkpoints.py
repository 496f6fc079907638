"""Checkpoints that are complete or not there: async Orbax, and a manifest with a digest of every file.

Layout of `<folder>/<step>/`: `model/` and `training/` (Orbax, plain dictionaries of canonical names),
and `manifest.json`, written last. A folder without a manifest, or whose files do not match it, is not a
checkpoint.

Several processes save and read together: each its own parts of the arrays, in one folder that all of them
see. The first one alone writes manifests, removes what is old and says which checkpoint is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from transformer_jax.distributed.processes import broadcast_from_first, is_first, on_every_process
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import map_names, named_leaves, nested, with_leaves
from transformer_jax.training.manifests import (
    MANIFEST,
    digests,
    manifest_text,
    read_manifest,
    write_text_atomically,
)
from transformer_jax.training.objective import Objective
from transformer_jax.training.step import TrainState
from transformer_jax.training.totals import Totals

_log = logging.getLogger(__name__)

# Beside the folder of a checkpoint from the beginning of its save to the manifest.
_BEGUN = ".begun"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _storable(tree: Any) -> dict[str, Any]:
    """Leaves by canonical name, nested, random keys as their words; what holds nothing is left out."""
    leaves = named_leaves(tree)
    return nested({n: jax.random.key_data(x) if _is_key(x) else x for n, x in leaves.items()})


def _restored(target: Any, stored: dict[str, Any]) -> Any:
    leaves = named_leaves(stored)
    for name, leaf in named_leaves(target).items():
        if _is_key(leaf) and name in leaves:
            leaves[name] = jax.random.wrap_key_data(jnp.asarray(leaves[name]), impl=jax.random.key_impl(leaf))
    targets = named_leaves(target)

    def placed(name: str, leaf: Any) -> jax.Array:
        # Orbax gives NumPy arrays; as JAX's own they are put on the device once, not at each call.
        where = getattr(targets.get(name), "sharding", None)
        return jnp.asarray(leaf) if where is None else jax.device_put(leaf, where)

    return with_leaves(target, {name: placed(name, leaf) for name, leaf in leaves.items()})


def _parts(state: TrainState) -> dict[str, Any]:
    """The parts of a checkpoint, each a folder that can be read alone."""
    training = {field: getattr(state, field) for field in ("step", "optimizer_state", "key", "ema")}
    parts = {"model": state.trained | state.frozen, "training": training}
    return parts if state.extra is None else parts | {"extra": state.extra}


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Steps with a manifest in a folder of checkpoints, rising; their digests are not read."""
    return sorted(int(p.parent.name) for p in folder.glob(f"*/{MANIFEST}") if p.parent.name.isdigit())


class Checkpoints:
    """The checkpoints of a run.

    Args:
      folder: made at the first save.
      keep_last: how many of the newest scheduled ones are kept, in addition to the best and the newest.
      save_every: the schedule, in steps.
    """

    def __init__(self, folder: str | pathlib.Path, keep_last: int = 1, save_every: int = 1):
        self.folder = pathlib.Path(folder).absolute()
        self.keep_last, self.save_every = keep_last, save_every
        self.best: int | None = None
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._finisher: threading.Thread | None = None
        self._failure: BaseException | None = None

    # --- writing ------------------------------------------------------------

    def save(self, state: TrainState, totals: Totals = Totals(), *, best: bool = False) -> None:
        """Starts writing a checkpoint; returns once the state may be changed.

        An existing complete checkpoint of this step is left as it is.

        Args:
          state: what to save.
          totals: of the run so far; part of the manifest.
          best: keep this one until a better one comes.

        Raises:
          UserError: the disk is full or the folder cannot be written (of this save or of the one
            before it). Earlier checkpoints stay.
        """
        step = int(state.step)
        self.wait()
        if best:
            self.best = step
        if self.is_complete(step):
            return
        self._write(str(step), {name: _storable(part) for name, part in _parts(state).items()}, step, totals)

    def save_model(self, name: str, model: Any, *, step: int) -> None:
        """Writes parameters alone, under a name ("averaged"), and waits for it.

        An existing one of this name stays until the new one is complete.

        Args:
          name: of its folder.
          model: the parameters.
          step: the step that they belong to.

        Raises:
          UserError: the disk is full or the folder cannot be written.
        """
        self.wait()
        draft, target = self.folder / f"{name}.draft", self.folder / name
        self._write(draft.name, {"model": _storable(model)}, step)
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
                # What a killed save left behind: no manifest, so no checkpoint.
                shutil.rmtree(target, ignore_errors=True)
                self.folder.mkdir(parents=True, exist_ok=True)
                self._check_room(parts)
                (self.folder / f"{name}{_BEGUN}").touch()

        def begin() -> None:
            with _saving(target):
                args = {part: ocp.args.PyTreeSave(_copied(tree)) for part, tree in parts.items()}
                self._orbax.save(target, args=ocp.args.Composite(**args))

        broadcast_from_first(make_room)
        on_every_process(begin)
        self._finisher = threading.Thread(
            target=self._finish, args=(target, step, totals), name="checkpoint-manifest"
        )
        self._finisher.start()

    def _check_room(self, parts: dict[str, Any]) -> None:
        """Checks that the arrays fit on the disk, before any is written.

        A disk that runs full in the middle of a save is reported as well, but Orbax's own threads then
        print their tracebacks around it.
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
            manifest: dict[str, Any] = {"format_version": 3, "step": step, "sha256": digests(target)}
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
        """Waits until the save under way is complete in every process.

        Raises:
          UserError: it failed.
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
        """Waits for this process, and lets go of Orbax's threads.

        Raises:
          UserError: the save under way failed.
        """
        try:
            self._wait()
        finally:
            # Orbax raises a failed save's error once more; `wait` has said it already.
            with contextlib.suppress(Exception):
                self._orbax.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A save that is under way waits for a process that is gone, as this one must not.
        if kind is not None and jax.process_count() > 1 and issubclass(kind, (RuntimeError, ValueError)):
            return
        # What stopped the run is the error to show, not a save that failed after it.
        with contextlib.suppress(*([UserError] if kind else [])):
            self.close()

    # --- reading ------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps with a manifest, rising; their digests are not read."""
        return broadcast_from_first(self._steps)

    def _steps(self) -> list[int]:
        return saved_steps(self.folder)

    def scheduled_steps(self) -> list[int]:
        """The steps of the schedule and the newest, rising: those that are averaged.

        A checkpoint that was saved out of turn (a stop, a best evaluation) is none of them, so that a run
        that was interrupted ends with the average of one that was not.
        """
        steps = self.steps()
        return [step for step in steps if step % self.save_every == 0 or step == steps[-1]]

    def step_of(self, name: str) -> int | None:
        """The step of the complete checkpoint of this name, or None if absent."""
        return broadcast_from_first(lambda: self._step_of(name))

    def _step_of(self, name: str) -> int | None:
        manifest = read_manifest(self.folder / name) if self._is_whole(name) else None
        return None if manifest is None else manifest.get("step")

    def is_complete(self, name: int | str) -> bool:
        """Whether every file of a checkpoint, its manifest too, exists and is as it was written."""
        return broadcast_from_first(lambda: self._is_whole(name))

    def _is_whole(self, name: int | str) -> bool:
        folder = self.folder / str(name)
        manifest = read_manifest(folder)
        try:
            return manifest is not None and manifest["sha256"] == digests(folder)
        except (OSError, KeyError):
            return False

    def restore(self, target: TrainState) -> tuple[TrainState, Totals] | None:
        """The newest complete checkpoint, in the shape of `target`.

        Returns:
          (the state, the run's totals), or None if nothing was ever saved.

        Raises:
          UserError: folders of checkpoints exist but none is complete: never a silent step 0.
        """
        step = broadcast_from_first(self._newest)
        if step is None:
            return None
        parts = _parts(target)
        stored = self._read(step, parts)
        restored = {name: _restored(part, stored[name]) for name, part in parts.items()}
        state = target.replace(**restored["training"], extra=restored.get("extra"))
        totals = self.totals(step)
        self.best = totals.best_step  # which no later save may remove
        return state.with_model(restored["model"]), totals

    def totals(self, step: int) -> Totals:
        """The run's totals at a complete checkpoint."""

        def read() -> dict[str, Any]:
            return (read_manifest(self.folder / str(step)) or {}).get("totals", {})

        return Totals(**broadcast_from_first(read))

    def _newest(self) -> int | None:
        """The newest complete checkpoint; those after it are damaged, and no longer count."""
        damaged: list[int] = []
        for step in reversed(self._steps()):
            if not self._is_whole(step):
                damaged.append(step)
                _log.warning(
                    "checkpoint %s does not match its manifest; trying an older one", self.folder / str(step)
                )
                continue
            for other in damaged:
                # Without its manifest it counts as damaged: it is not averaged, kept or taken for saved.
                (self.folder / str(other) / MANIFEST).unlink(missing_ok=True)
            return step
        # A save that was begun and never ended leaves nothing to lose, a folder that was complete once does.
        begun = {p.name.removesuffix(_BEGUN) for p in self.folder.glob(f"*{_BEGUN}")}
        torn = [
            p.name
            for p in self.folder.glob("*")
            if p.is_dir() and ((p / MANIFEST).exists() or p.name.split(".")[0] not in begun)
        ]
        if torn:
            raise UserError(
                f"{self.folder}: {len(torn)} checkpoint(s) ({', '.join(sorted(torn)[:3])}), none complete: "
                "a save was interrupted or files were changed; delete the run folder or name another with "
                "`run_dir`"
            )
        return None

    def restore_model(self, target: Any, name: int | str) -> Any:
        """The parameters of one checkpoint, in the shape of `target`.

        Raises:
          UserError: it is not complete, or belongs to a model of another shape.
        """
        return self._restore_parts({"model": target}, name)["model"]

    def restore_kept(self, objective: Objective, model: Any, extra: Any, name: int | str) -> Any:
        """The model that a run is for, from one checkpoint of its state; with the moving average of its trained
        parameters if the run has one, as the step was validated.

        Args:
          objective: of the run; its `kept` is applied.
          model, extra: of the state, or their abstract shapes.
          name: of the checkpoint.

        Raises:
          UserError: see `restore_model`.
        """
        parts = {"model": model} if extra is None else {"model": model, "extra": extra}
        found = self._restore_parts(parts, name)
        leaves = named_leaves(found["model"])
        average = self._moving_average(name, leaves)
        return objective.kept(with_leaves(found["model"], leaves | average), found.get("extra"))

    def _moving_average(self, name: int | str, leaves: dict[str, Any]) -> dict[str, Any]:
        """The moving average in a checkpoint by canonical name, shaped as a model's leaves; {} without one."""
        path = self.folder / str(name)
        stored = ocp.PyTreeCheckpointHandler().metadata(path / "training").tree.get("ema")
        if not stored:
            return {}
        # The moments of the optimizer lie beside it; they are not read.
        targets = {own: leaves[own] for own in named_leaves(stored)}
        where = map_names(lambda own, _: _restore_args(targets[own]), stored)
        args = ocp.args.PyTreeRestore(item={"ema": stored}, restore_args={"ema": where}, partial_restore=True)
        read = self._orbax.restore(path, args=ocp.args.Composite(training=args))
        return _restored(targets, read["training"]["ema"])

    def _restore_parts(self, parts: dict[str, Any], name: int | str) -> dict[str, Any]:
        if not self.is_complete(name):
            raise UserError(f"{self.folder / str(name)}: not a complete checkpoint")
        try:
            stored = self._read(name, parts)
            return {part: _restored(target, stored[part]) for part, target in parts.items()}
        except ValueError as error:
            raise UserError(f"{self.folder / str(name)} holds another model: {error}") from None

    def average(self, restore: Callable[[int], Any], steps: Iterable[int]) -> Any:
        """The mean of the models of several checkpoints, added up in float64.

        Averaging the last checkpoints is what the paper evaluates (Vaswani et al. 2017, section 6.1).

        Args:
          restore: from a step to its model, see `restore_model` and `restore_kept`.
          steps: of the checkpoints; those that are not complete are left out.

        Raises:
          UserError: none is complete.
        """
        steps = [step for step in steps if self.is_complete(step)]
        if not steps:
            raise UserError(f"{self.folder}: no complete checkpoint to average")
        total: dict[str, dict[Any, np.ndarray]] = {}
        model = None
        for step in steps:
            model = restore(step)
            for name, leaf in named_leaves(model).items():
                so_far = total.setdefault(name, {})
                for device, part in _held(leaf).items():
                    so_far[device] = so_far.get(device, 0) + part.astype(np.float64)
        own = named_leaves(model)
        means = {name: {d: part / len(steps) for d, part in parts.items()} for name, parts in total.items()}
        return _restored(model, {name: _joined(own[name], parts) for name, parts in means.items()})

    def _read(self, name: int | str, targets: dict[str, Any]) -> dict[str, Any]:
        """The parts of a checkpoint as nested dictionaries: arrays of NumPy, or where a leaf of the target is
        sharded over processes, JAX's with this process's shards."""
        self.wait()
        path = self.folder / str(name)
        args = {}
        for part, target in targets.items():
            leaves = named_leaves(target)
            stored = ocp.PyTreeCheckpointHandler().metadata(path / part).tree
            where = map_names(lambda name, _, leaves=leaves: _restore_args(leaves.get(name)), stored)
            args[part] = ocp.args.PyTreeRestore(restore_args=where)
        return dict(self._orbax.restore(path, args=ocp.args.Composite(**args)).items())


def _is_sharded(leaf: Any) -> bool:
    """Whether other processes have shards of an array, real or abstract."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    if _is_sharded(leaf):
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _held(leaf: jax.Array) -> dict[Any, np.ndarray]:
    """This process's part of an array: all of it, or by device the shard of each of its devices."""
    if not _is_sharded(leaf):
        return {None: np.asarray(leaf)}
    return {shard.device: np.asarray(shard.data) for shard in leaf.addressable_shards}


def _joined(like: Any, parts: dict[Any, np.ndarray]) -> Any:
    """An array in the shape, dtype and place of another, from what `_held` gives."""
    if not _is_sharded(like):
        return parts[None].astype(like.dtype)
    placed = [jax.device_put(part.astype(like.dtype), device) for device, part in parts.items()]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)


def _copied(tree: Any) -> Any:
    """Host copies: the step that follows donates the buffers it was given.

    An array that is sharded over processes stays on its devices. Orbax copies what is on an accelerator before
    it returns; on a CPU it would read the buffers themselves later.
    """

    def copy(leaf: Any) -> Any:
        if not _is_sharded(leaf):
            return np.array(leaf)
        return jnp.copy(leaf) if jax.default_backend() == "cpu" else leaf

    return jax.tree.map(copy, tree)


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
