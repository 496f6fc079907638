"""What a vision model attends to in an image, and what its features group together."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interpretability.attention_flow import rollout


class AttentionMaps(NamedTuple):
    """The attention of one image.

    Attributes:
      pixels: (height, width, 3) uint8, as the model was given them.
      weights: (L, H, T, T) float32, of all tokens.
      prefix: number of tokens in front of the patches: class tokens and registers.
      grid: (rows, columns) of the patches.
      states: (T, D) float32, behind the last block.
      class_token: whether the first token is one that stands for the image.
    """

    pixels: np.ndarray
    weights: np.ndarray
    prefix: int
    grid: tuple[int, int]
    states: np.ndarray
    class_token: bool = True

    def heads(self, layer: int = -1) -> np.ndarray:
        """What the first token attends to, by head: (H, rows, columns); of a model without one, the mean over
        all patches.

        Args:
          layer: counted from 0; negative ones from the last.

        Raises:
          UserError: no such layer.
        """
        layers = len(self.weights)
        if not -layers <= layer < layers:
            raise UserError(f"layer {layer} of {layers}: layers are counted from 0")
        own = self.weights[layer][:, :, self.prefix :]
        rows = own[:, 0] if self.prefix and self.class_token else own[:, self.prefix :].mean(axis=1)
        return rows.reshape(len(rows), *self.grid)

    def masks(self, share: float = 0.6, layer: int = -1) -> np.ndarray:
        """The smallest sets of patches that hold a share of each head's attention, (H, rows, columns) bool
        (Caron et al. 2021, figure 3, which keeps 60 %).

        Args:
          share: between 0 and 1.
          layer: see `heads`.

        Raises:
          UserError: a share outside these.
        """
        if not 0 < share <= 1:
            raise UserError(f"`share` {share} must be above 0 and at most 1")
        heads = self.heads(layer)
        flat = heads.reshape(len(heads), -1)
        order = np.argsort(-flat, axis=1, kind="stable")
        ranked = np.take_along_axis(flat, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        kept = np.zeros(flat.shape, bool)
        # A patch belongs to the set if those before it hold less than the share.
        np.put_along_axis(kept, order, before < share * flat.sum(axis=1, keepdims=True), axis=1)
        return kept.reshape(heads.shape)

    def rollout(self) -> np.ndarray:
        """Attention followed through all layers from the first token to the patches, (rows, columns) (Abnar &
        Zuidema 2020); of a model without one, the mean over all patches."""
        rolled = rollout(self.weights)[-1]
        row = rolled[0] if self.prefix and self.class_token else rolled[self.prefix :].mean(axis=0)
        return row[self.prefix :].reshape(self.grid)

    def components(self, count: int = 3) -> np.ndarray:
        """The first principal components of the patches' states, (rows, columns, count), each between 0 and 1:
        three of them are colours (Oquab et al. 2024, figure 1)."""
        patches = self.states[self.prefix :].astype(np.float64)
        centred = patches - patches.mean(axis=0)
        _, _, directions = np.linalg.svd(centred, full_matrices=False)
        directions = directions[:count]
        # A direction's sign is arbitrary: its largest weight is positive.
        largest = np.abs(directions).argmax(axis=1)
        directions = directions * np.sign(directions[np.arange(len(directions)), largest])[:, None]
        found = centred @ directions.T
        low, high = found.min(axis=0), found.max(axis=0)
        return ((found - low) / np.maximum(high - low, 1e-12)).reshape(*self.grid, -1)


def attention_maps(trained: Any, image: Any) -> AttentionMaps:
    """The attention of a vision model over one image.

    Args:
      trained: what `transformer_jax.load` gives of a run or a published folder.
      image: a path, a Pillow image or a uint8 array.

    Raises:
      UserError: an image that cannot be read.
    """
    encoder = trained.encoder
    pixels = trained.processor.pixels(image)
    states, weights = encoder.hidden_states(trained.normalised(pixels[None]), return_weights=True)
    grid = encoder.patches.grid(*pixels.shape[:2])
    own = np.asarray(weights[0], np.float32), np.asarray(states[0].astype(jnp.float32))
    config = encoder.config
    return AttentionMaps(pixels, own[0], config.prefix, grid, own[1], config.has_class_token)
