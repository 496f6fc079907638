"""Datasets of images in folders, archives and .npz files, labeled by folder or by an array."""

from __future__ import annotations

import os
import pathlib
import posixpath
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.data.corpora.image_files import check_size, is_hidden, is_image_name, read_image
from transformer_jax.data.corpora.image_sets import ImageSet, Source
from transformer_jax.data.corpora.unpacking import DAMAGED, check_inflated, check_zip, leads_out
from transformer_jax.errors import UserError

# Names of folders of splits, which must not be mistaken for classes.
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}
_NUMBERED = re.compile(r"\d+_(.+)")


class _Files:
    """Sequence of the bytes of files, read on request."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> bytes:
        try:
            return read_image(self._paths[number])
        except OSError as error:
            raise UserError(f"{self._paths[number]}: cannot be read ({error.strerror})") from None


class _TarMembers:
    """Sequence of the bytes of members of an uncompressed tar file, read on request by offset and size."""

    def __init__(self, path: pathlib.Path, ranges: Sequence[tuple[int, int]]):
        self._path, self._ranges = path, list(ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, number: int) -> bytes:
        offset, size = self._ranges[number]
        with self._path.open("rb") as file:  # threads and processes read concurrently
            return os.pread(file.fileno(), size, offset)


class _ZipMembers:
    """Sequence of the bytes of members of a zip file, read on request.

    Each worker process opens the file once and keeps it open, because opening reads the whole index.
    """

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
        except DAMAGED as error:
            raise UserError(f"{self._path}/{self._names[number]}: cannot be read ({error})") from None


def splits_of(path: str) -> tuple[str, ...]:
    """Return the splits in an .npz file, such as ("train", "test"); () without splits and for other files."""
    if not path.endswith(".npz") or not pathlib.Path(path).is_file():
        return ()
    try:
        with open(path, "rb") as stream, np.load(stream) as file:
            return tuple(split for split in ("train", "test") if f"x_{split}" in file.files)
    except DAMAGED as error:
        raise UserError(f"{path}: not a readable .npz file ({error})") from None


class Expected(NamedTuple):
    """Requirements on a dataset that is opened.

    Attributes:
      classes: Classes of the training dataset, which another dataset must share; () accepts any classes.
      labeled: True if the dataset must have classes.
      has_classes: False for images without classes, whatever their folders are called.
      is_member: Function from a file name to whether the file belongs to the dataset.
      missing: Error message for a dataset without such files.
    """

    classes: Sequence[str]
    labeled: bool
    has_classes: bool = True
    is_member: Callable[[str], bool] = is_image_name
    missing: str = "no images; their names must end in .jpg, .png, .webp ..."


def _check_splits(root: str, parents: Iterable[str]) -> None:
    """Check that a dataset does not contain folders of two splits, such as train/ and test/, taken for classes.

    Args:
      root: The dataset's folder or archive.
      parents: Paths of the folders that contain images, relative to it.
    """
    subfolders: dict[tuple[str, ...], set[str]] = {}
    for parent in set(parents):
        parts = pathlib.PurePosixPath(parent).parts
        for depth, part in enumerate(parts):
            subfolders.setdefault(parts[:depth], set()).add(part.lower())
    for names in subfolders.values():
        if len(names & _SPLITS) > 1:
            raise UserError(
                f"{root} has folders of several splits ({', '.join(sorted(names & _SPLITS))}): name one as "
                "`data` and another as `test`"
            )


def _check_filled(root: str, folders: Iterable[str], parent: str, classes: set[str]) -> None:
    """Check that every subfolder of `parent` contains an image, so that no class is lost.

    Args:
      root: The dataset's folder or archive.
      folders: Paths of all folders in the dataset.
      parent: Path of the folder whose subfolders are the classes.
      classes: Names of the subfolders with images.
    """
    parent_parts = pathlib.PurePosixPath(parent).parts
    depth = len(parent_parts)
    for folder in sorted(folders):
        parts = pathlib.PurePosixPath(folder).parts
        if len(parts) > depth and parts[:depth] == parent_parts and parts[depth] not in classes:
            empty = "/".join(parts[: depth + 1])
            raise UserError(f"{root}: the class folder {empty!r} has no images: add some, or remove it")


def _label_by_folder(
    root: str, names: Sequence[str], source: Source, folders: Iterable[str], expected: Expected
) -> ImageSet:
    """Build a dataset that labels each image with the name of its folder.

    Args:
      root: The dataset's folder or archive, for error messages.
      names: Paths of the images in the dataset.
      source: Sequence of the images' bytes.
      folders: Paths of all folders in the dataset.
      expected: Requirements on the classes.
    """
    if not names:
        raise UserError(f"{root}: {expected.missing}")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{root}: the name {name!a} is not UTF-8: rename it") from None
    if not expected.has_classes:
        return ImageSet(root, names, np.zeros(len(names)), [""], source)
    parents = [name.rpartition("/")[0] for name in names]
    folders = [folder for folder in folders if not any(map(is_hidden, folder.split("/")))]
    _check_splits(root, parents)
    single_folder = len(set(parents)) == 1
    if single_folder and parents[0] not in ("", "."):
        parent, _, last = parents[0].rpartition("/")
        _check_filled(root, folders, parent, {last})
    # A single folder may be one of the training classes.
    if single_folder and parents[0].rpartition("/")[2] not in expected.classes:
        matches = [_NUMBERED.fullmatch(pathlib.PurePosixPath(name).stem) for name in names]
        # Names with few repetitions are not classes, such as a camera's 20260704_153012.jpg.
        repeat = len({match[1] for match in matches if match}) <= len(names) / 2
        if not expected.labeled and not (all(matches) and repeat):
            return ImageSet(root, names, np.zeros(len(names)), [""], source)
        if not all(matches):
            raise UserError(
                f"{root}: all images are in one folder; classes need a folder each, or names as 00001_cat.png"
            )
        labels = [match[1] for match in matches if match]
    elif single_folder:
        labels = [parents[0].rpartition("/")[2]] * len(names)
    else:
        # The folders at the first level that differs are the classes.
        common = posixpath.commonpath(set(parents))
        depth = len(pathlib.PurePosixPath(common).parts)
        for name, parent in zip(names, parents, strict=True):
            if len(pathlib.PurePosixPath(parent).parts) == depth:
                raise UserError(f"{root}: {name} is not in a class folder: move it into one, or remove it")
        labels = [pathlib.PurePosixPath(parent).parts[depth] for parent in parents]
        _check_filled(root, folders, common, set(labels))
    classes = sorted(set(labels))
    numbers = {name: number for number, name in enumerate(classes)}
    return ImageSet(root, names, np.array([numbers[label] for label in labels]), classes, source)


def read_folder(folder: pathlib.Path, expected: Expected) -> ImageSet:
    """Read the images below a folder, with a folder for each class.

    Raises:
      UserError: See `open_images`.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if expected.is_member(path.relative_to(folder).as_posix())]
    names = [path.relative_to(folder).as_posix() for path in files]
    folders = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
    return _label_by_folder(str(folder), names, _Files(files), folders, expected)


