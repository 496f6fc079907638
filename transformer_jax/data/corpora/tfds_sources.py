"""Sets of TensorFlow Datasets, read record by record from ArrayRecord without TensorFlow."""

from __future__ import annotations

import bisect
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import io
import itertools
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

from transformer_jax.data.corpora.pairs import Pair
from transformer_jax.errors import UserError

Record = TypeVar("Record")

# Seconds until a host counts as unreachable, and the maximum number of hosts to try.
_TIMEOUT, _MAX_HOSTS = 10, 3


class TfdsRecords(Sequence[Record], Generic[Record]):
    """The records of one split, read on access; a subclass converts them.

    Args:
      builder: Builder of a set on disk, from `prepared_builder`.
      split: Split in TFDS's syntax: "train", "train[:90%]".
      encoded: Names of features that are not decoded.

    Raises:
      UserError: The split is unknown, or a shard is missing, damaged or of another set.
    """

    def __init__(self, builder: Any, split: str, *, encoded: tuple[str, ...] = ()):
        try:
            # TFDS's parser of splits raises various errors.
            instructions = builder.info.splits[split].file_instructions
        except Exception as error:  # noqa: BLE001
            reason = f"has no split {split!r} ({_one_line(error)})"
            raise UserError(f"{builder.info.full_name} {reason}: name them with `splits`") from None
        if not sum(max(0, i.take) for i in instructions):
            raise UserError(
                f"{builder.info.full_name}: the split {split!r} is empty; name another with `splits`"
            )
        self._paths = [i.filename for i in instructions]
        self._ends = list(itertools.accumulate(i.take for i in instructions))
        for instruction in instructions:
            _check_shard(instruction.filename, instruction.examples_in_shard)
        options: dict[str, Any] = {"decoders": {name: _skip_decoding() for name in encoded}} if encoded else {}
        self._source = builder.as_data_source(split=split, **options)

    def _convert(self, example: Any) -> Record:
        """Convert an example."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._source)

    @overload
    def __getitem__(self, number: int) -> Record: ...
    @overload
    def __getitem__(self, number: slice) -> list[Record]: ...
    def __getitem__(self, number: int | slice) -> Record | list[Record]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        number %= len(self)
        try:
            example = self._source[number]
        except RuntimeError as error:
            path = self._paths[bisect.bisect_right(self._ends, number)]
            reason = str(error).split(";")[0]
            raise UserError(
                f"{path}: record {number:,} of the split cannot be read ({reason}); the shard is damaged: "
                "delete the folder and prepare the set again"
            ) from None
        return self._convert(example)


class TfdsPairs(TfdsRecords[Pair]):
    """One split as a sequence of pairs.

    In sets with varying languages (`TranslationVariableLanguages`) a missing language is an empty text.

    Args:
      builder: See `TfdsRecords`.
      split: See `TfdsRecords`.
      source: Name of the source language in the set.
      target: Name of the target language in the set.
    """

    def __init__(self, builder: Any, split: str, source: str, target: str):
        self._languages = source, target
        self._feature, _ = translation_feature(builder)
        super().__init__(builder, split)

    def _convert(self, example: Any) -> Pair:
        source, target = _texts(example[self._feature] if self._feature else example, self._languages)
        return Pair(source, target)


class TfdsTexts(TfdsRecords[str]):
    """One split as a sequence of texts."""

    def __init__(self, builder: Any, split: str):
        self._feature = text_feature(builder)
        super().__init__(builder, split)

    def _convert(self, example: Any) -> str:
        return example[self._feature].decode("utf-8", "replace")


class TfdsExamples(TfdsRecords[dict[str, Any]]):
    """One split as a sequence of features by name.

    Args:
      builder: See `TfdsRecords`.
      split: See `TfdsRecords`.
      features: Names of the features to return.
      encoded: See `TfdsRecords`.
    """

    def __init__(self, builder: Any, split: str, features: tuple[str, ...], *, encoded: tuple[str, ...] = ()):
        self._features = features
        super().__init__(builder, split, encoded=encoded)

    def _convert(self, example: Any) -> dict[str, Any]:
        return {name: example[name] for name in self._features}


def _skip_decoding() -> Any:
    import tensorflow_datasets as tfds

    return tfds.decode.SkipDecoding()


def _check_shard(path: str, records: int) -> None:
    """Check that a shard's index is readable and has as many records as the dataset's description.

    Raises:
      UserError: The index is damaged or has another number of records.
    """
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    count = reader.num_records() if reader.ok() else 0
    with contextlib.suppress(RuntimeError):  # closing a damaged file fails
        reader.close()
    if count != records:
        raise UserError(
            f"{path}: {count:,} of {records:,} records can be read; the shard is damaged or missing: "
            "delete the folder and prepare the set again"
        )


def _texts(translations: dict[str, Any], languages: tuple[str, str]) -> list[str]:
    """Return the text of each language from a dictionary, or from parallel lists of languages and texts."""
    if isinstance(translations.get("language"), np.ndarray | list):
        names = [name.decode() for name in translations["language"]]
        translations = dict(zip(names, translations["translation"], strict=True))
    # The tokenizer would encode repeated spaces and line breaks.
    return [
        " ".join(translations.get(language, b"").decode("utf-8", "replace").split()) for language in languages
    ]


def translation_feature(builder: Any) -> tuple[str, list[str]]:
    """Return (the feature with the translations, their languages); "" means the example itself.

    Raises:
      UserError: The set has no translations.
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    types = (tfds.features.Translation, tfds.features.TranslationVariableLanguages)
    if isinstance(features, types):
        return "", list(features.languages)
    for name, feature in features.items() if hasattr(features, "items") else ():
        if isinstance(feature, types):
            return name, list(feature.languages)
    raise UserError(
        f"{builder.info.full_name} is not a translation set: it holds "
        f"{', '.join(sorted(features)) if hasattr(features, 'keys') else type(features).__name__}"
    )


