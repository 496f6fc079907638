"""The tasks: one file each with its data, loss, validation, recipes and the use of its trained models."""

from __future__ import annotations

import pathlib
from typing import Any

from jax.sharding import Mesh

from transformer_jax import pretrained
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import MODELS
from transformer_jax.tasks.decisions import offline_decisions
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
from transformer_jax.tasks.graphs import graph_prediction
from transformer_jax.tasks.multimodal import captioning, contrastive
from transformer_jax.tasks.speech import speech_recognition
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
    contrastive,
    captioning,
    speech_recognition,
    offline_decisions,
    graph_prediction,
)
TASKS: dict[str, TaskEntry] = {file.ENTRY.name: file.ENTRY for file in _TASK_FILES}
for _entry in TASKS.values():
    register(_entry)


def configure(task: str, recipe: str, **values: Any) -> RunConfig:
    """Return the config of a task's recipe with some values changed; see `TaskEntry.configure`.

    Args:
      task: Name of the task.
      recipe: Name of the recipe.
      **values: Values to change, by name.

    Raises:
      UserError: A task, recipe or name is unknown, or a value is invalid.
    """
    choose("task", task, tuple(TASKS))
    return TASKS[task].configure(recipe, **values)


def train(config: RunConfig, run_dir: str | pathlib.Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Train, resume or extend a run of one of `TASKS`; see `training.driver.train`.

    Args:
      config: Config of the run.
      run_dir: Folder of the run.
      **options: See `training.driver.train`.
    """
    return driver.train(entry_of(config), config, run_dir, tasks=TASKS, **options)


def load(
    folder: str | pathlib.Path,
    *,
    weights: str | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    compute: ComputeOptions = ComputeOptions(),
    tasks: dict[str, TaskEntry] | None = None,
    allow_nonfinite: bool = False,
) -> Any:
    """Load a trained model from a run folder or a published folder.

    Args:
      folder: Folder of a run, or a Hugging Face folder.
      weights: "averaged", or the step of a run's checkpoint; None means the averaged parameters of a finished
        run, else the newest checkpoint.
      dtype: Dtype of the computation, "float32" or "bfloat16"; None means the run's, or float32 for published
        weights.
      mesh: Mesh to shard the parameters over; None means the default device.
      compute: Options for computing the model.
      tasks: Tasks that the run may belong to, by name; None means `TASKS`.
      allow_nonfinite: Load a published folder although some weights are NaN or infinite.

    Returns:
      An object with `model`, `processor` (also `tokenizer` for text), `config`, `weights`, and methods for its
      task: `translate` and `align` for a translator; `generate` for a language model; `embed`, and `fill`,
      `classify`, `tag` or `answer` for a text encoder; `embed_images` and `classify` for a vision model, with
      `embed_texts` and `similarity` for one of images and texts; `caption` and `align` for a captioner;
      `transcribe` and `align` for a speech recognizer; `act` and `play` for a policy; `predict` for a model of
      graphs.

    Raises:
      UserError: The folder is neither a run nor a published folder, or the checkpoint is missing or damaged.
    """
    folder, tasks = pathlib.Path(folder), TASKS if tasks is None else tasks
    if pretrained.is_published(folder):
        if weights is not None:
            raise UserError(
                f"`weights` {weights}: {folder} is a published folder with a single set of weights: leave "
                "`weights` out"
            )
        model, processor = pretrained.load(
            folder, dtype=dtype, mesh=mesh, compute=compute, allow_nonfinite=allow_nonfinite
        )
        kind = next(k for k, models in MODELS.items() if type(model) in {m.module for m in models.values()})
        if kind == "discriminator":
            return TrainedElectra(model, processor, None, "published")
        if kind == "image_encoder":
            return TrainedImageEncoder(model, processor, None, "published")
        entry = next(entry for entry in tasks.values() if entry.kind == kind)
        return entry.trained(model, processor, None, "published")
    stored = read_run(folder, tasks)
    entry = tasks[stored.task]
    model, weights = read_trained(
        folder, entry, stored, weights=weights, dtype=dtype, compute=compute, mesh=mesh
    )
    return entry.trained(model, entry.processor.from_files(stored.files), stored.run, weights)
