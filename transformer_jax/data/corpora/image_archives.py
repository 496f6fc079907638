"""Images in folders, archives and files of arrays, with the classes that their places say."""

from __future__ import annotations

import os
import pathlib
import posixpath
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.corpora.image_files import check_size, is_hidden, is_image_name
from transformer_jax.data.corpora.image_sets import ImageSet, Source
from transformer_jax.errors import UserError

# Names of folders that hold splits: two of them side by side are no classes.
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}
_BAD_ARRAYS = (
    OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error,
    TypeError, AttributeError,  # an array alone, of NumPy's other format
)  # fmt: skip
_NUMBERED = re.compile(r"\d+_(.+)")


class _Files:
    """Files of a folder."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> bytes:
        try:
            check_size(self._paths[number].stat().st_size, str(self._paths[number]))
            return self._paths[number].read_bytes()
        except OSError as error:
            raise UserError(f"{self._paths[number]}: cannot be read ({error.strerror})") from None


class _TarParts:
    """Members of a tar file that is not compressed, by their place in it."""

    def __init__(self, path: pathlib.Path, places: Sequence[tuple[int, int]]):
        self._path, self._places = path, list(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> bytes:
        begin, size = self._places[number]
        with self._path.open("rb") as file:  # a descriptor of its own: threads and processes read at once
            return os.pread(file.fileno(), size, begin)


class _ZipMembers:
    """Members of a zip file, which each process opens once: its list of names is read as a whole."""

    def __init__(self, path: pathlib.Path, names: Sequence[str]):
        self._path, self._names = path, list(names)
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> bytes:
        try:
            if self._opened is None or self._opened[0] != os.getpid():
                self._opened = os.getpid(), zipfile.ZipFile(self._path)
            return self._opened[1].read(self._names[number])
        except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
            raise UserError(f"{self._path}/{self._names[number]}: cannot be read ({error})") from None


def splits_of(path: str) -> tuple[str, ...]:
    """The splits that one .npz file holds, ("train", "test"); empty for everything else."""
    if not path.endswith(".npz") or not pathlib.Path(path).is_file():
        return ()
    try:
        with np.load(path) as file:
            return tuple(split for split in ("train", "test") if f"x_{split}" in file.files)
    except _BAD_ARRAYS as error:
        raise UserError(f"{path}: no .npz file that can be read ({error})") from None


class Known(NamedTuple):
    """What is known of a set before it is opened: the classes of training, and whether it must have some."""

    classes: Sequence[str]
    labelled: bool


def _check_splits(where: str, parents: Iterable[str]) -> None:
    """Raises an error where folders of two splits are side by side, at whatever depth."""
    there: dict[tuple[str, ...], set[str]] = {}
    for parent in set(parents):
        parts = pathlib.PurePosixPath(parent).parts
        for depth, part in enumerate(parts):
            there.setdefault(parts[:depth], set()).add(part.lower())
    for found in there.values():
        if len(found & _SPLITS) > 1:
            raise UserError(
                f"{where} holds {', '.join(sorted(found & _SPLITS))} side by side: name one as `data` and "
                "another as `test`"
            )


def _check_filled(where: str, folders: Iterable[str], root: str, classes: set[str]) -> None:
    """Raises an error where one of `folders` is in `root` beside the classes, which have images."""
    above = pathlib.PurePosixPath(root).parts
    for folder in sorted(folders):
        parts = pathlib.PurePosixPath(folder).parts
        if len(parts) > len(above) and parts[: len(above)] == above and parts[len(above)] not in classes:
            own = "/".join(parts[: len(above) + 1])
            raise UserError(f"{where}: the class folder {own!r} has no images: add some, or remove it")


def _labelled(
    where: str, names: Sequence[str], source: Source, folders: Iterable[str], known: Known
) -> ImageSet:
    """The set of files whose folders are their classes; `folders` are all that there are."""
    if not names:
        raise UserError(f"{where}: no images; their names end in .jpg, .png, .webp ...")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: the name {name!a} is not UTF-8: rename it") from None
    parents = [name.rpartition("/")[0] for name in names]
    folders = [one for one in folders if not any(map(is_hidden, one.split("/")))]
    _check_splits(where, parents)
    if len(set(parents)) == 1 and parents[0] not in ("", "."):
        above, _, last = parents[0].rpartition("/")
        _check_filled(where, folders, above, {last})
    # One folder may be one class of those that training has.
    if len(set(parents)) == 1 and parents[0].rpartition("/")[2] not in known.classes:
        found = [_NUMBERED.fullmatch(pathlib.PurePosixPath(name).stem) for name in names]
        # Where hardly two names agree they are no classes: 20260704_153012.jpg of a camera.
        alike = len({match[1] for match in found if match}) <= len(names) / 2
        if not known.labelled and not (all(found) and alike):
            return ImageSet(where, names, np.zeros(len(names)), [""], source)
        if not all(found):
            raise UserError(
                f"{where}: all images are in one folder; classes need a folder each, or names as 00001_cat.png"
            )
        own = [match[1] for match in found if match]
    elif len(set(parents)) == 1:
        own = [parents[0].rpartition("/")[2]] * len(names)
    else:
        # The first folders that differ are the classes; what lies deeper belongs to them.
        root = posixpath.commonpath(set(parents))
        depth = len(pathlib.PurePosixPath(root).parts)
        for name, parent in zip(names, parents, strict=True):
            if len(pathlib.PurePosixPath(parent).parts) == depth:
                raise UserError(f"{where}: {name} lies beside the class folders: put it into one, or remove it")
        own = [pathlib.PurePosixPath(parent).parts[depth] for parent in parents]
        _check_filled(where, folders, root, set(own))
    classes = sorted(set(own))
    numbers = {name: number for number, name in enumerate(classes)}
    return ImageSet(where, names, np.array([numbers[name] for name in own]), classes, source)


def of_folder(folder: pathlib.Path, known: Known) -> ImageSet:
    """The images below a folder, of a folder each class.

    Raises:
      UserError: see `open_images`.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if is_image_name(path.relative_to(folder).as_posix())]
    names = [path.relative_to(folder).as_posix() for path in files]
    folders = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
    return _labelled(str(folder), names, _Files(files), folders, known)


