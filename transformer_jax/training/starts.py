"""Parameters that a run starts from: of another run or of a published folder, copied by name."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax import pretrained
from transformer_jax.errors import UserError
from transformer_jax.models.encoders.electra import ElectraGenerator
from transformer_jax.models.encoders.encoder import TextEncoder
from transformer_jax.models.registry import MODELS
from transformer_jax.models.vision.vit import ViT
from transformer_jax.parameter_names import map_names, named_leaves
from transformer_jax.training.config import RunConfig, Start, as_json, field_names, from_json
from transformer_jax.training.run_folder import RunFolder, is_run, read_config, read_run
from transformer_jax.training.task import TaskEntry
from transformer_jax.training.trained_model import read_trained

# Fields of a model's config that do not change what its parameters mean; sizes show in their shapes.
_MEANINGLESS = {
    "dropout", "attention_dropout", "classifier_dropout", "classifier_pooling", "reader_dropout", "dtype",
    "max_length", "vocab_size", "vocab_multiple", "classes", "pooler", "generator_size", "stochastic_depth",
    "initial_values",
}  # fmt: skip
# What transformers calls classes that were given no names.
_UNNAMED = r"LABEL_\d+"
# What an encoder may have or lack, by the task that it is for, with the head that reads it.
_OPTIONAL = re.compile(r"(.*/)?(pooler|next_sentence)/.*")


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

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything that is read from the folder: config, parameters and processor."""
        digest = hashlib.sha256(json.dumps(as_json(self.model.config), sort_keys=True).encode())
        for name, leaf in sorted(named_leaves(self.model).items()):
            array = np.ascontiguousarray(leaf)
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
        files = {} if self.processor is None else self.processor.files()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)}".encode())
            digest.update(content)
        return digest.hexdigest()

    @property
    def whole(self) -> bool:
        """Whether the start names neither a part nor a place nor what stays out."""
        return not (self.start.part or self.start.into or self.start.leave_out)

    def of_other_task(self, model: Any) -> bool:
        """Whether the folder holds an encoder with another task's head than the new model has."""
        return self.whole and type(self.model) is not type(model) and _body(self.model) is not None

    def of_other_classes(self, model: Any, labels: Sequence[str] = ()) -> bool:
        """Whether it has the head of the new model for other classes, by their number or by their `labels`."""
        there, here = (getattr(config, "classes", 0) for config in (self.model.config, model.config))
        names = tuple(getattr(self.processor, "labels", ()))
        if all(re.fullmatch(_UNNAMED, name) for name in names):
            names = ()
        other = there != here or bool(names and labels and names != tuple(labels))
        return self.whole and type(self.model) is type(model) and other

    def leaves(self, model: Any) -> dict[str, Any]:
        """The parameters that are copied, by their names in the new model.

        Of an encoder with another task's head the encoder alone is copied; of an ELECTRA that is pretrained
        it is the discriminator's, with the head that finds replaced words where the start has that.

        Args:
          model: the new one.

        Raises:
          UserError: no parameter has the part's prefix, or a pattern matches none; or a generator alone for an
            ELECTRA that is pretrained.
        """
        start = self.start
        if self.of_other_task(model):
            if isinstance(self.model, ElectraGenerator) and hasattr(model, "discriminator"):
                raise UserError(
                    f"`start` {start.folder} holds a generator, and a pretraining goes on from a "
                    "discriminator: name the folder of that"
                )
            prefix = _place_of_body(model)
            if type(self.model) is type(getattr(model, "discriminator", None)):
                return {f"discriminator/{name}": leaf for name, leaf in named_leaves(self.model).items()}
            return _taken(
                {prefix + name: leaf for name, leaf in named_leaves(_body(self.model)).items()}, model
            )
        if self.whole:
            return _taken(named_leaves(self.model), model)
        leaves = named_leaves(self.model)
        for pattern in start.leave_out:
            matching = [name for name in leaves if re.fullmatch(pattern, name)]
            if not matching:
                raise UserError(f"`start` {start}: leave_out={pattern} matches no parameter of {start.folder}")
            leaves = {name: leaf for name, leaf in leaves.items() if name not in matching}
        prefix, into = (f"{name}/" if name else "" for name in (start.part, start.into))
        found = {into + name.removeprefix(prefix): x for name, x in leaves.items() if name.startswith(prefix)}
        # With everything left out a start gives its sizes and vocabulary alone.
        if not found and leaves:
            firsts = sorted({name.split("/")[0] for name in leaves})
            raise UserError(
                f"`start` {start}: no parameter of {start.folder} begins with {prefix}; its parts are "
                f"{', '.join(firsts)}"
            )
        return found