def _check_inside(archive: str, names: Iterable[str]) -> None:
    for name in names:
        if leads_out(name):
            raise UserError(f"{archive}: the name {name!r} leads out of the archive: it is not read")


def read_tar(path: pathlib.Path, expected: Expected) -> ImageSet:
    """Read the images of a tar archive, compressed or not.

    Raises:
      UserError: See `open_images`.
    """
    names: list[str] = []
    contents: list[bytes] = []
    ranges: list[tuple[int, int]] = []
    folders: set[str] = set()
    stored: dict[str, tuple[tuple[int, int], bytes]] = {}  # (range, content) of each image
    try:
        # Compressed archives have no random access, so their encoded files are kept in memory.
        plain = tarfile.is_tarfile(path) and _is_plain_tar(path)
        size = path.stat().st_size
        with tarfile.open(path) as file:
            for member in file:
                _check_inside(str(path), [member.name])
                if not plain:
                    check_inflated(member.offset_data + member.size, size, str(path))
                if member.isdir():
                    folders.add(member.name.rstrip("/"))
                if member.issym() and expected.is_member(member.name):
                    raise UserError(
                        f"{path}: {member.name} is a link to {member.linkname}: create the archive with "
                        "tar --dereference"
                    )
                if not (member.isfile() or member.islnk()) or not expected.is_member(member.name):
                    continue
                if member.islnk():  # a second name of a previous file
                    if member.linkname not in stored:
                        raise UserError(
                            f"{path}: {member.name} links to {member.linkname}, which is not a previous file"
                        )
                    stored[member.name] = stored[member.linkname]
                else:
                    check_size(member.size, f"{path}/{member.name}")
                    opened = None if plain else file.extractfile(member)
                    content = b"" if opened is None else opened.read()
                    stored[member.name] = (member.offset_data, member.size), content
                names.append(member.name)
                ranges.append(stored[member.name][0])
                contents.append(stored[member.name][1])
    except DAMAGED as error:
        # The other lines of tarfile's message list what each kind of compression lacks.
        reason = str(error).partition("\n")[0].rstrip(":")
        raise UserError(f"{path}: not a readable archive ({reason})") from None
    source: Source = _TarMembers(path, ranges) if plain else contents
    return _label_by_folder(str(path), names, source, folders, expected)


