"""An interactive page with the attention of each patch of an image in every layer and head."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from transformer_jax.plotting.page import Page, check_size, pack


class ImagePage(Page):
    """An interactive page of the attention over one image, which a notebook shows as a cell's result.

    Args:
      maps: `interpretability.images.AttentionMaps` of the image, or an object with the same fields.
      title: Title of the page.
      words: Words that attend to the image; () for the attention of its patches to each other.

    Raises:
      UserError: The page would be too large for a browser.
    """

    def __init__(self, maps: Any, *, title: str = "", words: Sequence[str] = ()):
        check_size(maps.weights.size, "a smaller image")
        file = io.BytesIO()
        Image.fromarray(maps.pixels).save(file, "PNG")
        data = {
            "title": title,
            "image": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
            "size": maps.pixels.shape[:2],
            "grid": maps.grid,
            "prefix": maps.prefix,
            "class_token": getattr(maps, "class_token", False),
            "shape": maps.weights.shape,
            "weights": pack(maps.weights),
            "words": list(words),
        }
        self._title = title
        super().__init__("image_page.html", data, height=640)

    @classmethod
    def of_caption(cls, alignment: Any, *, title: str = "") -> ImagePage:
        """Return the page of a caption, whose words are selected instead of patches.

        Args:
          alignment: `decoding.captions.CaptionAttention`.
          title: Title of the page.

        Raises:
          UserError: The page would be too large for a browser.
        """
        by_word = alignment.by_word()
        return cls(by_word, title=title, words=by_word.tokens)

    def __repr__(self) -> str:
        return f"ImagePage of {self._title or 'an image'}"
