"""Start folders: initial parameters copied by name from another run or a published folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from transformer_jax import pretrained
from transformer_jax.distributed.processes import agreed
from transformer_jax.errors import UserError
from transformer_jax.models.encoders.electra import ElectraGenerator
from transformer_jax.models.encoders.encoder import TextEncoder
from transformer_jax.models.encoders.longformer import BUILT_FROM, LongformerConfig, leaves_of_encoder
from transformer_jax.models.encoders.roberta import RobertaConfig
from transformer_jax.models.registry import MODELS
from transformer_jax.models.vision.vit import ViT
from transformer_jax.parameter_names import map_names, named_leaves, with_leaves
from transformer_jax.training.config import RunConfig, Start, as_json, field_names, from_json
from transformer_jax.training.run_folder import RunFolder, is_run, read_config, read_run
from transformer_jax.training.task import TaskEntry
from transformer_jax.training.trained_model import read_trained

# Config fields that do not change the meaning of the parameters; sizes are compared by shape.
_FREE_FIELDS = {
    "dropout", "attention_dropout", "classifier_dropout", "classifier_pooling", "reader_dropout", "dtype",
    "max_length", "vocab_size", "vocab_multiple", "classes", "pooler", "generator_size", "stochastic_depth",
    "initial_values", "window", "global_tokens", "separator_id",
}  # fmt: skip
# Labels that `transformers` generates for classes without names.
_GENERATED_LABEL = r"LABEL_\d+"
# Parts that only some tasks add to an encoder.
_OPTIONAL = re.compile(r"(.*/)?(pooler|pooling|next_sentence|cross_attention(_norm)?)/.*")


@dataclasses.dataclass(frozen=True)
class OpenedStart:
    """A start with the contents of its folder.

    Attributes:
      start: See `Start`.
      model: The folder's model with its parameters.
      processor: The folder's processor.
      weights: The checkpoint that was read: "published", "averaged" or a step.
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
    def copies_all(self) -> bool:
        """True if the start copies the complete model: no `part`, `into` or `leave_out`."""
        return not (self.start.part or self.start.into or self.start.leave_out)

    def has_other_head(self, model: Any) -> bool:
        """Return whether the folder holds an encoder with the head of another task than the new model's."""
        return self.copies_all and type(self.model) is not type(model) and _encoder(self.model) is not None

    def has_other_classes(self, model: Any, labels: Sequence[str] = ()) -> bool:
        """Return whether the folder's head is the new model's for other classes, by number or by `labels`."""
        old_count, new_count = (getattr(config, "classes", 0) for config in (self.model.config, model.config))
        old_labels = tuple(getattr(self.processor, "labels", ()))
        if all(re.fullmatch(_GENERATED_LABEL, label) for label in old_labels):
            old_labels = ()
        renamed = bool(old_labels and labels and old_labels != tuple(labels))
        return self.copies_all and type(self.model) is type(model) and (old_count != new_count or renamed)

    def leaves(self, model: Any) -> dict[str, Any]:
        """Return the parameters to copy, by their names in the new model.

        From an encoder with another task's head only the encoder is copied, as from a vision model into the
        image encoder of a model. From a pretraining ELECTRA that is the discriminator, with the head that
        detects replaced words if the start has one.

        Args:
          model: The new model.

        Raises:
          UserError: No parameter has the part's prefix, a pattern matches none, or a pretraining ELECTRA would
            start from a generator alone.
        """
        start = self.start
        if self.has_other_head(model):
            if isinstance(self.model, ElectraGenerator) and hasattr(model, "discriminator"):
                raise UserError(
                    f"`start` {start.folder} holds a generator, but a pretraining starts from a discriminator: "
                    "name the folder of the discriminator"
                )
            if type(self.model) is type(getattr(model, "discriminator", None)):
                return {f"discriminator/{name}": leaf for name, leaf in named_leaves(self.model).items()}
            prefix = _encoder_prefix(model)
            encoder = {prefix + name: leaf for name, leaf in named_leaves(_encoder(self.model)).items()}
            return _without_missing_parts(encoder, model)
        vision, target = _encoder(self.model), getattr(model, start.into or "_", None)
        if isinstance(vision, ViT) and isinstance(target, ViT) and not (start.part or start.leave_out):
            leaves = {f"{start.into}/{name}": leaf for name, leaf in named_leaves(vision).items()}
            return _without_missing_parts(leaves, model)
        leaves = named_leaves(self.model)
        if self.copies_all:
            return _without_missing_parts(leaves, model)
        for pattern in start.leave_out:
            matches = [name for name in leaves if re.fullmatch(pattern, name)]
            if not matches:
                raise UserError(f"`start` {start}: leave_out={pattern} matches no parameter of {start.folder}")
            leaves = {name: leaf for name, leaf in leaves.items() if name not in matches}
        part, into = (f"{name}/" if name else "" for name in (start.part, start.into))
        selected = {into + name.removeprefix(part): x for name, x in leaves.items() if name.startswith(part)}
        # A start that leaves out everything still contributes its sizes and its vocabulary.
        if not selected and leaves:
            parts = sorted({name.split("/")[0] for name in leaves})
            raise UserError(
                f"`start` {start}: no parameter of {start.folder} has the prefix {part}; its parts are "
                f"{', '.join(parts)}"
            )
        return selected


