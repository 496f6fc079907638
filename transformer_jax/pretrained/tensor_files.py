"""Reading and writing of tensors: one safetensors file, several with an index, or one .npz file."""

from __future__ import annotations

import json
import pathlib
import re
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from transformer_jax.data.corpora.unpacking import DAMAGED, check_zip, leads_out
from transformer_jax.errors import UserError
from transformer_jax.json_files import read_json, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The file of OpenCLIP's folders.
_OPEN_CLIP = "open_clip_model.safetensors"

# BERT's first checkpoints have TensorFlow's names for the scale and bias of a norm.
_OLD_NORM, _NORM = re.compile(r"(?<=LayerNorm\.)(gamma|beta)$"), {"gamma": "weight", "beta": "bias"}
_FLOATS = ("F32", "F16", "BF16", "F64")  # names of dtypes in safetensors
# The bits of the exponent in each dtype, and the number of elements to test at once.
_EXPONENTS = {"float32": np.uint32(0x7F80_0000), "float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
_BLOCK = 2**18


class _Index(msgspec.Struct):
    """Contents of `model.safetensors.index.json`: the file of each tensor."""

    weight_map: dict[str, str]


class TensorFiles:
    """Tensors of a folder by name, read on request.

    As in `transformers`, `model.safetensors` is read even if there is an index, with a warning.

    Args:
      folder: Folder with `model.safetensors`, or with `model.safetensors.index.json` and the files in it.
      allow_nonfinite: Accept tensors with NaN or infinite values.

    Raises:
      UserError: A file is missing or truncated, the index names a tensor that its file does not hold or a file
        outside the folder, or a tensor is stored twice.
    """

    def __init__(self, folder: pathlib.Path, *, allow_nonfinite: bool = False):
        self.folder, self._allow_nonfinite = folder, allow_nonfinite
        self._stored: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        if (folder / SINGLE).is_file():
            self._open(SINGLE)
            if (folder / INDEX).exists():
                warnings.warn(f"{folder}: {SINGLE} is read, and the files of {INDEX} are not", stacklevel=2)
        elif (folder / _OPEN_CLIP).is_file():
            self._open(_OPEN_CLIP)
        elif (folder / INDEX).is_file():
            self._open_all(read_json(folder / INDEX, _Index).weight_map)
        else:
            torch_files = sorted(p.name for p in folder.glob("*.bin"))
            hint = f" ({torch_files[0]} is not read: convert it to safetensors)" if torch_files else ""
            raise UserError(f"{folder}: neither {SINGLE} nor {INDEX} exists{hint}")

    def _open_all(self, file_of: dict[str, str]) -> None:
        files = sorted(set(file_of.values()))
        for file in files:
            check_inside(self.folder, file, str(self.folder / INDEX))
        missing = [file for file in files if not (self.folder / file).is_file()]
        if missing:
            raise UserError(
                f"{self.folder}: {len(missing)} of {len(files)} files of weights are missing: "
                f"{', '.join(missing[:4])}"
            )
        for file in files:
            self._open(file)
        for stored, file in sorted(file_of.items()):
            name = _current_name(stored)
            if self._file_of.get(name) != file or self._stored[name] != stored:
                raise UserError(f"{self.folder / INDEX} names tensors that no file holds: {stored} in {file}")

    def _open(self, file: str) -> None:
        path = self.folder / file
        try:
            opened = safetensors.safe_open(str(path), framework="np")
        except (safetensors.SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{path}: cannot be read ({reason}); the file is truncated or damaged") from None
        self._files[file] = opened
        for stored in opened.keys():  # noqa: SIM118  not a dictionary
            name = _current_name(stored)
            if name in self._file_of:
                first = self.folder / self._file_of[name]
                raise UserError(
                    f"{path}: {stored} is stored twice, also as {self._stored[name]} in {first}; remove one"
                )
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
          UserError: Its dtype is no float, or it has NaN or infinite values.
        """
        dtype = self._slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise UserError(
                f"{self.folder}: {name} is {dtype}; supported are {', '.join(_FLOATS)}: convert them first"
            )
        tensor = self._files[self._file_of[name]].get_tensor(self._stored[name])
        if not self._allow_nonfinite:
            check_finite(tensor, f"{self.folder}: {name}")
        return tensor

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored[name])


def _current_name(stored: str) -> str:
    return _OLD_NORM.sub(lambda match: _NORM[match[1]], stored)


def check_inside(folder: pathlib.Path, name: str, source: str) -> None:
    """Check that a file that a folder's index or config names is in the folder.

    Args:
      folder: The folder.
      name: Path relative to the folder.
      source: File that contains the name, for the error message.

    Raises:
      UserError: The path is absolute, leads out of the folder, or is not a file name.
    """
    if leads_out(name):
        raise UserError(f"{source}: the path {shown(name)} leads out of {folder}")


def check_finite(array: np.ndarray, what: str) -> None:
    """Check that a float array has no NaN or infinite values.

    Raises:
      UserError: It has some.
    """
    if array.dtype == np.float32:
        # One fast pass: the sum of squares is finite only if every value is. Large values may exceed it.
        values = np.ascontiguousarray(array).reshape(-1)
        if np.isfinite(np.dot(values, values)):
            return
    # A float is finite unless all bits of its exponent are set, which integers test faster than isfinite.
    mask = _EXPONENTS.get(array.dtype.name)
    if mask is None:
        finite = bool(np.isfinite(array).all())
    else:
        integers = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
        blocks = range(0, integers.size, _BLOCK)
        finite = not any(((integers[n : n + _BLOCK] & mask) == mask).any() for n in blocks)
    if not finite:
        raise UserError(f"{what} has NaN or infinite values; `allow_nonfinite` loads it all the same")


class ArrayFile:
    """Arrays of one .npz file, with the methods of `TensorFiles`.

    Args:
      path: Path of the file.
      allow_nonfinite: Accept arrays with NaN or infinite values.

    Raises:
      UserError: The file is missing or damaged, or unpacks to more than the limits.
    """

    def __init__(self, path: pathlib.Path, *, allow_nonfinite: bool = False):
        self.folder, self._allow_nonfinite = path, allow_nonfinite
        check_zip(path)
        try:
            self._stream = open(path, "rb")  # noqa: SIM115  open as long as this object
            weakref.finalize(self, self._stream.close)
            self._file = np.load(self._stream)
            self._shapes = {name: self._file[name].shape for name in self._file.files}
        except DAMAGED as error:
            raise UserError(f"{path}: cannot be read ({error}); the file is truncated or damaged") from None

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        """Return an array in the dtype of the file.

        Raises:
          UserError: It has NaN or infinite values.
        """
        array = self._file[name]
        if not self._allow_nonfinite:
            check_finite(array, f"{self.folder}: {name}")
        return array


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
        # Unlike `ascontiguousarray`, `asarray` keeps an array without axes.
        arrays = {name: np.asarray(tensors[name][1](), order="C") for name in group}
        # transformers requires this metadata.
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(group, file)
        yield file
    if count > 1:
        total = sum(nbytes for nbytes, _ in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        yield INDEX
