"""Character offsets of the tokens of byte-level BPE."""

from __future__ import annotations

from collections.abc import Sequence


def alphabet() -> list[str]:
    """Return the printable character of each byte in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(alphabet())}


def byte_offsets(text: str, tokens: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return the start and end of the characters of each token, without surrounding spaces.

    Args:
      text: The text.
      tokens: Its tokens in the byte-level alphabet; spaces may be added before words or left out between them.

    Returns:
      (start, end) of each token: all characters of which it has at least one byte, or an empty range for white
      space. None if the tokens do not match the bytes of the text.
    """
    content = text.encode("utf-8")
    character_of = [number for number, character in enumerate(text) for _ in character.encode("utf-8")]
    offsets, start = [], 0
    for token in tokens:
        if not all(character in _BYTES for character in token):
            return None
        piece = bytes(_BYTES[character] for character in token).strip()
        while not content.startswith(piece, start) and content[start : start + 1].isspace():
            start += 1
        if not content.startswith(piece, start):
            return None
        end = start + len(piece)
        first = character_of[start] if start < len(content) else len(text)
        offsets.append((first, character_of[end - 1] + 1 if piece else first))
        start = end
    return offsets
