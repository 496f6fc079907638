"""A page that shows every layer and head of one sentence on hover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transformer_jax.plotting.page import Page, check_size, packed


class AttentionPage(Page):
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
        check_size(sum(weights.size for weights, _, _ in maps.values()), "a shorter text")
        kinds = []
        for name, (weights, queries, keys) in maps.items():
            if weights.ndim != 4 or weights.shape[2:] != (len(queries), len(keys)):
                raise ValueError(f"{name}: weights {weights.shape} are not (L, H, {len(queries)}, {len(keys)})")
            kinds.append(
                {
                    "name": name,
                    "shape": weights.shape,
                    "queries": list(queries),
                    "keys": list(keys),
                    "weights": packed(weights),
                }
            )
        self._names = list(maps)
        longest = max(max(len(queries), len(keys)) for _, queries, keys in maps.values())
        super().__init__("attention_page.html", {"title": title, "kinds": kinds}, height=24 * longest + 240)

    def __repr__(self) -> str:
        return f"AttentionPage of {', '.join(self._names)}"
