"""Parameters that a run starts from: of another run or of a published folder, copied by name."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax import pretrained
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import map_names, named_leaves
from transformer_jax.training.config import Start, as_json
from transformer_jax.training.run_folder import is_run, read_run
from transformer_jax.training.task import TaskEntry
from transformer_jax.training.trained_model import read_trained

# Fields of a model's config that do not change what its parameters mean; sizes show in their shapes.
_MEANINGLESS = {"dropout", "dtype", "max_length", "vocab_size", "vocab_multiple"}


@dataclasses.dataclass(frozen=True)
class OpenedStart:
    """A start whose folder was read.

    Attributes:
      start: see `Start`.
      model: the module of the folder.
      processor: of the folder.
      weights: which of its parameters were read.
    """

    start: Start
    model: Any
    processor: Any
    weights: str

    def leaves(self) -> dict[str, Any]:
        """The parameters that are copied, by their names in the new model.

        Raises:
          UserError: no parameter has the part's prefix, or a pattern matches none.
        """
        start = self.start
        leaves = named_leaves(self.model)
        for pattern in start.leave_out:
            matching = [name for name in leaves if re.fullmatch(pattern, name)]
            if not matching:
                raise UserError(f"`start` {start}: leave_out={pattern} matches no parameter of {start.folder}")
            leaves = {name: leaf for name, leaf in leaves.items() if name not in matching}
        prefix, into = (f"{name}/" if name else "" for name in (start.part, start.into))
        found = {into + name.removeprefix(prefix): x for name, x in leaves.items() if name.startswith(prefix)}
        if not found:
            firsts = sorted({name.split("/")[0] for name in leaves})
            raise UserError(
                f"`start` {start}: no parameter of {start.folder} begins with {prefix}; its parts are "
                f"{', '.join(firsts)}"
            )
        return found


def open_start(start: Start, tasks: Mapping[str, TaskEntry], run_dir: pathlib.Path) -> OpenedStart:
    """Reads the folder of a start.

    Args:
      start: see `Start`.
      tasks: by name.
      run_dir: of the run that starts.

    Raises:
      UserError: the run's own folder, no such folder, or one that cannot be read.
    """
    folder = pathlib.Path(start.folder)
    if folder.resolve() == run_dir.resolve():
        raise UserError(
            f"`start` {start.folder} is the run itself: name another `run_dir`, or leave `start` out"
        )
    if pretrained.is_published(folder):
        model, processor = pretrained.load(folder)
        return OpenedStart(start, model, processor, "published")
    if not is_run(folder):
        raise UserError(f"{folder / 'config.json'}: no such file; is {folder} the folder of a run?")
    stored = read_run(folder, tasks)
    model, weights = read_trained(folder, tasks[stored.task], stored)
    return OpenedStart(start, model, tasks[stored.task].processor.from_files(stored.files), weights)


def check_same_kind(opened: OpenedStart, model_config: Any) -> None:
    """Checks that a start that is copied completely is a model of the same kind as the new one.

    Raises:
      UserError: another model, or fields that change what its parameters mean.
    """
    start = opened.start
    if start.part or start.into or start.leave_out:
        return
    there = opened.model.config
    if type(there) is not type(model_config):
        raise UserError(
            f"`start` {start.folder} holds a {type(opened.model).__name__}, not a model of "
            f"{type(model_config).__name__}"
        )
    old, new = as_json(there), as_json(model_config)
    differ = [
        f"{name} is {old[name]!r} there, not {value!r}"
        for name, value in new.items()
        if name not in _MEANINGLESS and old[name] != value
    ]
    if differ:
        raise UserError(f"`start` {start.folder} holds another model: {'; '.join(differ[:4])}")


def started(model: Any, starts: Sequence[OpenedStart]) -> Any:
    """A fresh model with the parameters of its starts in their places.

    Raises:
      UserError: names that are missing, left over or of another shape, all in one line.
    """
    own, given, problems = named_leaves(model), {}, []
    for opened in starts:
        check_same_kind(opened, model.config)
        for name, leaf in opened.leaves().items():
            if name in given:
                problems.append(f"{name} comes from two starts")
            elif name not in own:
                problems.append(f"{name} is not in the new model")
            elif own[name].shape != leaf.shape:
                problems.append(f"{name} is {leaf.shape}, not {own[name].shape}")
            given[name] = leaf
    covered = {opened.start.into for opened in starts if not opened.start.leave_out}
    for name in own.keys() - given.keys():
        if any(not into or name.startswith(f"{into}/") for into in covered):
            problems.append(f"{name} is missing in the folders")
    if problems:
        folders = ", ".join(opened.start.folder for opened in starts)
        raise UserError(f"`start` {folders} does not fit: {'; '.join(sorted(problems))}")

    def placed(name: str, leaf: Any) -> Any:
        if name not in given:
            return leaf
        value = np.asarray(given[name]).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return map_names(placed, model)