def text_feature(builder: Any) -> str:
    """Return the name of the text feature: "text" if there is one, else the only one.

    Raises:
      UserError: The set has no text feature, or several and none called "text".
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    items = features.items() if hasattr(features, "items") else ()
    names = [name for name, feature in items if isinstance(feature, tfds.features.Text)]
    if "text" in names:
        return "text"
    if len(names) == 1:
        return names[0]
    count = f"several ({', '.join(names)})" if names else "none"
    raise UserError(f"{builder.info.full_name} needs one text feature, but has {count}")


def direction_of(builder: Any, direction: str | None) -> tuple[str, str]:
    """Return the languages (source, target) of "SOURCE-TARGET", or the dataset's two languages in its order.

    Raises:
      UserError: The set lacks a language, or has more than two and no direction is named.
    """
    _, languages = translation_feature(builder)
    names = ", ".join(languages)
    if direction is None:
        if len(languages) != 2:
            raise UserError(
                f"{builder.info.full_name} has {len(languages)} languages ({names}): choose two with "
                "`direction` SOURCE-TARGET"
            )
        return languages[0], languages[1]
    # The name of a language may contain a dash.
    for source, target in itertools.permutations(languages, 2):
        if direction == f"{source}-{target}":
            return source, target
    raise UserError(f"{builder.info.full_name} does not have {direction}: its languages are {names}")


def prepared_builder(
    name: str, data_dir: str | None = None, *, check: Callable[[Any], Any] = translation_feature
) -> Any:
    """Return the TFDS builder of a dataset, which is downloaded and prepared if it is not on disk.

    Args:
      name: Name such as "wmt14_translate/de-en", followed by ":VERSION" for an older version.
      data_dir: TFDS's folder; None means TFDS_DATA_DIR or ~/tensorflow_datasets.
      check: Function that raises an error before the download if the set lacks a feature.

    Raises:
      UserError: tensorflow-datasets is not installed, the set or configuration is unknown, or the set is
        neither on disk nor downloadable.
    """
    try:
        import tensorflow_datasets as tfds

        # Older sets are registered by the import of their module.
        for module in ("translate", "text", "image_classification"):
            importlib.import_module(f"tensorflow_datasets.{module}")
    except ImportError as error:
        raise UserError(
            f"tfds:{name} needs tensorflow-datasets ({error}): pip install 'transformer_jax[tfds]'"
        ) from None
    from tensorflow_datasets.core.registered import DatasetNotFoundError

    if re.search(r":(?![\d.*]+$)", name):
        raise UserError(f"tfds:{name} belongs to another collection: only TFDS's own sets are supported")
    options: dict[str, Any] = {"data_dir": data_dir} if data_dir else {}
    try:
        try:
            # The folder of a prepared set describes it, so that its code is not needed.
            builder, on_disk = tfds.core.read_only_builder.builder_from_files(name, **options), True
        except DatasetNotFoundError:
            builder, on_disk = tfds.builder(name, file_format="array_record", **options), False
    except DatasetNotFoundError:
        known = tfds.list_builders(with_community_datasets=False)
        base_name = name.split("/")[0].split(":")[0]
        matches = difflib.get_close_matches(base_name, known, n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        folder = data_dir or tfds.core.constants.DATA_DIR
        raise UserError(f"unknown data set {name!r}: neither TFDS nor {folder} has it{hint}") from None
    except Exception as error:  # noqa: BLE001  raised by a builder's code or for a damaged description
        if "No module named 'tensorflow'" in str(error):
            raise UserError(
                f"tfds:{name}: TFDS reads sets with sound by TensorFlow: pip install tensorflow"
            ) from None
        reason = f"{_one_line(error)}{_configurations(tfds, name)}"
        raise UserError(f"tfds:{name} cannot be opened: {reason}") from None
    check(builder)
    if not on_disk:
        _download(builder)
    file_format = builder.info.file_format.value
    if file_format != "array_record":
        raise UserError(
            f"{builder.data_dir} has {file_format} files, which have no random access: name a folder with "
            "`data_dir` in which the set is prepared as array_record"
        )
    return builder


def _configurations(tfds: Any, name: str) -> str:
    try:
        configurations = list(tfds.builder_cls(name.split("/")[0]).builder_configs)
    except Exception:  # noqa: BLE001  only for the message
        return ""
    return f"; its configurations are {', '.join(configurations)}" if configurations else ""


def _one_line(error: BaseException) -> str:
    # TFDS adds lines of context to the error.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).split(" Here are ")[0].strip("'\".")


def _hosts(builder: Any) -> list[tuple[str, int]]:
    """Return the (host, port) of a dataset's downloads, or of its home page if no downloads are listed."""
    try:
        urls = list(builder.url_infos or ())
    except Exception:  # noqa: BLE001  some builders fail to list them
        urls = []
    # A set with neither downloads nor its own home page may not need a network.
    if not urls and "/datasets/catalog/" not in (builder.info.homepage or "/datasets/catalog/"):
        urls = [builder.info.homepage]
    hosts: dict[tuple[str, int], None] = {}
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        proxy = urllib.request.getproxies().get(parts.scheme)
        if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
            parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        if parts.hostname:
            port = parts.port or {"https": 443, "ftp": 21}.get(parts.scheme, 80)
            hosts[parts.hostname, port] = None
    return list(hosts)


