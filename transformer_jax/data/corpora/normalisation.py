"""How texts are compared and shown, independent of the corpus they come from."""

import re
import unicodedata

_SPACES = re.compile(r"[\s\u00a0\u2007\u2009\u202f]+")
# Marks that only steer the direction of the display; a translator cannot be asked to guess them.
_DIRECTION_MARKS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def normalise(text: str) -> str:
    """Text as equality sees it: compatibility forms, case and white space folded."""
    return _SPACES.sub(" ", unicodedata.normalize("NFKC", text)).strip().casefold()


def plain_spaces(text: str) -> str:
    """Text with every kind of white space as one space, and without direction marks."""
    return _SPACES.sub(" ", _DIRECTION_MARKS.sub("", text)).strip()
