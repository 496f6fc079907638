"""The tensors of a folder: one safetensors file, or several behind an index."""

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

# Their names of dtypes, for messages and for what may be read at all.
# TensorFlow's names of a norm's scale and bias, which BERT's first checkpoints have.
_OLD_NORM, _NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$"), {"gamma": "weight", "beta": "bias"}
_FLOATS = ("F32", "F16", "BF16", "F64")


class TensorFiles:
    """Tensors by name, each read when it is asked for.

    Args:
      folder: with `model.safetensors`, or `model.safetensors.index.json` and the files that it names.

    Raises:
      UserError: no such file, a missing or truncated one, or an index that names what is not there.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._stored: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX)
            if not isinstance(index.get("weight_map"), dict):
                raise UserError(f"{folder / INDEX}: no weight_map in it")
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
            raise UserError(f"{path}: cannot be read ({reason}); the file is cut short or damaged") from None
        self._files[file] = opened
        for stored in opened.keys():  # noqa: SIM118  not a dictionary
            name = _OLD_NORM.sub(lambda found: _NORM[found[1]], stored)
            self._file_of[name], self._stored[name] = file, stored

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """A tensor, in the dtype of its file.

        Raises:
          UserError: not a float.
        """
        dtype = self._slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise UserError(
                f"{self.folder}: {name} is of {dtype}; read are {', '.join(_FLOATS)}: quantised weights must "
                "be converted first"
            )
        return self._files[self._file_of[name]].get_tensor(self._stored[name])

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored[name])


class ArrayFile:
    """The arrays of one .npz file, with the methods of `TensorFiles`.

    Args:
      path: of the file.

    Raises:
      UserError: no such file, or a damaged one.
    """

    def __init__(self, path: pathlib.Path):
        self.folder = path
        try:
            self._file = np.load(path)
            self._shapes = {name: self._file[name].shape for name in self._file.files}
        except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{path}: cannot be read ({error}); the file is cut short or damaged") from None

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        """An array, in the dtype of the file."""
        return self._file[name]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      UserError: no such file, or not a JSON object.
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
    """Writes tensors into one file, or several with an index, one file's tensors in memory at a time.

    Args:
      folder: an existing one.
      tensors: by name, (size in bytes, function that makes the array).
      largest_file: in bytes; a larger tensor gets a file of its own.

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
    width = len(groups)
    place: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = SINGLE if width == 1 else f"model-{number:05}-of-{width:05}.safetensors"
        arrays = {name: np.ascontiguousarray(tensors[name][1]()) for name in group}
        # transformers asks for this mark of a layout that torch reads.
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(group, file)
        yield file
    if width > 1:
        total = sum(nbytes for nbytes, _ in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        yield INDEX