def _download(builder: Any) -> None:
    """Download and prepare a dataset.

    Raises:
      UserError: No host of the set can be reached, or it cannot be prepared.
    """
    missing = f"{builder.info.full_name} is not on disk (looked in {builder.data_dir})"
    # TFDS's downloader would retry an unreachable host for minutes.
    failure = None
    for host, port in _hosts(builder)[:_MAX_HOSTS]:
        try:
            socket.create_connection((host, port), timeout=_TIMEOUT).close()
            failure = None
            break
        except OSError as error:
            failure = f"{host} cannot be reached ({error})"
    if failure:
        raise UserError(
            f"{missing} and {failure}: connect to a network, or name the folder of a prepared set with "
            "`data_dir`"
        )
    _encode_with_pillow()
    try:
        builder.download_and_prepare()
    except Exception as error:  # noqa: BLE001  raised by a builder's code
        raise UserError(
            f"{missing} and cannot be prepared: {type(error).__name__}: {_one_line(error)}"
        ) from None


def _encode_with_pillow() -> None:
    """Make TFDS encode arrays of pixels with Pillow if TensorFlow is not installed.

    This is the only method in which TFDS needs TensorFlow to read or write images.
    """
    if importlib.util.find_spec("tensorflow") is not None:
        return
    from PIL import Image
    from tensorflow_datasets.core.features import image_feature

    def encode(self: Any, pixels: np.ndarray) -> bytes:
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(
            file, self.encoding_format, quality=95
        )
        return file.getvalue()

    image_feature._ImageEncoder._encode_image = encode


def tfds_fingerprint(builder: Any, splits: Sequence[str], direction: Sequence[str]) -> str:
    """Return a digest of a prepared dataset's description, its splits and the features that are read."""
    description = [builder.info.full_name, *splits, *direction]
    for name, split in sorted(builder.info.splits.items()):
        description += [name, *map(str, split.shard_lengths), str(split.num_bytes)]
    return hashlib.sha256("\t".join(description).encode()).hexdigest()[:16]
