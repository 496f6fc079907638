"""Reading and writing of tensors: one safetensors file, several with an index, or one .npz file."""

from __future__ import annotations

import json
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from transformer_jax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# BERT's first checkpoints have TensorFlow's names for the scale and bias of a norm.
_OLD_NORM, _NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$"), {"gamma": "weight", "beta": "bias"}
_FLOATS = ("F32", "F16", "BF16", "F64")  # names of dtypes in safetensors


class TensorFiles:
    """Tensors of a folder by name, read on request.

    Args:
      folder: Folder with `model.safetensors`, or with `model.safetensors.index.json` and the files in it.

    Raises:
      UserError: A file is missing or truncated, or the index names missing tensors.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._stored: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX)
            if not isinstance(index.get("weight_map"), dict):
                raise UserError(f"{folder / INDEX}: the file has no weight_map")
            file_of: dict[str, str] = index["weight_map"]
            missing = sorted({file for file in file_of.values() if not (folder / file).is_file()})
            if missing:
                raise UserError(
                    f"{folder}: {len(missing)} of {len(set(file_of.values()))} files of weights are missing: "
                    f"{', '.join(missing[:4])}"
                )
            for file in sorted(set(file_of.values())):
                self._open(file)
            absent = sorted(file_of.keys() - set(self._stored.values()))
            if absent:
                raise UserError(f"{folder / INDEX} names tensors that no file holds: {', '.join(absent[:4])}")
        elif (folder / SINGLE).is_file():
            self._open(SINGLE)
        else:
            torch_files = sorted(p.name for p in folder.glob("*.bin"))
            hint = f" ({torch_files[0]} is not read: convert it to safetensors)" if torch_files else ""
            raise UserError(f"{folder}: neither {SINGLE} nor {INDEX} exists{hint}")

    def _open(self, file: str) -> None:
        path = self.folder / file
        try:
            opened = safetensors.safe_open(str(path), framework="np")
        except (safetensors.SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: cannot be read ({reason}); the file is truncated or damaged") from None
        self._files[file] = opened
        for stored in opened.keys():  # noqa: SIM118  not a dictionary
            name = _OLD_NORM.sub(lambda match: _NORM[match[1]], stored)
            self._file_of[name], self._stored[name] = file, stored

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in the dtype of its file.

        Raises:
          UserError: Its dtype is no float.
        """
        dtype = self._slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise UserError(
                f"{self.folder}: {name} is {dtype}; supported are {', '.join(_FLOATS)}: convert them first"
            )
        return self._files[self._file_of[name]].get_tensor(self._stored[name])

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored[name])


class ArrayFile:
    """Arrays of one .npz file, with the methods of `TensorFiles`.

    Args:
      path: Path of the file.

    Raises:
      UserError: The file is missing or damaged.
    """

    def __init__(self, path: pathlib.Path):
        self.folder = path
        try:
            self._file = np.load(path)
            self._shapes = {name: self._file[name].shape for name in self._file.files}
        except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{path}: cannot be read ({error}); the file is truncated or damaged") from None

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        """Return an array in the dtype of the file."""
        return self._file[name]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
      UserError: The file is missing, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def write_tensors(
    folder: pathlib.Path, tensors: Mapping[str, tuple[int, Any]], *, largest_file: int
) -> Iterator[str]:
    """Write tensors to one file, or to several with an index, with one file's tensors in memory at a time.

    Args:
      folder: An existing folder.
      tensors: (size in bytes, function that returns the array) by name.
      largest_file: Maximum size of a file in bytes; a larger tensor gets its own file.

    Yields:
      The name of each file once it is written.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, (nbytes, _) in tensors.items():
        if groups[-1] and size + nbytes > largest_file:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    count = len(groups)
    file_of: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        arrays = {name: np.ascontiguousarray(tensors[name][1]()) for name in group}
        # transformers requires this metadata.
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(group, file)
        yield file
    if count > 1:
        total = sum(nbytes for nbytes, _ in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        yield INDEX
