"""Token labels that can be read: any script, long tokens, spaces."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

# Comes with matplotlib: Latin, Cyrillic, Greek, Hebrew, Arabic.
_OWN = "DejaVu Sans"
_LONGEST = 18


def shown(token: str, longest: int = _LONGEST) -> str:
    """A token as its label: line ends and the spaces around it visible, the middle of a long one left out."""
    token = token.replace("\n", "↵").replace("\t", "⇥")
    bare = token.strip(" ")
    ahead = len(token) - len(token.lstrip(" "))
    token = "␣" * ahead + bare + "␣" * (len(token) - len(bare) - ahead)
    token = "".join(c if c.isprintable() else "�" for c in token)
    if len(token) <= longest:
        return token
    ahead = (longest - 1) // 2 + (longest - 1) % 2
    return f"{token[:ahead]}…{token[len(token) - (longest - 1 - ahead) :]}"


@functools.cache
def _characters(path: str, number: int) -> frozenset[int]:
    try:
        return frozenset(FT2Font(path, face_index=number).get_charmap())
    except (OSError, RuntimeError, TypeError):  # a font that cannot be read has none
        return frozenset()


def families(texts: Iterable[str]) -> list[str]:
    """The fonts that have the characters of some texts: matplotlib's own, then what is installed for the rest.

    A character that no font has is drawn as a box, and said once on the log.
    """
    found = [_OWN]
    own = font_manager.fontManager.findfont(_OWN)
    missing = {c for text in texts for c in text if ord(c) not in _characters(own, 0)} - {"\n"}
    for faces in (_listed, _new):
        for name, path, number in faces() if missing else ():
            covered = {c for c in missing if ord(c) in _characters(path, number)}
            if covered:
                found.append(name)
                missing -= covered
    if missing:
        _say_missing("".join(sorted(missing)))
    return found


def _listed() -> list[tuple[str, str, int]]:
    """(name, file, number in the file) of the upright fonts that matplotlib knows."""
    # Of a family's faces the regular one: it comes last.
    entries = sorted(font_manager.fontManager.ttflist, key=lambda e: (e.weight in (400, "normal"), e.fname))
    faces = {
        entry.name: (entry.fname, getattr(entry, "index", 0))
        for entry in entries
        # The last resort has a box for every character.
        if entry.style == "normal" and not entry.name.startswith("Last Resort")
    }
    return [(name, *face) for name, face in sorted(faces.items())]


@functools.cache
def _new() -> list[tuple[str, str, int]]:
    """Those installed after matplotlib listed the fonts, which it does once for all its life."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in set(font_manager.findSystemFonts()) - known:
        # A file that is no font, or no scalable one.
        with contextlib.suppress(OSError, RuntimeError):
            font_manager.fontManager.addfont(path)
    return [face for face in _listed() if face[1] not in known]


@functools.cache
def _say_missing(characters: str) -> None:
    logging.getLogger(__name__).warning(
        "no installed font has %r: install one that does (for Chinese, Japanese and Korean fonts-noto-cjk)",
        characters[:20],
    )


def text_style(texts: Sequence[str], size: float = 8) -> dict[str, Any]:
    """Arguments of matplotlib's text for these labels; a dollar sign is money, not the start of a formula."""
    return dict(fontsize=size, family=families(texts), parse_math=False)
