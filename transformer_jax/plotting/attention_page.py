"""A page that shows every layer and head of one sentence on hover: one HTML file that loads nothing."""

from __future__ import annotations

import base64
import html
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from importlib import resources

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


class AttentionPage:
    """Attention weights of one sentence as an interactive page; a notebook shows it as a cell's result.

    Args:
      maps: for each kind of attention its weights (L, H, T, S), T query tokens and S key tokens, as
        `interpretability.sentence` makes them.
      title: shown above.

    Raises:
      ValueError: nothing to show, or weights that do not fit their tokens.
      UserError: more weights than a browser would open.
    """

    def __init__(self, maps: Mapping[str, tuple[np.ndarray, Sequence[str], Sequence[str]]], *, title: str = ""):
        if not maps:
            raise ValueError("there is no attention to show")
        size = sum(weights.size for weights, _, _ in maps.values())
        if size > _LARGEST:
            raise UserError(
                f"{size:,} attention weights are too many for a page, which holds {_LARGEST:,}: "
                "give a shorter text"
            )
        kinds = []
        for name, (weights, queries, keys) in maps.items():
            if weights.ndim != 4 or weights.shape[2:] != (len(queries), len(keys)):
                raise ValueError(f"{name}: weights {weights.shape} are not (L, H, {len(queries)}, {len(keys)})")
            shares = np.clip(np.asarray(weights, np.float32), 0.0, 1.0)
            counts = np.round(shares * _MOST).astype("<u2")
            kinds.append(
                {
                    "name": name,
                    "shape": weights.shape,
                    "queries": list(queries),
                    "keys": list(keys),
                    "weights": base64.b64encode(counts.tobytes()).decode(),
                }
            )
        self._names = list(maps)
        self._data = {"title": title, "kinds": kinds}
        self._longest = max(max(len(kind["queries"]), len(kind["keys"])) for kind in kinds)

    @property
    def html(self) -> str:
        """The page."""
        page = (resources.files(__package__) / "attention_page.html").read_text(encoding="utf-8")
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

    def __repr__(self) -> str:
        return f"AttentionPage of {', '.join(self._names)}"

    def _repr_html_(self) -> str:
        height = 24 * self._longest + 240
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; height: {height}px; border: 0" '
            'title="attention"></iframe>'
        )
