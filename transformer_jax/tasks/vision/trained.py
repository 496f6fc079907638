"""What a trained vision model does: vectors, classes, and maps of what it attends to."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner
from transformer_jax.tasks.encoders.trained_heads import Classified, classified
from transformer_jax.tasks.vision.data import Prepared, check_patches, normalised_images
from transformer_jax.training.task import Trained


@dataclasses.dataclass(frozen=True)
class TrainedImageEncoder(Trained):
    """A vision model from a run or a published folder, whatever its head."""

    @functools.cached_property
    def _runners(self) -> dict[str, tuple[ImageRunner, Any]]:
        return {}

    @property
    def encoder(self) -> Any:
        """The ViT alone."""
        return getattr(self.model, "encoder", self.model)

    def at_size(self, size: int) -> Self:
        """The same, reading images in another size; learned positions are interpolated.

        Args:
          size: height and width in pixels.

        Raises:
          UserError: a size that patches do not divide.
        """
        if size < 1:
            raise UserError(f"`size` {size} is below 1")
        check_patches(size, self.encoder.config)
        return dataclasses.replace(self, processor=self.processor.in_size(size))

    def normalised(self, pixels: np.ndarray) -> jax.Array:
        """Pixels (N, size, size, 3) uint8, as the processor makes them, as the model reads them."""
        return normalised_images(pixels, self.processor.mean, self.processor.std)

    def run(
        self, name: str, function: Callable[[Any, jax.Array], jax.Array], images: Sequence[Any]
    ) -> np.ndarray:
        """What a function of the model and normalised images gives for each image; compiled once a shape.

        Args:
          name: of the function, under which its runner is kept.
          function: `(model, images (B, height, width, 3)) -> (B, ...)`.
          images: any number; each a path, a Pillow image or a uint8 array. They are read in parts.

        Raises:
          UserError: one image in place of a list, none, or one that cannot be read.
        """
        # (height, width) and (height, width, channels); of grey images (N, height, width) is a list.
        shape = tuple(getattr(images, "shape", (0,) * 4))  # of an array of NumPy, JAX or another library
        one = len(shape) in (0, 2) or (len(shape) == 3 and shape[2] in (1, 3, 4))
        if one or isinstance(images, str | os.PathLike) or hasattr(images, "getbands"):
            raise UserError("give a list of images, not one image")
        if not len(images):
            raise UserError("give one or more images")
        if name not in self._runners:
            mean, std = self.processor.mean, self.processor.std
            runner = ImageRunner(lambda model, own: function(model, normalised_images(own, mean, std)))
            self._runners[name] = runner, runner.prepared(self.model)
        runner, model = self._runners[name]
        return runner(model, Prepared(images, self.processor))

    def embed_images(self, images: Any) -> np.ndarray:
        """A vector of each image: what classes are read from, (N, D) float32.

        Args:
          images: each a path, a Pillow image or a uint8 array.

        Raises:
          UserError: see `run`.
        """

        def vectors(model: Any, images: jax.Array) -> jax.Array:
            encoder = getattr(model, "encoder", model)
            return encoder.pooled(encoder.hidden_states(images)).astype("float32")

        return self.run("embed", vectors, images)

    def attention_maps(self, image: Any, **how: Any) -> Any:
        """What the class token attends to in one image, by head; see
        `interpretability.images.attention_maps`."""
        from transformer_jax.interpretability.images import attention_maps

        return attention_maps(self, image, **how)


@dataclasses.dataclass(frozen=True)
class TrainedImageClassifier(TrainedImageEncoder):
    """A vision model that classifies."""

    def classify(self, images: Sequence[Any]) -> list[Classified]:
        """The class of each image, with the probability of each class.

        Args:
          images: each a path, a Pillow image or a uint8 array.

        Raises:
          UserError: see `run`.
        """
        logits = self.run("classify", lambda model, images: model(images), images)
        labels = self.processor.labels or tuple(str(n) for n in range(logits.shape[-1]))
        return [classified(own, labels, "label") for own in logits]
