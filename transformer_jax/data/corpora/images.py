"""Sets of labelled images: folders, archives, arrays, TensorFlow Datasets, and digits that need no download."""

from __future__ import annotations

import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.data.corpora.image_archives import Known, of_folder, of_npz, of_tar, of_zip
from transformer_jax.data.corpora.image_sets import ImageSet, stratified
from transformer_jax.errors import UserError


class _Features:
    """The images of a TFDS split."""

    def __init__(self, records: Any, feature: str):
        self._records, self._feature = records, feature

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> np.ndarray:
        return np.asarray(self._records[number][self._feature])


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
        place, known = pathlib.Path(path), Known(classes or (), labelled)
        if place.is_dir():
            found = of_folder(place, known)
        elif not place.is_file():
            raise UserError(f"{path}: no such folder or archive of images")
        elif place.suffix == ".npz":
            found = of_npz(place, split, known)
        elif zipfile.is_zipfile(place):
            found = of_zip(place, known)
        else:
            found = of_tar(place, known)
    return found if classes is None else found.with_classes(classes)


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
