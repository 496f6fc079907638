"""Masked autoencoding (He et al. 2022): three quarters of an image's patches are predicted from the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.batches.image_batches import OneView
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.layers.patches import cut_into_patches
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision import pretraining as image_pretraining
from transformer_jax.tasks.vision.data import CIFAR, normalised_images
from transformer_jax.tasks.vision.pretraining import ImagePretraining, ImagePretrainingConfig, recipe_config
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training.config import RunConfig
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry

KIND = "masked_autoencoder"


@dataclasses.dataclass(frozen=True)
class MaskedAutoencodingConfig(ImagePretrainingConfig):
    """The objective; defaults are the paper's.

    Raises:
      UserError: a value out of range.
    """

    mask_rate: float = 0.75
    """Share of the patches that are hidden from the encoder and predicted."""
    crop: float = 0.2
    """Smallest share of the area of a random part that an image is cut to."""
    flip: bool = True
    """Left and right change places, every second time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_rate < 1 or not 0 < self.crop <= 1:
            raise UserError(
                f"`mask_rate` {self.mask_rate} must be above 0 and below 1, `crop` {self.crop} above 0 and at "
                "most 1"
            )


def digits(*, model: str = "vit", preset: str = "mini", steps: int = 1_000) -> RunConfig:
    """scikit-learn's digits: a few minutes on a CPU."""
    task = MaskedAutoencodingConfig(batch_size=64, crop=0.6, flip=False)
    return _recipe(task, model, preset, steps, "digits", decoder_width=64, decoder_layers=1)


def images(*, model: str = "vit", preset: str = "lite_6_4", steps: int = 5_000) -> RunConfig:
    """Small images such as CIFAR-10 on a CPU."""
    return _recipe(MaskedAutoencodingConfig(batch_size=256, **CIFAR), model, preset, steps, "images")


def paper(*, model: str = "vit", preset: str = "b16", steps: int = 250_000) -> RunConfig:
    """The paper's ViT-B/16 on ImageNet: 800 epochs of 4,096 images, for accelerators."""
    task = MaskedAutoencodingConfig(batch_size=4_096, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return _recipe(
        task, model, preset, steps, "paper", decoder_width=512, decoder_layers=8, decoder_heads=16,
        learning_rate=2.4e-3,
    )  # fmt: skip


def _recipe(
    task: Any, model: str, preset: str, steps: int, recipe: str, *, learning_rate: float = 1e-3, **decoder: Any
) -> RunConfig:
    # The paper's positions are fixed ones, and nothing is left out or dropped. No loss reaches the last state
    # of a class token: features are the mean over patches.
    changes = decoder | {"positions": "sinusoidal", "stochastic_depth": 0.0, "pooling": "mean"}
    return recipe_config(task, KIND, model, preset, steps, recipe, changes, learning_rate=learning_rate)


class MaskedPixels(Objective):
    """Mean squared error of the hidden patches' pixels, each patch normalised by its own mean and variance
    (section 4.1, "Reconstruction target").

    Args:
      config: of the task.
    """

    def __init__(self, config: MaskedAutoencodingConfig):
        self._config = config

    def loss(self, model, extra, batch, key):
        own, weight = self._config, batch["weight"]
        images = normalised_images(batch["images"], own.mean, own.std)
        target = cut_into_patches(images, model.config.patch_size)
        target = target - target.mean(axis=-1, keepdims=True)
        target = target * jax.lax.rsqrt(jnp.square(target).mean(axis=-1, keepdims=True) + 1e-6)
        B, P, _ = target.shape
        mask_key, dropout_key = jax.random.split(key)
        order = jnp.argsort(jax.random.uniform(mask_key, (B, P)), axis=1)
        kept = order[:, : kept_patches(P, own.mask_rate)]
        predicted = model(images, kept, dropout_key=dropout_key)
        hidden = jnp.ones((B, P)).at[jnp.arange(B)[:, None], kept].set(0.0)
        errors = jnp.square(predicted - target).mean(axis=-1)
        losses = (errors * hidden).sum(axis=1) / hidden.sum(axis=1)
        return {"loss": (losses * weight).sum()}, {"loss": weight.sum()}

    def kept(self, model, extra):
        return model.encoder


def kept_patches(patches: int, mask_rate: float) -> int:
    """Number of patches that the encoder reads, at least 1 and not all."""
    return min(patches - 1, max(1, round(patches * (1 - mask_rate))))


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    image_data.check(config, model_config)
    size = image_data.image_size(config)
    if size == model_config.patch_size:
        raise UserError(f"`patch_size` {size} makes one patch of an image: there is none to hide beside it")
    return MaskedPixels(config.task)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    size = image_data.image_size(config)
    return image_pretraining.abstract_images(config, images=(size, size, 3))


class MaskedAutoencodingTask(ImagePretraining):
    """The task with its images opened."""

    def views(self, config: RunConfig) -> OneView:
        task: MaskedAutoencodingConfig = config.task
        return OneView(image_data.image_size(config), Augmentation(crop=task.crop, flip=task.flip))


def prepare(config, objective, **options):
    """Opens the images and makes batches; see `TaskEntry.prepare`."""
    return image_pretraining.prepare(MaskedAutoencodingTask, config, objective, **options)


ENTRY = TaskEntry(
    "masked_autoencoding",
    MaskedAutoencodingConfig,
    KIND,
    {"digits": digits, "images": images, "paper": paper},
    ImageProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedImageEncoder,
    check_mesh=image_data.check_mesh,
)
