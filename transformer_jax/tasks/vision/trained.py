"""Use of trained vision models: feature vectors, classes and attention maps."""

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
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.tasks.encoders.trained_heads import Classified, classified
from transformer_jax.tasks.vision.data import ProcessedImages, check_patches
from transformer_jax.training.task import Trained


def check_image_list(images: Any) -> None:
    """Check that `images` is a list of images.

    Raises:
      UserError: It is empty or a single image.
    """
    # An image has shape (height, width) or (height, width, channels); (N, height, width) is a list of grey
    # images. `shape` covers arrays of any library.
    shape = tuple(getattr(images, "shape", (0,) * 4))
    is_array = len(shape) in (0, 2) or (len(shape) == 3 and shape[2] in (1, 3, 4))
    if is_array or isinstance(images, str | os.PathLike) or hasattr(images, "getbands"):
        raise UserError("give a list of images, not one image")
    if not len(images):
        raise UserError("give one or more images")


@dataclasses.dataclass(frozen=True)
class TrainedImageEncoder(Trained):
    """A vision model from a run or a published folder, with or without a head."""

    @functools.cached_property
    def _runners(self) -> dict[str, tuple[ImageRunner, Any]]:
        return {}

    @property
    def image_processor(self) -> Any:
        """The image processor, also of a processor of images and texts."""
        return getattr(self.processor, "images", self.processor)

    @property
    def encoder(self) -> Any:
        """The ViT without a head."""
        return getattr(self.model, "encoder", self.model)

    def at_size(self, size: int) -> Self:
        """Return a copy that reads images of another size, interpolating learned positions.

        Args:
          size: Height and width in pixels.

        Raises:
          UserError: `size` is below 1 or not a multiple of the patch size.
        """
        if size < 1:
            raise UserError(f"`size` {size} is below 1")
        check_patches(size, self.encoder.config)
        return dataclasses.replace(self, processor=self.processor.at_size(size))

    def normalize(self, pixels: np.ndarray) -> jax.Array:
        """Normalise pixels (N, size, size, 3) uint8 from the processor to the model's input."""
        return normalize_images(pixels, self.image_processor.mean, self.image_processor.std)

    def run(
        self, name: str, function: Callable[[Any, jax.Array], jax.Array], images: Sequence[Any]
    ) -> np.ndarray:
        """Apply a function of the model and normalized images, compiling it once per shape.

        Args:
          name: Name of the function, the key of its compiled programs.
          function: `(model, images (B, height, width, 3)) -> (B, ...)`.
          images: List of paths, Pillow images or uint8 arrays; batches of it are loaded one at a time.

        Returns:
          The function's result for each image, (N, ...).

        Raises:
          UserError: `images` is empty or a single image, or an image cannot be read.
        """
        check_image_list(images)
        if name not in self._runners:
            mean, std = self.image_processor.mean, self.image_processor.std
            runner = ImageRunner(lambda model, pixels: function(model, normalize_images(pixels, mean, std)))
            self._runners[name] = runner, runner.prepare(self.model)
        runner, model = self._runners[name]
        return runner(model, ProcessedImages(images, self.image_processor))

    def embed_images(self, images: Any) -> np.ndarray:
        """Compute the feature vector of each image, the input of a classifier, (N, D) float32.

        Args:
          images: List of paths, Pillow images or uint8 arrays.

        Raises:
          UserError: See `run`.
        """

        def vectors(model: Any, images: jax.Array) -> jax.Array:
            encoder = getattr(model, "encoder", model)
            return encoder.pooled(encoder.hidden_states(images)).astype("float32")

        return self.run("embed", vectors, images)

    def attention_maps(self, image: Any, **options: Any) -> Any:
        """Return maps of the attention from the class token to the patches of an image, for each head.

        Args:
          image: Path, Pillow image or uint8 array.
          **options: See `interpretability.images.attention_maps`.
        """
        from transformer_jax.interpretability.images import attention_maps

        return attention_maps(self, image, **options)


@dataclasses.dataclass(frozen=True)
class TrainedImageClassifier(TrainedImageEncoder):
    """An image classifier from a run or a published folder."""

    def classify(self, images: Sequence[Any]) -> list[Classified]:
        """Classify images; each result has the label and the probability of each class.

        Args:
          images: List of paths, Pillow images or uint8 arrays.

        Raises:
          UserError: See `run`.
        """
        logits = self.run("classify", lambda model, images: model(images), images)
        labels = self.processor.labels or tuple(str(n) for n in range(logits.shape[-1]))
        return [classified(row, labels, "label") for row in logits]
