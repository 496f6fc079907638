"""Masked autoencoding (He et al. 2022): a model predicts three quarters of the patches from the others."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.batches.image_batches import OneView
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.layers.patches import cut_into_patches
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision import pretraining as image_pretraining
from transformer_jax.tasks.vision.data import CIFAR, IMAGENET
from transformer_jax.tasks.vision.pretraining import ImagePretraining, ImagePretrainingConfig
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training.config import RunConfig
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization
from transformer_jax.training.task import TaskEntry

KIND = "masked_autoencoder"


@dataclasses.dataclass(frozen=True)
class MaskedAutoencodingConfig(ImagePretrainingConfig):
    """The masking and image crops; the defaults are the paper's.

    Raises:
      UserError: A value is out of range.
    """

    mask_rate: float = 0.75
    """Share of the patches that the encoder does not see and the decoder predicts."""
    crop: float = 0.2
    """Smallest share of an image's area that its random crop covers."""
    flip: bool = True
    """Mirror half of the images horizontally."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_rate < 1 or not 0 < self.crop <= 1:
            raise UserError(
                f"`mask_rate` {self.mask_rate} must be above 0 and below 1, and `crop` {self.crop} above 0 and "
                "at most 1"
            )


def digits(*, model: str = "vit", preset: str = "mini", steps: int = 1_000) -> RunConfig:
    """Train on scikit-learn's digits, a few minutes on a CPU."""
    task = MaskedAutoencodingConfig(batch_size=64, crop=0.6, flip=False)
    return _recipe("digits", task, model, preset, steps, "mini", decoder_width=64, decoder_layers=1)


def images(*, model: str = "vit", preset: str = "lite_6_4", steps: int = 5_000) -> RunConfig:
    """Train on small images such as CIFAR-10 on a CPU."""
    return _recipe(
        "images", MaskedAutoencodingConfig(batch_size=256, **CIFAR), model, preset, steps, "lite_6_4"
    )


def paper(*, model: str = "vit", preset: str = "b16", steps: int = 250_000) -> RunConfig:
    """Train the paper's ViT-B/16 on ImageNet for 800 epochs with batches of 4,096 images, on accelerators."""
    task = MaskedAutoencodingConfig(batch_size=4_096, **IMAGENET)
    decoder: dict[str, Any] = dict(decoder_width=512, decoder_layers=8, decoder_heads=16)
    return _recipe("paper", task, model, preset, steps, "b16", learning_rate=2.4e-3, **decoder)


def _recipe(
    recipe: str,
    task: Any,
    model: str,
    preset: str,
    steps: int,
    default_preset: str,
    *,
    learning_rate: float = 1e-3,
    **decoder: Any,
) -> RunConfig:
    # The paper uses sinusoidal positions. Features are the mean over patches, because the loss does not train
    # the last state of a class token.
    required = {"positions": "sinusoidal", "pooling": "mean"}
    optimization = cosine_optimization(steps, learning_rate=learning_rate)
    return image_data.new_run(
        task, KIND, model, preset, optimization, recipe, default_preset=default_preset, required=required,
        stochastic_depth=0.0, **decoder,
    )  # fmt: skip


class MaskedPixels(Objective):
    """Mean squared error of the pixels of the masked patches.

    Each target patch is normalized by its own mean and variance (section 4.1, "Reconstruction target").

    Args:
      config: Config of the task.
    """

    def __init__(self, config: MaskedAutoencodingConfig):
        self._config = config

    def loss(self, model, extra, batch, key):
        """Return the sum of the images' losses and the number of images."""
        config, weight = self._config, batch["weight"]
        images = normalize_images(batch["images"], config.mean, config.std)
        target = cut_into_patches(images, model.config.patch_size)
        target = target - target.mean(axis=-1, keepdims=True)
        target = target * jax.lax.rsqrt(jnp.square(target).mean(axis=-1, keepdims=True) + 1e-6)
        B, P, _ = target.shape
        mask_key, dropout_key = jax.random.split(key)
        order = jnp.argsort(jax.random.uniform(mask_key, (B, P)), axis=1)
        kept = order[:, : kept_patches(P, config.mask_rate)]
        predicted = model(images, kept, dropout_key=dropout_key)
        is_masked = jnp.ones((B, P)).at[jnp.arange(B)[:, None], kept].set(0.0)
        errors = jnp.square(predicted - target).mean(axis=-1)
        losses = (errors * is_masked).sum(axis=1) / is_masked.sum(axis=1)
        return {"loss": (losses * weight).sum()}, {"loss": weight.sum()}

    def kept(self, model, extra):
        """Return the encoder."""
        return model.encoder


def kept_patches(patches: int, mask_rate: float) -> int:
    """Return the number of patches that the encoder reads: at least one, and at least one less than all."""
    return min(patches - 1, max(1, round(patches * (1 - mask_rate))))


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    image_data.check(config, model_config)
    size = image_data.image_size(config)
    if size == model_config.patch_size:
        raise UserError(
            f"`patch_size` {size} makes one patch of an image, which leaves none to predict: lower it"
        )
    return MaskedPixels(config.task)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    size = image_data.image_size(config)
    return image_pretraining.abstract_images(config, images=(size, size, 3))


class MaskedAutoencodingTask(ImagePretraining):
    """The task with its images opened."""

    def views(self, config: RunConfig) -> OneView:
        """Return the function that crops and mirrors an image."""
        task: MaskedAutoencodingConfig = config.task
        return OneView(image_data.image_size(config), Augmentation(crop=task.crop, flip=task.flip))


ENTRY = TaskEntry(
    "masked_autoencoding",
    MaskedAutoencodingConfig,
    KIND,
    {"digits": digits, "images": images, "paper": paper},
    ImageProcessor,
    abstract_batch,
    objective,
    functools.partial(image_pretraining.prepare, MaskedAutoencodingTask),
    TrainedImageEncoder,
    check_mesh=check_mesh,
)
