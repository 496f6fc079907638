"""Interactive pages in self-contained HTML files, which a notebook shows as a cell's result."""

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

_ONE = 65_535  # 1.0 as a 16-bit integer
_MAX_WEIGHTS = 20_000_000  # 53 MB of text, which browsers still open


def check_writable(path: str | pathlib.Path, name: str = "html") -> None:
    """Check that a page or a picture can be written to a path.

    Args:
      path: The path.
      name: Name of the argument with the path, for the message.

    Raises:
      UserError: The path is a folder, or its parent is not a writable folder.
    """
    path = str(path)
    if not path or pathlib.Path(path).is_dir() or not os.access(pathlib.Path(path).parent, os.W_OK):
        raise UserError(f"`{name}` {path!r}: no file can be written there; name one in a folder that exists")


def check_size(weights: int, remedy: str) -> None:
    """Check that a page with this many weights is small enough for a browser.

    Args:
      weights: Number of weights.
      remedy: The smaller input to ask for in the error, such as "a shorter text".

    Raises:
      UserError: There are too many weights.
    """
    if weights > _MAX_WEIGHTS:
        raise UserError(
            f"{weights:,} attention weights are too many for a page (limit {_MAX_WEIGHTS:,}): give {remedy}"
        )


def pack(weights: np.ndarray) -> str:
    """Encode weights between 0 and 1 as 16-bit integers, with 65,535 for 1, in base 64."""
    weights = np.clip(np.asarray(weights, np.float32), 0.0, 1.0)
    return base64.b64encode(np.round(weights * _ONE).astype("<u2").tobytes()).decode()


class Page:
    """A page from `page.html`, a template with the page's content, and the data for its script.

    Args:
      template: Name of an HTML file of this package that holds a style element, then the content.
      data: Data that JSON can represent.
      height: Height in a notebook, in pixels.
    """

    def __init__(self, template: str, data: dict[str, Any], *, height: int):
        self._template, self._data, self._height = template, data, height

    @property
    def html(self) -> str:
        """The text of the page."""
        page, content = (
            (resources.files(__package__) / name).read_text(encoding="utf-8")
            for name in ("page.html", self._template)
        )
        style, end, body = content.partition("</style>\n")
        page = page.replace("<!--STYLE-->\n", style + end).replace("<!--BODY-->\n", body)
        # "</script>" in a text would end the script element.
        data = json.dumps(self._data, ensure_ascii=False).replace("<", "\\u003c")
        return page.replace("/*DATA*/null", data)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the page to a file.

        Raises:
          UserError: The file cannot be written.
        """
        try:
            pathlib.Path(path).write_text(self.html, encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise UserError(f"{path}: the page cannot be written ({error})") from None

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self._height}px; border: 0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}" title="attention"></iframe>'