def _is_plain_tar(path: pathlib.Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.TarError:
        return False


def read_zip(path: pathlib.Path, expected: Expected) -> ImageSet:
    """Read the images of a zip archive.

    Raises:
      UserError: See `open_images`.
    """
    check_zip(path)
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
    except DAMAGED as error:
        raise UserError(f"{path}: not a readable archive ({error})") from None
    member_names = [member.filename for member in members]
    _check_inside(str(path), member_names)
    for member in members:
        if expected.is_member(member.filename):
            check_size(member.file_size, f"{path}/{member.filename}")
    names = [name for name in member_names if expected.is_member(name)]
    folders = [name.rstrip("/") for name in member_names if name.endswith("/")]
    return _label_by_folder(str(path), names, _ZipMembers(path, names), folders, expected)


def read_npz(path: pathlib.Path, split: str, expected: Expected) -> ImageSet:
    """Read the images of an .npz file.

    Args:
      path: File with `images` and `labels`, or `x_train`, `y_train`, `x_test` and `y_test`, and optionally
        `classes`, the names of the classes.
      split: Split to read, "train" or "test"; "" reads "train" if the file has splits.
      expected: Requirements on the classes.

    Raises:
      UserError: See `open_images`.
    """
    check_zip(path)
    try:
        with open(path, "rb") as stream, np.load(stream) as file:
            arrays = set(file.files)
            split = split or ("train" if "x_train" in arrays else "")
            first, second = (f"x_{split}", f"y_{split}") if split else ("images", "labels")
            if not {first, second} <= arrays:
                raise UserError(
                    f"{path}: has {', '.join(sorted(arrays))}; images must be `images` and `labels`, or "
                    "`x_train`, `y_train`, `x_test`, `y_test`"
                )
            images, labels = file[first], file[second].reshape(-1)
            classes = [str(name) for name in file["classes"].reshape(-1)] if "classes" in arrays else None
    except DAMAGED as error:
        raise UserError(f"{path}: not a readable .npz file ({error})") from None
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise UserError(
            f"{path}: {first} is {images.dtype} {images.shape}; it must be uint8 (N, height, width, channels)"
        )
    if len(images) != len(labels) or not len(images):
        raise UserError(f"{path}: {len(images):,} images and {len(labels):,} labels")
    if not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: {second} is {labels.dtype}; labels must be numbers of classes")
    if classes is None:
        numbers, labels = np.unique(labels, return_inverse=True)
        classes = [str(number) for number in numbers]
        missing = np.setdiff1d(np.arange(len(numbers)), numbers)
        if numbers[0] < 0 or (expected.labeled and not expected.classes and len(missing)):
            raise UserError(
                f"{path}: {len(numbers)} different labels from {numbers[0]} to {numbers[-1]}: number the "
                "classes from 0 without gaps, or name them in an array `classes`"
            )
    return ImageSet(str(path), [f"{first}[{n}]" for n in range(len(images))], labels, classes, images)
