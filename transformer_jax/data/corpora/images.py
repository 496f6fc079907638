"""Sets of labelled images: folders, archives, arrays, TensorFlow Datasets, and digits that need no download."""

from __future__ import annotations

import collections
import hashlib
import os
import pathlib
import posixpath
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from transformer_jax.data.corpora.image_files import (
    check_size,
    decoded,
    image_array,
    is_hidden,
    is_image_name,
    kind_of,
)
from transformer_jax.errors import UserError

# Names of folders that hold splits: two of them side by side are no classes.
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}
_BAD_ARRAYS = (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)
# What arrays of so many channels are.
_KINDS = {1: "grey", 4: "alpha"}
_NUMBERED = re.compile(r"\d+_(.+)")


class Source(Protocol):
    """Images by number, encoded or as arrays; it can be sent to another process."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> bytes | np.ndarray: ...


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


class _Features:
    """The images of a TFDS split."""

    def __init__(self, records: Any, feature: str):
        self._records, self._feature = records, feature

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.asarray(self._records[number][self._feature])


class ImageSet:
    """Images with a label each.

    Args:
      where: what they are from, for messages.
      names: of each image, for messages.
      labels: (N,) numbers of classes.
      classes: their names.
      source: see `Source`.

    Raises:
      UserError: a label that is of no class.
    """

    def __init__(
        self, where: str, names: Sequence[str], labels: np.ndarray, classes: Sequence[str], source: Source
    ):
        self.where, self.names, self.source = where, list(names), source
        self.labels, self.classes = np.asarray(labels, np.int32), tuple(classes)
        if len(labels) and not 0 <= self.labels.min() <= self.labels.max() < len(classes):
            raise UserError(
                f"{where}: labels from {self.labels.min()} to {self.labels.max()}, where there are "
                f"{len(classes)} classes"
            )
        self._kinds: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> np.ndarray:
        """The pixels of an image, (height, width, 3) uint8.

        Raises:
          UserError: see `decoded`.
        """
        found = self.source[number]
        name = f"{self.where}/{self.names[number]}"
        if isinstance(found, np.ndarray):
            channels = found.shape[2] if found.ndim == 3 else 1
            pixels, kind = image_array(found, name), _KINDS.get(channels, "")
        else:
            pixels, kind = decoded(found, name)
        if kind:
            self._kinds[number] = kind
        return pixels

    @property
    def converted(self) -> collections.Counter[str]:
        """How many of the images that were decoded so far were of which other kind, see `decoded`."""
        return collections.Counter(self._kinds.values())

    def kinds(self, most: int) -> collections.Counter[str]:
        """How many of `most` images, spread over the set, would be converted; see `kind_of`."""
        found: collections.Counter[str] = collections.Counter()
        for number in np.linspace(0, len(self) - 1, min(most, len(self))).astype(int).tolist():
            own = self.source[number]
            channels = own.shape[2] if isinstance(own, np.ndarray) and own.ndim == 3 else 1
            found[_KINDS.get(channels, "") if isinstance(own, np.ndarray) else kind_of(own)] += 1
        del found[""]
        return found

    def some(self, numbers: np.ndarray) -> ImageSet:
        """The set of some of the images, in this order."""
        names = [self.names[n] for n in numbers]
        return ImageSet(self.where, names, self.labels[numbers], self.classes, _Some(self.source, numbers))

    def with_classes(self, classes: Sequence[str]) -> ImageSet:
        """The same with its labels counted in another list of classes.

        Raises:
          UserError: a class that the list lacks.
        """
        strange = [name for name in self.classes if name not in classes]
        if strange:
            raise UserError(
                f"{self.where}: the class {strange[0]!r} was not in training, which has "
                f"{', '.join(list(classes)[:12])}"
            )
        number = np.array([list(classes).index(name) for name in self.classes], np.int32)
        return ImageSet(self.where, self.names, number[self.labels], classes, self.source)

    def fingerprint(self) -> str:
        """Tells this set from any other, by names, labels and the content of about a thousand images."""
        digest = hashlib.sha256(repr((self.classes, len(self))).encode())
        digest.update(self.labels.tobytes())
        for name in self.names:
            digest.update(name.encode() + b"\0")
        for number in range(0, len(self), max(1, len(self) // 1_000)):
            found = self.source[number]
            digest.update(found if isinstance(found, bytes) else np.ascontiguousarray(found).tobytes())
        return digest.hexdigest()


class _Some:
    """Some images of a source."""

    def __init__(self, source: Source, numbers: np.ndarray):
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> bytes | np.ndarray:
        return self._source[int(self._numbers[number])]


def digits() -> tuple[ImageSet, ImageSet]:
    """(training set, test set) of scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; nothing is
    downloaded.

    A fifth of each digit is the test set, drawn with seed 0.
    """
    from sklearn.datasets import load_digits  # an import of a second

    found: Any = load_digits()
    pixels = np.repeat((found.images * (255 / 16)).round().astype(np.uint8)[..., None], 3, axis=3)
    names = [str(number) for number in range(len(pixels))]
    whole = ImageSet("digits", names, found.target, [str(n) for n in range(10)], pixels)
    return stratified(whole, 0.2)


def stratified(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet]:
    """(the rest, a share of each class, at least one image), drawn with seed 0.

    Raises:
      UserError: a class of one image.
    """
    rng = np.random.default_rng(0)
    held = np.zeros(len(images), bool)
    for number, name in enumerate(images.classes):
        own = np.flatnonzero(images.labels == number)
        if len(own) == 1:
            raise UserError(
                f"{images.where}: the class {name!r} has one image, which leaves none to hold out: give "
                "more, or name `valid`"
            )
        held[rng.permutation(own)[: max(1, round(share * len(own)))]] = True
    return images.some(np.flatnonzero(~held)), images.some(np.flatnonzero(held))


def open_images(
    path: str,
    *,
    classes: Sequence[str] | None = None,
    split: str = "",
    data_dir: str | None = None,
    labelled: bool = True,
) -> ImageSet:
    """A set of labelled images.

    Args:
      path: a folder or an archive (.tar, .tar.gz, .tar.xz, .zip) with a folder for each class, which may have
        further folders inside, or with all files in one folder as NUMBER_CLASS.png; an .npz file with `images`
        and `labels`, or `x_train`, `y_train` and so on; or tfds:NAME, a set of TensorFlow Datasets with an
        image and a label.
      classes: of the training set, for a further one; None takes its own, by the alphabet.
      split: of an .npz file that has several, or of a TFDS set.
      data_dir: folder of TFDS's sets.
      labelled: False: files in one folder whose names say no class are all of one that is named "".

    Raises:
      UserError: nothing that can be read, no images, a class without any, names that lead out of an archive, or
        a class that training lacks.
    """
    if path.startswith("tfds:"):
        found = _tfds(path, split or "train", data_dir)
    else:
        place, known = pathlib.Path(path), _Known(classes or (), labelled)
        if place.is_dir():
            found = _of_folder(place, known)
        elif not place.is_file():
            raise UserError(f"{path}: no such folder or archive of images")
        elif place.suffix == ".npz":
            found = _of_npz(place, split, known)
        elif zipfile.is_zipfile(place):
            found = _of_zip(place, known)
        else:
            found = _of_tar(place, known)
    return found if classes is None else found.with_classes(classes)


def splits_of(path: str) -> tuple[str, ...]:
    """The splits that one .npz file holds, ("train", "test"); empty for everything else."""
    if not path.endswith(".npz") or not pathlib.Path(path).is_file():
        return ()
    try:
        with np.load(path) as file:
            return tuple(split for split in ("train", "test") if f"x_{split}" in file.files)
    except _BAD_ARRAYS as error:
        raise UserError(f"{path}: no .npz file that can be read ({error})") from None


class _Known(NamedTuple):
    """What is known of a set before it is opened: the classes of training, and whether it must have some."""

    classes: Sequence[str]
    labelled: bool


def _labelled(
    where: str, names: Sequence[str], source: Source, empty: Iterable[str], known: _Known
) -> ImageSet:
    """The set of files whose folders are their classes."""
    if not names:
        raise UserError(f"{where}: no images; their names end in .jpg, .png, .webp ...")
    for folder in sorted(empty):
        raise UserError(f"{where}: the class folder {folder!r} has no images: add some, or remove it")
    parents = [name.rpartition("/")[0] for name in names]
    above = {parent.rpartition("/")[0].rpartition("/")[2].lower() for parent in parents}
    if len(above & _SPLITS) > 1:
        raise UserError(
            f"{where} holds {', '.join(sorted(above & _SPLITS))} side by side: name one as `data` and "
            "another as `test`"
        )
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
    classes = sorted(set(own))
    numbers = {name: number for number, name in enumerate(classes)}
    return ImageSet(where, names, np.array([numbers[name] for name in own]), classes, source)


def _of_folder(folder: pathlib.Path, known: _Known) -> ImageSet:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if is_image_name(path.relative_to(folder).as_posix())]
    names = [path.relative_to(folder).as_posix() for path in files]
    folders = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_dir() and not any(map(is_hidden, path.relative_to(folder).parts))
    ]
    return _labelled(str(folder), names, _Files(files), _empty_folders(folders, names), known)


def _check_inside(where: str, names: Iterable[str]) -> None:
    for name in names:
        parts = pathlib.PurePosixPath(name.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or re.match(r"[A-Za-z]:", name):
            raise UserError(f"{where}: the name {name!r} leads out of the archive: it is not read")


def _of_tar(path: pathlib.Path, known: _Known) -> ImageSet:
    names: list[str] = []
    contents: list[bytes] = []
    places: list[tuple[int, int]] = []
    folders: set[str] = set()
    try:
        # Compressed archives have no cheap random access: their files are kept in memory, still encoded.
        plain = tarfile.is_tarfile(path) and _is_plain_tar(path)
        with tarfile.open(path) as file:
            for member in file:
                _check_inside(str(path), [member.name])
                if member.isdir():
                    folders.add(member.name.rstrip("/"))
                if not member.isfile() or not is_image_name(member.name):
                    continue
                check_size(member.size, f"{path}/{member.name}")
                names.append(member.name)
                if plain:
                    places.append((member.offset_data, member.size))
                else:
                    opened = file.extractfile(member)
                    contents.append(b"" if opened is None else opened.read())
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: no archive that can be read ({error})") from None
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  zlib, lzma and bz2 have errors of their own
        raise UserError(f"{path}: no archive that can be read ({type(error).__name__}: {error})") from None
    source: Source = _TarParts(path, places) if plain else contents
    return _labelled(str(path), names, source, _empty_folders(folders, names), known)


def _is_plain_tar(path: pathlib.Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.TarError:
        return False


def _empty_folders(folders: Iterable[str], names: Sequence[str]) -> list[str]:
    """Class folders without an image: those beside folders with images that hold nothing."""
    filled = {name.rpartition("/")[0] for name in names}
    beside = {folder.rpartition("/")[0] for folder in filled}
    return [
        folder
        for folder in folders
        if folder.rpartition("/")[0] in beside
        and not any(f == folder or f.startswith(f"{folder}/") for f in filled)
    ]


def _of_zip(path: pathlib.Path, known: _Known) -> ImageSet:
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
    folders = [name.rstrip("/") for name in every if name.endswith("/") and "__MACOSX" not in name]
    return _labelled(str(path), names, _ZipMembers(path, names), _empty_folders(folders, names), known)


def _of_npz(path: pathlib.Path, split: str, known: _Known) -> ImageSet:
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
        if numbers[0] < 0 or (not known.classes and len(missing)):
            raise UserError(
                f"{path}: labels from {numbers[0]} to {numbers[-1]}, of which there are {len(numbers)}: "
                "classes are counted from 0, and each has an image"
            )
    return ImageSet(str(path), [f"{first}[{n}]" for n in range(len(images))], labels, named, images)


def _tfds(name: str, split: str, data_dir: str | None) -> ImageSet:
    from transformer_jax.data.corpora import tfds_sources  # tensorflow-datasets is an extra, and takes a second

    def choose(builder: Any) -> Mapping[str, str]:
        features = sorted(builder.info.features.items())
        kinds = {own: type(feature).__name__ for own, feature in features}
        images = [own for own, kind in kinds.items() if kind == "Image"]
        labels = [own for own, kind in kinds.items() if kind == "ClassLabel"]
        if not images or not labels:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(kinds)}: no image with a "
                "label is among them"
            )
        return {"image": images[0], "label": "label" if "label" in labels else labels[0]}

    builder = tfds_sources.prepared_builder(name.removeprefix("tfds:"), data_dir, check=choose)
    chosen = choose(builder)
    records = tfds_sources.TfdsExamples(builder, split, tuple(chosen.values()))
    # Labels are read alone, without decoding any image.
    bare = tfds_sources.TfdsExamples(builder, split, (chosen["label"],), encoded=(chosen["image"],))
    labels = np.array([int(bare[n][chosen["label"]]) for n in range(len(bare))])
    classes = builder.info.features[chosen["label"]].names
    names = [str(number) for number in range(len(records))]
    return ImageSet(f"{name}:{split}", names, labels, classes, _Features(records, chosen["image"]))
