"""Labeled images from folders, archives, arrays, TensorFlow Datasets, and digits that need no download."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.image_archives import (
    Expected,
    read_folder,
    read_npz,
    read_tar,
    read_zip,
)
from transformer_jax.data.corpora.image_sets import ImageSet, stratified
from transformer_jax.errors import UserError


class TfdsImages:
    """The images of a TFDS split."""

    def __init__(self, records: Any, feature: str):
        self._records, self._feature = records, feature

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.asarray(self._records[number][self._feature])


def digits() -> tuple[ImageSet, ImageSet]:
    """Return the (training set, test set) of scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    A fifth of each digit is the test set, drawn with seed 0. Nothing is downloaded.
    """
    from sklearn.datasets import load_digits  # takes a second to import

    data: Any = load_digits()
    pixels = np.repeat((data.images * (255 / 16)).round().astype(np.uint8)[..., None], 3, axis=3)
    names = [str(number) for number in range(len(pixels))]
    images = ImageSet("digits", names, data.target, [str(n) for n in range(10)], pixels)
    return stratified(images, 0.2)


def open_images(
    path: str,
    *,
    classes: Sequence[str] | None = None,
    split: str = "",
    data_dir: str | None = None,
    labeled: bool = True,
) -> ImageSet:
    """Open a dataset of labeled images.

    Args:
      path: A folder or an archive (.tar, .tar.gz, .tar.xz, .zip) with a folder for each class, which may have
        subfolders, or with all files in one folder as NUMBER_CLASS.png; an .npz file with `images` and
        `labels`, or with `x_train`, `y_train` and so on; or tfds:NAME, a set of TensorFlow Datasets with an
        image and a label.
      classes: Classes of the training set, if this is another set; None uses the dataset's own, in alphabetical
        order.
      split: Split of an .npz file or a TFDS set.
      data_dir: Folder of TFDS's sets.
      labeled: Require classes; otherwise files in one folder without classes in their names have the class "".

    Raises:
      UserError: The path cannot be read or has no images, a class has no images or is not in training, or a
        name leads out of an archive.
    """
    if path.startswith("tfds:"):
        images = _tfds(path, split or "train", data_dir)
    else:
        images = _read(pathlib.Path(path), split, Expected(classes or (), labeled))
    return images if classes is None else images.with_classes(classes)


def open_image_files(path: str) -> ImageSet:
    """Open the images of a folder or archive without classes; their names are paths within it.

    Raises:
      UserError: The path cannot be read or has no images, or a name leads out of an archive.
    """
    if pathlib.Path(path).suffix == ".npz":
        raise UserError(f"{path}: the images of an .npz file have no names: use a folder or an archive")
    return read_files(pathlib.Path(path), Expected((), labeled=False, has_classes=False))


def read_files(file: pathlib.Path, expected: Expected) -> ImageSet:
    """Read the files of a folder or archive as one dataset; its `source` is the sequence of their bytes.

    Raises:
      UserError: The path cannot be read or has no such files, or a name leads out of an archive.
    """
    return _read(file, "", expected)


def _read(file: pathlib.Path, split: str, expected: Expected) -> ImageSet:
    if file.is_dir():
        return read_folder(file, expected)
    if not file.is_file():
        raise UserError(f"{file}: no such folder or archive")
    if file.suffix == ".npz":
        return read_npz(file, split, expected)
    return (read_zip if zipfile.is_zipfile(file) else read_tar)(file, expected)


def _tfds(name: str, split: str, data_dir: str | None) -> ImageSet:
    from transformer_jax.data.corpora import tfds_sources  # imports tensorflow-datasets, an extra

    def choose(builder: Any) -> Mapping[str, str]:
        types = {n: type(feature).__name__ for n, feature in sorted(builder.info.features.items())}
        images = [feature for feature, name in types.items() if name == "Image"]
        labels = [feature for feature, name in types.items() if name == "ClassLabel"]
        if not images or not labels:
            raise UserError(
                f"{builder.info.full_name} has the features {', '.join(types)}, but needs an image and a label"
            )
        return {"image": images[0], "label": "label" if "label" in labels else labels[0]}

    builder = tfds_sources.prepared_builder(name.removeprefix("tfds:"), data_dir, check=choose)
    features = choose(builder)
    records = tfds_sources.TfdsExamples(builder, split, tuple(features.values()))
    # Labels are read separately, without decoding images.
    encoded = tfds_sources.TfdsExamples(builder, split, (features["label"],), encoded=(features["image"],))
    labels = np.array([int(encoded[n][features["label"]]) for n in range(len(encoded))])
    classes = builder.info.features[features["label"]].names
    names = [str(number) for number in range(len(records))]
    return ImageSet(f"{name}:{split}", names, labels, classes, TfdsImages(records, features["image"]))
