"""One file a task: its data, its loss, its validation, what a trained one can do, its recipes."""

from __future__ import annotations

import pathlib
from typing import Any

from jax.sharding import Mesh

from transformer_jax import pretrained
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import MODELS
from transformer_jax.tasks.decoders import language_modeling
from transformer_jax.tasks.encoders import (
    masked_language_modeling,
    question_answering,
    replaced_token_detection,
    sentence_embedding,
    sequence_classification,
    token_classification,
)
from transformer_jax.tasks.encoders.trained_heads import TrainedElectra
from transformer_jax.tasks.translators import translation
from transformer_jax.tasks.vision import image_classification, masked_autoencoding, self_distillation
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training import driver
from transformer_jax.training.config import RunConfig, choose
from transformer_jax.training.run_folder import read_run
from transformer_jax.training.task import TaskEntry, entry_of, register
from transformer_jax.training.trained_model import read_trained

_TASK_FILES = (
    translation,
    language_modeling,
    masked_language_modeling,
    replaced_token_detection,
    sequence_classification,
    token_classification,
    question_answering,
    sentence_embedding,
    image_classification,
    self_distillation,
    masked_autoencoding,
)
TASKS: dict[str, TaskEntry] = {file.ENTRY.name: file.ENTRY for file in _TASK_FILES}
for _entry in TASKS.values():
    register(_entry)


def configure(task: str, recipe: str, **values: Any) -> RunConfig:
    """The config of a task's recipe with some values changed; see `TaskEntry.configure`.

    Raises:
      UserError: an unknown task, recipe or name, or a value that cannot be.
    """
    choose("task", task, tuple(TASKS))
    return TASKS[task].configure(recipe, **values)


def train(config: RunConfig, run_dir: str | pathlib.Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Trains, resumes or extends a run of any of `TASKS`; see `training.driver.train`."""
    return driver.train(entry_of(config), config, run_dir, tasks=TASKS, **options)


def load(
    folder: str | pathlib.Path,
    *,
    weights: str | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    compute: ComputeOptions = ComputeOptions(),
    tasks: dict[str, TaskEntry] | None = None,
) -> Any:
    """A trained model from a run folder or a published folder.

    Args:
      folder: of a run, or a Hugging Face folder.
      weights: of a run: "averaged", or the step of a checkpoint; None takes the averaged parameters if the run
        is finished, else the newest checkpoint.
      dtype: of the computation, "float32" or "bfloat16"; None is the run's own, float32 for published weights.
      mesh: over which the parameters are sharded; None is the default device.
      compute: how the model is computed.
      tasks: that a run may be of; None is `TASKS`.

    Returns:
      An object with `model`, `processor` (`tokenizer` for text), `config`, `weights` and methods for what its
      task is for: `translate` and `align`; `generate`; of a text encoder `embed`, and `fill`, `classify`,
      `tag` or `answer`; of a vision model `embed_images` and `classify`.

    Raises:
      UserError: neither a run nor a published folder, no such checkpoint, or a damaged one.
    """
    folder, tasks = pathlib.Path(folder), TASKS if tasks is None else tasks
    if pretrained.is_published(folder):
        if weights is not None:
            raise UserError(
                f"`weights` {weights}: {folder} is a published folder, which has one set of weights"
            )
        model, processor = pretrained.load(folder, dtype=dtype, mesh=mesh, compute=compute)
        kind = next(k for k, models in MODELS.items() if type(model) in {m.module for m in models.values()})
        if kind == "discriminator":
            return TrainedElectra(model, processor, None, "published")
        if kind == "image_encoder":
            return TrainedImageEncoder(model, processor, None, "published")
        entry = next(entry for entry in tasks.values() if entry.kind == kind)
        return entry.trained(model, processor, None, "published")
    stored = read_run(folder, tasks)
    entry = tasks[stored.task]
    model, found = read_trained(folder, entry, stored, weights=weights, dtype=dtype, compute=compute, mesh=mesh)
    return entry.trained(model, entry.processor.from_files(stored.files), stored.run, found)
