"""Reading of JSON: typed, bounded, and with errors that name the file, the field and its value."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import Any, TypeVar

import msgspec

from transformer_jax.errors import UserError
from transformer_jax.limits import JSON_BYTES

T = TypeVar("T")

# The escape of one half of a character beyond 16 bits; both halves together are a character.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Characters of a value that an error message shows.
_SHOWN = 60


def read_bytes(path: pathlib.Path) -> bytes:
    """Read a regular file of at most `JSON_BYTES`.

    Raises:
      UserError: The file is missing, too large, or not a regular file, such as a device or a FIFO.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a regular file")
        JSON_BYTES.check(path.stat().st_size, f"{path}: the size in bytes")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a NUL character in the path
        raise UserError(f"{str(path)!r}: cannot be read ({error})") from None


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file that contains an object; see `read_json`."""
    return read_json(path, dict[str, Any])


def read_json(path: pathlib.Path, kind: type[T]) -> T:
    """Read a JSON file as a value of a type.

    Args:
      path: Path of the file.
      kind: A `msgspec.Struct` or any type that msgspec converts to.

    Raises:
      UserError: The file cannot be read, is not JSON, or a field has another type or range.
    """
    return parse_json(read_bytes(path), kind, str(path))


def parse_json(content: bytes | str, kind: type[T], source: str) -> T:
    """Parse JSON as a value of a type; see `read_json`.

    Args:
      content: The text.
      kind: Type of the value.
      source: Where the text was read, for error messages.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        # NaN and numbers beyond float64 are no JSON, and become text, which no numeric field accepts.
        value = json.loads(text, parse_constant=str, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{source}: not JSON (nested too deeply)") from None
    except UnicodeEncodeError:
        raise UserError(f"{source}: not JSON (half of a surrogate pair in a text)") from None
    except ValueError as error:
        raise UserError(f"{source}: not JSON ({error})") from None
    return convert(value, kind, source)


def _finite(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def convert(value: Any, kind: type[T], source: str) -> T:
    """Convert parsed JSON to a value of a type.

    Args:
      value: The parsed JSON.
      kind: Type of the result.
      source: Where the value was read, for error messages.

    Raises:
      UserError: A field has another type or range; the message names it and its value.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        field, field_value = _lookup(value, path.removesuffix("`"))
        where = f"{field} {shown(field_value)}: " if field else ""
        if reason.startswith("Invalid enum value"):
            reason = f"known are {', '.join(_choices(kind, path))}"
        raise UserError(f"{source}: {where}{_plain(reason)}") from None
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None


def _lookup(value: Any, path: str) -> tuple[str, Any]:
    """Return the name and the value of the field at a path such as ".a.b[0]"; unknown keys end the search."""
    name = ""
    for attribute, index in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", path):
        if attribute and isinstance(value, dict) and attribute in value:
            name, value = f"{name}.{attribute}" if name else attribute, value[attribute]
        elif index.isdecimal() and isinstance(value, list) and int(index) < len(value):
            name, value = f"{name}[{index}]", value[int(index)]
        else:
            break
    return name, value


def _choices(kind: Any, path: str) -> list[str]:
    """Return the values that the field at a path may have."""
    types = [msgspec.inspect.type_info(kind)]
    for attribute, _ in re.findall(r"\.([^.\[\]`]+)|(\[)", path):
        types = [
            field.type
            for parent in _alternatives(types)
            if isinstance(parent, msgspec.inspect.StructType)
            for field in parent.fields
            if field.encode_name == attribute
        ]
    literals = [t for t in _alternatives(types) if isinstance(t, msgspec.inspect.LiteralType)]
    return [str(value) for literal in literals for value in literal.values]


def _alternatives(types: list[Any]) -> list[Any]:
    return [t for union in types for t in (union.types if hasattr(union, "types") else [union])]


def _plain(reason: str) -> str:
    return reason.replace("`", "").replace("Expected", "expected").replace("Object", "the object")


def shown(value: Any) -> str:
    """Return a value as JSON for an error message, at most a few words long, without control characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