def _without_missing_parts(leaves: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the parameters without the optional parts that the new model does not have."""
    names = named_leaves(model)
    return {name: leaf for name, leaf in leaves.items() if name in names or not _OPTIONAL.fullmatch(name)}


def _encoder_prefix(model: Any) -> str:
    """Return the prefix of the parameter names of a model's encoder."""
    if hasattr(model, "discriminator"):
        return "discriminator/encoder/"
    return "encoder/" if hasattr(model, "encoder") else ""


def _encoder(model: Any) -> Any:
    """Return the text or image encoder of a model, or None."""
    model = getattr(model, "discriminator", model)
    encoder = getattr(model, "encoder", getattr(model, "image_encoder", model))
    return encoder if isinstance(encoder, TextEncoder | ViT) else None


def started_config(folder: str, kind: str, argument: str = "start") -> tuple[str, Any]:
    """Return (model name, model config) of a start folder without reading its weights.

    Args:
      folder: A run folder or a published folder.
      kind: Kind of the new model, a key of `MODELS`. A folder of another kind may hold the same config.
      argument: Name of the argument with the folder, for messages.

    Raises:
      UserError: The folder does not exist, or its model is not of this kind.
    """
    path = pathlib.Path(folder)
    if pretrained.is_published(path):
        from transformer_jax.pretrained.folder import read_model_config  # imports safetensors

        config = read_model_config(path)
    elif is_run(path):
        description = read_config(path)
        name, values = description["model"], description["model_config"]
        entries = [entries[name] for entries in MODELS.values() if name in entries]
        config = next(
            (
                from_json(entry.config, values, f"{path}, model_config")
                for entry in entries
                if set(values) <= field_names(entry.config)
            ),
            None,
        )
    else:
        raise UserError(f"{path / 'config.json'}: no such file; is {path} the folder of a run, or of weights?")
    known = {entry.config: name for name, entry in MODELS[kind].items()}
    # A model with a task head holds the config of its encoder.
    used = config if type(config) in known else getattr(config, "encoder", config)
    if type(used) not in known:
        name = type(config).__name__.removesuffix("Config")
        raise UserError(
            f"`{argument}` {folder} holds a {name}: this needs a model of {', '.join(MODELS[kind])}"
        )
    config = used
    return known[type(config)], config


def open_start(start: Start, tasks: Mapping[str, TaskEntry], run_dir: pathlib.Path) -> OpenedStart:
    """Read the folder of a start.

    Args:
      start: See `Start`.
      tasks: Task entries by name.
      run_dir: Folder of the run to start.

    Raises:
      UserError: The folder is the run itself, does not exist, or cannot be read.
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
        path = folder / "config.json"
        raise UserError(f"{path}: no such file; is {folder} the folder of a run, or of weights?")
    stored = read_run(folder, tasks)
    model, weights = read_trained(folder, tasks[stored.task], stored)
    return OpenedStart(start, model, tasks[stored.task].processor.from_files(stored.files), weights)


@agreed
def open_starts(folder: RunFolder, config: RunConfig, tasks: Mapping[str, TaskEntry]) -> list[OpenedStart]:
    """Open the start folders of a run, unless a checkpoint of the run already holds their parameters.

    Args:
      folder: The run's folder.
      config: The run's config.
      tasks: The tasks whose runs `config.start` may name, by name.

    Raises:
      UserError: A folder cannot be opened, or does not hold the parameters that the run was created from.
    """
    if folder.has_checkpoint():
        return []
    try:
        starts = [
            with_long_encoder(open_start(start, tasks, folder.path), config.model) for start in config.start
        ]
    except UserError as error:
        if folder.stored is None:
            raise
        raise UserError(
            f"{folder.path} has no checkpoint yet, so its `start` must be opened again: {error}"
        ) from None
    digests = () if folder.stored is None else folder.stored.starts
    for opened, digest in zip(starts, digests, strict=False):  # older runs stored no digests
        if opened.digest != digest:
            raise UserError(
                f"`start` {opened.start.folder} has changed since {folder.path} was created, which has no "
                "checkpoint yet: restore the folder, or name another `run_dir`"
            )
    return starts


def with_long_encoder(opened: OpenedStart, model_config: Any) -> OpenedStart:
    """Return a start whose BERT or RoBERTa is built into the Longformer of a new run.

    Args:
      opened: The start.
      model_config: The config of the new model; other models than a Longformer leave the start as it is.
    """
    model, old = opened.model, opened.model.config
    if not isinstance(model_config, LongformerConfig) or type(old) not in BUILT_FROM:
        return opened
    names = field_names(LongformerConfig) - field_names(RobertaConfig) | {"max_length"}
    changes = {name: getattr(model_config, name) for name in names}
    if not isinstance(old, RobertaConfig):
        # The positions of a BERT do not depend on it.
        changes["padding_id"] = getattr(opened.processor, "pad", model_config.padding_id)
    config = LongformerConfig.of_encoder(old, **changes)
    kind = next(kind for kind, entries in MODELS.items() for e in entries.values() if e.module is type(model))
    module = MODELS[kind]["longformer"].module
    shapes = jax.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))
    leaves = leaves_of_encoder(named_leaves(model), old, config, named_leaves(shapes).keys())
    # The head of a BERT may lack layers that Longformer's has, which then start anew.
    if named_leaves(shapes).keys() - leaves.keys():
        prefix = "encoder/"
        leaves = {name.removeprefix(prefix): x for name, x in leaves.items() if name.startswith(prefix)}
        module = MODELS["encoder"]["longformer"].module
        shapes = jax.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))
    return dataclasses.replace(opened, model=with_leaves(shapes, leaves))


def check_same_kind(opened: OpenedStart, model_config: Any) -> None:
    """Check that a start that is copied completely holds the same kind of model as the new one.

    Raises:
      UserError: The model is another one, or fields differ that change the meaning of its parameters.
    """
    if not opened.copies_all:
        return
    folder, start_config = opened.start.folder, opened.model.config
    if type(start_config) is not type(model_config):
        # A model with a task head holds the config of its encoder.
        start_config, model_config = (getattr(c, "encoder", c) for c in (start_config, model_config))
    if type(start_config) is not type(model_config):
        raise UserError(
            f"`start` {folder} holds a {type(opened.model).__name__}, not a model of "
            f"{type(model_config).__name__}"
        )
    old, new = as_json(start_config), as_json(model_config)
    differences = [
        f"{name} is {old[name]!r} there, not {value!r}"
        for name, value in new.items()
        if name not in _FREE_FIELDS and old[name] != value
    ]
    if differences:
        raise UserError(f"`start` {folder} holds another model: {'; '.join(differences[:4])}")


def _fit_positions(opened: OpenedStart, table: Any, length: int) -> Any:
    """Return the first `length` rows of a start's table of positions.

    Raises:
      UserError: The table has fewer rows.
    """
    missing = length - table.shape[0]
    if missing > 0:
        config = getattr(opened.model.config, "encoder", opened.model.config)
        raise UserError(
            f"`start` {opened.start.folder} has positions for {config.max_length} tokens: `max_length` "
            f"{config.max_length + missing} is above them"
        )
    return table[:length]


@agreed
def start_model(
    model: Any,
    starts: Sequence[OpenedStart],
    labels: Sequence[str] = (),
    *,
    note: Callable[[str], None] = lambda line: None,
) -> Any:
    """Return a new model with the parameters of its starts copied by name.

    A part that belongs to another task, or a head for other classes, keeps its initial values.

    Args:
      model: The freshly initialized model.
      starts: See `open_start`.
      labels: Names of the model's classes, in the order of their numbers.
      note: Receives a line that names the starts.

    Raises:
      UserError: Parameters are missing, left over or of another shape, all listed in one line; or the model
        reads longer texts than a start has positions for.
    """
    new, copied, problems = named_leaves(model), {}, []
    for opened in starts:
        target = getattr(getattr(model, opened.start.into or "_", model), "config", model.config)
        reads_texts = hasattr(getattr(target, "encoder", target), "max_length")
        check_same_kind(opened, model.config)
        other_classes = opened.has_other_classes(model, labels)
        for name, leaf in opened.leaves(model).items():
            if other_classes and name.startswith("head/"):
                continue
            if name in new and new[name].shape != leaf.shape:
                if other_classes and not name.startswith("encoder/"):
                    continue  # part of a head that keeps its initial values
                if reads_texts and name.endswith("positions/table/embedding"):
                    leaf = _fit_positions(opened, leaf, new[name].shape[0])
            if name in copied:
                problems.append(f"{name} comes from two starts")
            elif name not in new:
                problems.append(f"{name} is not in the new model")
            elif new[name].shape != leaf.shape:
                problems.append(f"{name} is {leaf.shape}, not {new[name].shape}")
            copied[name] = leaf
    other_classes = any(opened.has_other_classes(model, labels) for opened in starts)
    new_head = other_classes or any(opened.has_other_head(model) for opened in starts)
    covered = {opened.start.into for opened in starts if not opened.start.leave_out}
    for name in new.keys() - copied.keys():
        is_head = name.startswith("head/") or not name.startswith(_encoder_prefix(model))
        if _OPTIONAL.fullmatch(name) or (new_head and is_head):
            continue
        if any(not into or name.startswith(f"{into}/") for into in covered):
            problems.append(f"{name} is missing in the folders")
    folders = [opened.start.folder for opened in starts]
    if problems:
        raise UserError(f"`start` {', '.join(folders)} does not fit: {'; '.join(sorted(problems))}")
    sources = ", ".join(
        f"{opened.start.folder} ({'step ' * opened.weights.isdigit()}{opened.weights})" for opened in starts
    )
    note(f"starting from {sources}" + ("; with a new head for other classes" if other_classes else ""))

    def copy(name: str, leaf: Any) -> Any:
        if name not in copied:
            return leaf
        value = np.asarray(copied[name]).astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return map_names(copy, model)
