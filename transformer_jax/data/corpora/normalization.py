"""Normalization of texts for comparison and display."""

import re
import unicodedata

_SPACES = re.compile(r"[\s\u00a0\u2007\u2009\u202f]+")
# Marks that only control the display direction, which a translator cannot predict.
_DIRECTION_MARKS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def normalize_text(text: str) -> str:
    """Fold compatibility forms, case and white space, for comparing texts."""
    return _SPACES.sub(" ", unicodedata.normalize("NFKC", text)).strip().casefold()


def plain_spaces(text: str) -> str:
    """Replace each run of white space by one space, and remove direction marks."""
    return _SPACES.sub(" ", _DIRECTION_MARKS.sub("", text)).strip()
