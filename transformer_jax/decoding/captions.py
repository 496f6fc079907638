"""Captions of images: batches of images, search, and the attention of each word."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.search import check_search, is_sharded, search_sequences
from transformer_jax.decoding.words import merge_words
from transformer_jax.distributed.mesh import ROWS, constrained
from transformer_jax.errors import UserError
from transformer_jax.layers.image_normalization import normalize_images

_ROWS = 64


@dataclasses.dataclass(frozen=True)
class CaptionAttention:
    """A caption with the weights with which each token attended to the image.

    Attributes:
      text: The caption.
      tokens: Its T tokens, including the end token.
      weights: (L, H, T, prefix + P) float32.
      pixels: (height, width, 3) uint8, the model's input.
      prefix: Number of tokens of the image before its patches, such as the class token.
      grid: (rows, columns) of the patches.
      ids: Ids of the tokens.
    """

    text: str
    tokens: list[str]
    weights: np.ndarray
    pixels: np.ndarray
    prefix: int
    grid: tuple[int, int]
    ids: tuple[int, ...] = ()

    def by_word(self) -> CaptionAttention:
        """Return a copy with one entry for each word, see `merge_words`."""
        words, weights = merge_words(self.tokens, self.weights)
        return dataclasses.replace(self, tokens=words, weights=weights, ids=())

    def maps(self, layer: int = -1) -> np.ndarray:
        """Return the attention (T, rows, columns) of each token to the patches, the mean over heads.

        Args:
          layer: Number of the layer, from 0; negative numbers count from the last layer.

        Raises:
          UserError: The layer does not exist.
        """
        layers = len(self.weights)
        if not -layers <= layer < layers:
            raise UserError(f"layer {layer} of {layers}: layers are counted from 0")
        maps = self.weights[layer].mean(axis=0)[:, self.prefix :]
        return maps.reshape(len(maps), *self.grid)


@functools.partial(
    jax.jit,
    static_argnames=("mean", "std", "begin", "end", "max_length", "beam_size", "alpha", "return_weights"),
)
def _search(model: Any, pixels: jax.Array, *, mean, std, max_length: int, **options: Any) -> Hypotheses:
    pixels = constrained(pixels, (ROWS, None, None, None))
    cache = model.start(normalize_images(pixels, mean, std), max_length=max_length)
    return search_sequences(model, cache, batch=len(pixels), max_length=max_length, **options)


class CaptionGenerator:
    """Generates captions with a trained captioner.

    Args:
      model: The captioner.
      processor: The processor that the model was trained with.
      beam_size: Number of beams; 1 is greedy search.
      alpha: Exponent of the length penalty, see `beam_search`.
      rows: Number of images in a batch; up to 8 images use a batch of 1 or 8.

    Raises:
      UserError: See `check_search`.
    """

    def __init__(
        self,
        model: Any,
        processor: ImageTextProcessor,
        *,
        beam_size: int = 3,
        alpha: float = 0.6,
        rows: int = _ROWS,
    ):
        check_search(beam_size, alpha)
        self.model, self.processor, self.rows = model, processor, rows
        self._prepared = model if is_sharded(model) else model.for_inference()
        self._options: dict[str, Any] = dict(
            mean=tuple(processor.images.mean), std=tuple(processor.images.std), begin=processor.start,
            end=processor.end, max_length=processor.max_length - 1, beam_size=beam_size, alpha=alpha,
        )  # fmt: skip

    def __call__(self, images: Sequence[np.ndarray] | Any) -> list[str]:
        """Return a caption for each image, (size, size, 3) uint8 from the processor."""
        count, captions = len(images), []
        rows = next((r for r in (1, 8) if count <= r), self.rows)
        pending: list[tuple[Hypotheses, int]] = []
        for first in range(0, count, rows):
            batch = [np.asarray(images[n]) for n in range(first, min(first + rows, count))]
            # Unused rows repeat an image, so that one shape is compiled.
            pixels = np.stack(batch + [batch[-1]] * (rows - len(batch)))
            pending.append((_search(self._prepared, pixels, **self._options), len(batch)))
        for hypotheses, size in pending:
            tokens, lengths = np.asarray(hypotheses.tokens[:size, 0]), np.asarray(hypotheses.lengths[:size, 0])
            texts = self.processor.tokenizer.decode(
                [ids[:length] for ids, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
            )
            captions += [" ".join(text.split()) for text in texts]
        return captions

    def align(self, image: np.ndarray) -> CaptionAttention:
        """Return the caption of an image with its attention; see `__call__`."""
        hypotheses = _search(self._prepared, image[None], **self._options, return_weights=True)
        assert hypotheses.weights is not None, "requested by return_weights"
        ids = np.asarray(hypotheses.tokens)[0, 0, : int(hypotheses.lengths[0, 0])].tolist()
        encoder = self.model.encoder
        return CaptionAttention(
            " ".join(self.processor.tokenizer.decode([ids])[0].split()),
            self.processor.tokenizer.tokens(ids),
            np.asarray(hypotheses.weights)[0, 0][:, :, : len(ids)],
            image,
            encoder.config.prefix,
            encoder.patches.grid(*image.shape[:2]),
            tuple(ids),
        )
