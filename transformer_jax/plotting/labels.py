"""Readable token labels for any script, long tokens and spaces."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

# The font of matplotlib, with Latin, Cyrillic, Greek, Hebrew and Arabic characters.
_DEFAULT = "DejaVu Sans"


def token_label(token: str, max_length: int = 18) -> str:
    """Return the label of a token, with visible line ends, tabs and outer spaces.

    Args:
      token: Text of the token.
      max_length: Maximum number of characters; an ellipsis replaces the middle of longer tokens.
    """
    token = token.replace("\n", "↵").replace("\t", "⇥")
    bare = token.strip(" ")
    leading = len(token) - len(token.lstrip(" "))
    token = "␣" * leading + bare + "␣" * (len(token) - len(bare) - leading)
    token = "".join(c if c.isprintable() else "�" for c in token)
    if len(token) <= max_length:
        return token
    start = max_length // 2
    return f"{token[:start]}…{token[len(token) - (max_length - 1 - start) :]}"


@functools.cache
def _characters(path: str, number: int) -> frozenset[int]:
    try:
        return frozenset(FT2Font(path, face_index=number).get_charmap())
    except (OSError, RuntimeError, TypeError):  # The font cannot be read.
        return frozenset()


def font_families(texts: Iterable[str]) -> list[str]:
    """Return the font families that cover the texts: matplotlib's default, then installed fonts.

    A character without a font is drawn as a box, with one warning in the log.
    """
    names = [_DEFAULT]
    default_path = font_manager.fontManager.findfont(_DEFAULT)
    missing = {c for text in texts for c in text if ord(c) not in _characters(default_path, 0)} - {"\n"}
    for list_fonts in (_known_fonts, _new_fonts):
        for name, path, number in list_fonts() if missing else ():
            covered = {c for c in missing if ord(c) in _characters(path, number)}
            if covered:
                names.append(name)
                missing -= covered
    if missing:
        _warn_missing("".join(sorted(missing)))
    return names


def _known_fonts() -> list[tuple[str, str, int]]:
    """List (family, file, index in the file) of the upright fonts that matplotlib knows."""
    # The dictionary keeps the last face of a family, so the regular one is sorted to the end.
    entries = sorted(font_manager.fontManager.ttflist, key=lambda e: (e.weight in (400, "normal"), e.fname))
    faces = {
        entry.name: (entry.fname, getattr(entry, "index", 0))
        for entry in entries
        # Last Resort draws a box for every character.
        if entry.style == "normal" and not entry.name.startswith("Last Resort")
    }
    return [(name, *face) for name, face in sorted(faces.items())]


@functools.cache
def _new_fonts() -> list[tuple[str, str, int]]:
    """List fonts installed after matplotlib built its list, which it keeps in a cache file."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in set(font_manager.findSystemFonts()) - known:
        # Some files are not fonts or not scalable.
        with contextlib.suppress(OSError, RuntimeError):
            font_manager.fontManager.addfont(path)
    return [face for face in _known_fonts() if face[1] not in known]


@functools.cache
def _warn_missing(characters: str) -> None:
    logging.getLogger(__name__).warning(
        "no installed font has %r: install one that does (for Chinese, Japanese and Korean fonts-noto-cjk)",
        characters[:20],
    )


def text_style(texts: Sequence[str], size: float = 8) -> dict[str, Any]:
    """Return matplotlib's text arguments for these labels; dollar signs do not start formulas."""
    return dict(fontsize=size, family=font_families(texts), parse_math=False)
