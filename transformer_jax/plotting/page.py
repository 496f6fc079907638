"""Interactive pages: one HTML file each that loads nothing, also shown by a notebook as a cell's result."""

from __future__ import annotations

import base64
import html
import json
import os
import pathlib
from importlib import resources
from typing import Any

import numpy as np

from transformer_jax.errors import UserError

_MOST = 65_535  # 1.0 as a 16-bit integer
_LARGEST = 20_000_000  # weights: 53 MB of text, which browsers still open


def check_writable(path: str | pathlib.Path) -> None:
    """Checks that a page can be written to a path, before it is made.

    Raises:
      UserError: no folder to write into, or a folder in its place.
    """
    path = str(path)
    if not path or pathlib.Path(path).is_dir() or not os.access(pathlib.Path(path).parent, os.W_OK):
        raise UserError(f"`html` {path!r}: no file can be written there; name one in a folder that exists")


def check_size(weights: int, what: str) -> None:
    """Checks that a browser would open a page of so many weights.

    Raises:
      UserError: it would not; `what` says which smaller thing to give.
    """
    if weights > _LARGEST:
        raise UserError(
            f"{weights:,} attention weights are too many for a page, which holds {_LARGEST:,}: give {what}"
        )


def packed(weights: np.ndarray) -> str:
    """Weights between 0 and 1 as 16-bit integers, 65,535 being 1, in base 64."""
    shares = np.clip(np.asarray(weights, np.float32), 0.0, 1.0)
    return base64.b64encode(np.round(shares * _MOST).astype("<u2").tobytes()).decode()


class Page:
    """A page of a template in this package and the data that its script shows.

    Args:
      template: name of the HTML file.
      data: as JSON can hold it.
      height: in a notebook, in pixels.
    """

    def __init__(self, template: str, data: dict[str, Any], *, height: int):
        self._template, self._data, self._height = template, data, height

    @property
    def html(self) -> str:
        """The page."""
        page = (resources.files(__package__) / self._template).read_text(encoding="utf-8")
        # "</script>" in a text would end the script that holds it.
        data = json.dumps(self._data, ensure_ascii=False).replace("<", "\\u003c")
        return page.replace("/*DATA*/null", data)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the page.

        Raises:
          UserError: it cannot be written.
        """
        try:
            pathlib.Path(path).write_text(self.html, encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise UserError(f"{path}: the page cannot be written ({error})") from None

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}" title="attention"></iframe>'
