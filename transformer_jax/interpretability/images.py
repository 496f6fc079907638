"""Attention maps and feature components of a vision model for one image."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_jax.errors import UserError
from transformer_jax.interpretability.attention_flow import rollout


class AttentionMaps(NamedTuple):
    """The attention weights and states of one image.

    Attributes:
      pixels: (height, width, 3) uint8, the model's input.
      weights: (L, H, T, T) float32 of all tokens.
      prefix: Number of tokens before the patches: class token and registers.
      grid: Number of patches per column and per row.
      states: (T, D) float32 after the last block.
      class_token: Whether the first token is a class token.
    """

    pixels: np.ndarray
    weights: np.ndarray
    prefix: int
    grid: tuple[int, int]
    states: np.ndarray
    class_token: bool = True

    def heads(self, layer: int = -1) -> np.ndarray:
        """Return the attention (H, rows, columns) of the class token to the patches, per head.

        For a model without a class token, it is the mean over all patches.

        Args:
          layer: Number of the layer, from 0; negative numbers count from the last layer.

        Raises:
          UserError: The layer does not exist.
        """
        layers = len(self.weights)
        if not -layers <= layer < layers:
            raise UserError(f"layer {layer} of {layers}: layers are counted from 0")
        weights = self.weights[layer][:, :, self.prefix :]
        heads = weights[:, 0] if self.prefix and self.class_token else weights[:, self.prefix :].mean(axis=1)
        return heads.reshape(len(heads), *self.grid)

    def masks(self, share: float = 0.6, layer: int = -1) -> np.ndarray:
        """Return the smallest set of patches with a given share of each head's attention.

        Caron et al. 2021, figure 3, keep 60 %.

        Args:
          share: Share of the attention, above 0 and at most 1.
          layer: See `heads`.

        Returns:
          (H, rows, columns) bool.

        Raises:
          UserError: The share is outside its range.
        """
        if not 0 < share <= 1:
            raise UserError(f"`share` {share} must be above 0 and at most 1")
        heads = self.heads(layer)
        flat = heads.reshape(len(heads), -1)
        order = np.argsort(-flat, axis=1, kind="stable")
        ranked = np.take_along_axis(flat, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        kept = np.zeros(flat.shape, bool)
        # A patch belongs to the set if the stronger patches sum to less than the share.
        np.put_along_axis(kept, order, before < share * flat.sum(axis=1, keepdims=True), axis=1)
        return kept.reshape(heads.shape)

    def rollout(self) -> np.ndarray:
        """Return attention rollout (rows, columns) from the class token to the patches (Abnar & Zuidema 2020).

        For a model without a class token, it is the mean over all patches.
        """
        rolled = rollout(self.weights)[-1]
        row = rolled[0] if self.prefix and self.class_token else rolled[self.prefix :].mean(axis=0)
        return row[self.prefix :].reshape(self.grid)

    def components(self, count: int = 3) -> np.ndarray:
        """Return the first principal components of the patch states, scaled to [0, 1].

        Three components can be shown as colors (Oquab et al. 2024, figure 1).

        Args:
          count: Number of components.

        Returns:
          (rows, columns, count).
        """
        patches = self.states[self.prefix :].astype(np.float64)
        centered = patches - patches.mean(axis=0)
        _, _, directions = np.linalg.svd(centered, full_matrices=False)
        directions = directions[:count]
        # The sign of a direction is arbitrary; its largest weight is made positive.
        largest = np.abs(directions).argmax(axis=1)
        directions = directions * np.sign(directions[np.arange(len(directions)), largest])[:, None]
        projections = centered @ directions.T
        low, high = projections.min(axis=0), projections.max(axis=0)
        return ((projections - low) / np.maximum(high - low, 1e-12)).reshape(*self.grid, -1)


def attention_maps(trained: Any, image: Any) -> AttentionMaps:
    """Return the attention maps of a vision model for one image.

    Args:
      trained: Vision model that `transformer_jax.load` returned for a run or a published folder.
      image: Path, Pillow image or uint8 array.

    Raises:
      UserError: The image cannot be read.
    """
    encoder = trained.encoder
    pixels = trained.image_processor.pixels(image)
    states, weights = encoder.hidden_states(trained.normalize(pixels[None]), return_weights=True)
    grid = encoder.patches.grid(*pixels.shape[:2])
    config = encoder.config
    return AttentionMaps(
        pixels,
        np.asarray(weights[0], np.float32),
        config.prefix,
        grid,
        np.asarray(states[0].astype(jnp.float32)),
        config.has_class_token,
    )