def _check_inside(where: str, names: Iterable[str]) -> None:
    for name in names:
        parts = pathlib.PurePosixPath(name.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name):
            raise UserError(f"{where}: the name {name!r} leads out of the archive: it is not read")


def of_tar(path: pathlib.Path, known: Known) -> ImageSet:
    """The images of a tar archive, compressed or not.

    Raises:
      UserError: see `open_images`.
    """
    names: list[str] = []
    contents: list[bytes] = []
    places: list[tuple[int, int]] = []
    folders: set[str] = set()
    stored: dict[str, tuple[tuple[int, int], bytes]] = {}  # (place, content) of the images so far
    try:
        # Compressed archives have no cheap random access: their files are kept in memory, still encoded.
        plain = tarfile.is_tarfile(path) and _is_plain_tar(path)
        with tarfile.open(path) as file:
            for member in file:
                _check_inside(str(path), [member.name])
                if member.isdir():
                    folders.add(member.name.rstrip("/"))
                if member.issym() and is_image_name(member.name):
                    raise UserError(
                        f"{path}: {member.name} is a link to {member.linkname}: make the archive with what is "
                        "there (tar --dereference)"
                    )
                if not (member.isfile() or member.islnk()) or not is_image_name(member.name):
                    continue
                if member.islnk():  # a second name of a file that came before
                    if member.linkname not in stored:
                        raise UserError(
                            f"{path}: {member.name} is a link to {member.linkname}, no image before it"
                        )
                    stored[member.name] = stored[member.linkname]
                else:
                    check_size(member.size, f"{path}/{member.name}")
                    opened = None if plain else file.extractfile(member)
                    content = b"" if opened is None else opened.read()
                    stored[member.name] = (member.offset_data, member.size), content
                names.append(member.name)
                places.append(stored[member.name][0])
                contents.append(stored[member.name][1])
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: no archive that can be read ({error})") from None
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  zlib, lzma and bz2 have errors of their own
        raise UserError(f"{path}: no archive that can be read ({type(error).__name__}: {error})") from None
    source: Source = _TarParts(path, places) if plain else contents
    return _labelled(str(path), names, source, folders, known)


def _is_plain_tar(path: pathlib.Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.TarError:
        return False


def of_zip(path: pathlib.Path, known: Known) -> ImageSet:
    """The images of a zip archive.

    Raises:
      UserError: see `open_images`.
    """
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: no archive that can be read ({error})") from None
    every = [member.filename for member in members]
    _check_inside(str(path), every)
    for member in members:
        if is_image_name(member.filename):
            check_size(member.file_size, f"{path}/{member.filename}")
    names = [name for name in every if is_image_name(name)]
    folders = [name.rstrip("/") for name in every if name.endswith("/")]
    return _labelled(str(path), names, _ZipMembers(path, names), folders, known)


def of_npz(path: pathlib.Path, split: str, known: Known) -> ImageSet:
    """The images of an .npz file, of a split where it has several.

    Raises:
      UserError: see `open_images`.
    """
    try:
        with np.load(path) as file:
            there = set(file.files)
            split = split or ("train" if "x_train" in there else "")
            first, second = (f"x_{split}", f"y_{split}") if split else ("images", "labels")
            if not {first, second} <= there:
                raise UserError(
                    f"{path}: has {', '.join(sorted(there))}; images are `images` and `labels`, or `x_train`, "
                    "`y_train`, `x_test`, `y_test`"
                )
            images, labels = file[first], file[second].reshape(-1)
            named = [str(name) for name in file["classes"]] if "classes" in there else None
    except _BAD_ARRAYS as error:
        raise UserError(f"{path}: no .npz file that can be read ({error})") from None
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            f"{path}: {first} is {images.dtype} {images.shape}; give uint8 (N, height, width, channels)"
        )
    if len(images) != len(labels) or not len(images):
        raise UserError(f"{path}: {len(images):,} images and {len(labels):,} labels")
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: {second} is {labels.dtype}; labels are numbers of classes")
    if named is None:
        numbers, labels = np.unique(labels, return_inverse=True)
        named = [str(number) for number in numbers]
        missing = np.setdiff1d(np.arange(len(numbers)), numbers)
        if numbers[0] < 0 or (known.labelled and not known.classes and len(missing)):
            raise UserError(
                f"{path}: labels from {numbers[0]} to {numbers[-1]}, of which there are {len(numbers)}: "
                "classes are counted from 0, and each has an image; or name them in an array `classes`"
            )
    return ImageSet(str(path), [f"{first}[{n}]" for n in range(len(images))], labels, named, images)