def _taken(leaves: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The parameters but for those that a new model may lack and does."""
    own = named_leaves(model)
    return {name: leaf for name, leaf in leaves.items() if name in own or not _OPTIONAL.fullmatch(name)}


def _place_of_body(model: Any) -> str:
    """What the names of a model's encoder begin with."""
    if hasattr(model, "discriminator"):
        return "discriminator/encoder/"
    return "encoder/" if hasattr(model, "encoder") else ""


def _body(model: Any) -> Any:
    """The encoder of texts or images that a model has, or None if it has none."""
    model = getattr(model, "discriminator", model)
    encoder = getattr(model, "encoder", model)
    return encoder if isinstance(encoder, TextEncoder | ViT) else None


def started_config(folder: str, kind: str) -> tuple[str, Any]:
    """(name of the model, its config) of a folder that a run starts from; no weights are read.

    Args:
      folder: of a run, or a published folder.
      kind: of the new model, a key of `MODELS`; a folder of another kind may hold the same config.

    Raises:
      UserError: no such folder, or one whose model is none of the kind.
    """
    path = pathlib.Path(folder)
    if pretrained.is_published(path):
        from transformer_jax.pretrained.folder import read_model_config  # imports safetensors

        config = read_model_config(path)
    elif is_run(path):
        described = read_config(path)
        models = [entries[described["model"]] for entries in MODELS.values() if described["model"] in entries]
        config = None
        for entry in models:
            if set(described["model_config"]) <= field_names(entry.config):
                config = from_json(entry.config, described["model_config"], f"{path}, model_config")
                break
    else:
        raise UserError(f"{path / 'config.json'}: no such file; is {path} the folder of a run, or of weights?")
    # A model that was trained with further parts has its encoder's config in its own.
    config = (
        config
        if any(e.config is type(config) for e in MODELS[kind].values())
        else getattr(config, "encoder", config)
    )
    found = [name for name, entry in MODELS[kind].items() if entry.config is type(config)]
    if not found:
        raise UserError(
            f"`start` {folder} holds a model of {type(config).__name__}: this task takes "
            f"{', '.join(MODELS[kind])}"
        )
    return found[0], config


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


def open_starts(folder: RunFolder, config: RunConfig, tasks: Mapping[str, TaskEntry]) -> list[OpenedStart]:
    """Open the folders that a run starts from, unless a checkpoint of it already holds their parameters.

    Args:
      folder: of the run.
      config: of the run.
      tasks: by name, those whose runs `config.start` may name.

    Raises:
      UserError: a folder cannot be opened, or does not hold the parameters that the run was created from.
    """
    if folder.has_checkpoint():
        return []
    try:
        starts = [open_start(start, tasks, folder.path) for start in config.start]
    except UserError as error:
        if folder.stored is None:
            raise
        raise UserError(
            f"{folder.path} has no checkpoint yet, so its `start` must be opened again: {error}"
        ) from None
    digests = () if folder.stored is None else folder.stored.starts
    for opened, digest in zip(starts, digests, strict=False):  # runs of before kept none
        if opened.digest != digest:
            raise UserError(
                f"`start` {opened.start.folder} has changed since {folder.path} was created, which has no "
                "checkpoint yet: restore the folder, or name another `run_dir`"
            )
    return starts


def check_same_kind(opened: OpenedStart, model_config: Any) -> None:
    """Checks that a start that is copied completely is a model of the same kind as the new one.

    Raises:
      UserError: another model, or fields that change what its parameters mean.
    """
    start = opened.start
    if not opened.whole:
        return
    there = opened.model.config
    if type(there) is not type(model_config):
        # What was trained with further parts, or will be, has its encoder's config in its own.
        there, model_config = (getattr(config, "encoder", config) for config in (there, model_config))
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


def _check_positions(opened: OpenedStart, more: int) -> None:
    """That a start has a position for each of the new model's, which has `more` than it.

    Raises:
      UserError: it has fewer.
    """
    if more > 0:
        config = getattr(opened.model.config, "encoder", opened.model.config)
        raise UserError(
            f"`start` {opened.start.folder} has positions for {config.max_length} tokens: `max_length` "
            f"{config.max_length + more} is above them"
        )


def started(model: Any, starts: Sequence[OpenedStart], labels: Sequence[str] = ()) -> Any:
    """A fresh model with the parameters of its starts in their places.

    Args:
      model: the fresh one.
      starts: see `open_start`.
      labels: names of its classes in the order of their numbers; a head for others begins fresh.

    Raises:
      UserError: names that are missing, left over or of another shape, all in one line; or longer texts than a
        start has positions for.
    """
    own, given, problems = named_leaves(model), {}, []
    reads_texts = hasattr(getattr(model.config, "encoder", model.config), "max_length")
    for opened in starts:
        check_same_kind(opened, model.config)
        other_classes = opened.of_other_classes(model, labels)
        for name, leaf in opened.leaves(model).items():
            if other_classes and name.startswith("head/"):
                continue
            if name in own and own[name].shape != leaf.shape:
                if other_classes and not name.startswith("encoder/"):
                    continue  # the rest of a head, which begins fresh
                if reads_texts and name.endswith("positions/table/embedding"):
                    _check_positions(opened, own[name].shape[0] - leaf.shape[0])
                    leaf = leaf[: own[name].shape[0]]  # a model for shorter texts
            if name in given:
                problems.append(f"{name} comes from two starts")
            elif name not in own:
                problems.append(f"{name} is not in the new model")
            elif own[name].shape != leaf.shape:
                problems.append(f"{name} is {leaf.shape}, not {own[name].shape}")
            given[name] = leaf
    covered = {opened.start.into for opened in starts if not opened.start.leave_out}
    heads = any(opened.of_other_task(model) or opened.of_other_classes(model, labels) for opened in starts)
    for name in own.keys() - given.keys():
        # What belongs to a task begins fresh; a model without a head is its encoder.
        if _OPTIONAL.fullmatch(name) or (heads and not name.startswith(_place_of_body(model))):
            continue
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
