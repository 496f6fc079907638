"""An interactive page with the attention of one sentence in every layer and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transformer_jax.plotting.page import Page, check_size, pack


class AttentionPage(Page):
    """An interactive page of the attention weights of one sentence, which a notebook shows as a cell's result.

    Args:
      maps: (weights (L, H, T, S), T query tokens, S key tokens) by kind of attention; see
        `interpretability.sentence`.
      title: Title of the page.

    Raises:
      ValueError: There are no maps, or the weights do not fit their tokens.
      UserError: The page would be too large for a browser.
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
                    "weights": pack(weights),
                }
            )
        self._names = list(maps)
        lines = max(max(len(queries), len(keys)) for _, queries, keys in maps.values())
        super().__init__("attention_page.html", {"title": title, "kinds": kinds}, height=24 * lines + 240)

    def __repr__(self) -> str:
        return f"AttentionPage of {', '.join(self._names)}"
