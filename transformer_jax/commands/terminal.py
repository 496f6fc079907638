"""Text of unknown origin on a terminal: control characters are shown as escapes instead of being obeyed."""

from __future__ import annotations

import re
from typing import Any, TextIO

# All control characters except tab and line feed; ESC begins the commands of a terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_BREAKS = re.compile(r"[\n\u2028\u2029]")


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def escaped(text: str) -> str:
    r"""Return a text with control characters and lone surrogates as escapes of JSON, such as \u001b."""
    return _CONTROL.sub(_escape, text)


def one_line(text: str) -> str:
    r"""Return `escaped` of a text with line breaks as escapes too, for a message of one line."""
    return _BREAKS.sub(_escape, escaped(text))


class EscapingStream:
    """A text stream that writes `escaped` texts; everything else is that of the stream.

    Args:
      stream: The stream.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text and return its length."""
        self._stream.write(escaped(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
