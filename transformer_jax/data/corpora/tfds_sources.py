"""Sets of TensorFlow Datasets, read record by record from ArrayRecord, without TensorFlow: pairs and texts."""

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

# Seconds until a host that does not answer counts as unreachable, and how many hosts of a set are asked.
_PATIENCE, _HOSTS_ASKED = 10, 3


class TfdsRecords(Sequence[Record], Generic[Record]):
    """The records of one split, each read when it is asked for, in any order; a subclass says what it keeps.

    Args:
      builder: of a set that is on disk, from `prepared_builder`.
      split: in TFDS's syntax: "train", "train[:90%]".
      encoded: names of features that stay as they are stored.

    Raises:
      UserError: an unknown split, or a shard that is missing, damaged or of another set.
    """

    def __init__(self, builder: Any, split: str, *, encoded: tuple[str, ...] = ()):
        try:
            # Splits come from users, in a syntax of their own; TFDS raises whatever its parser meets.
            instructions = builder.info.splits[split].file_instructions
        except Exception as error:  # noqa: BLE001
            reason = f"has no split {split!r} ({_one_line(error)})"
            raise UserError(f"{builder.info.full_name} {reason}: name them with `splits`") from None
        if not sum(max(0, i.take) for i in instructions):
            raise UserError(
                f"{builder.info.full_name}: the split {split!r} is empty; name others with `splits`"
            )
        self._paths = [i.filename for i in instructions]
        self._ends = list(itertools.accumulate(i.take for i in instructions))
        for instruction in instructions:
            _check_shard(instruction.filename, instruction.examples_in_shard)
        # A set that has no decoder to leave out is read as it is.
        how: dict[str, Any] = {"decoders": {name: _skip_decoding() for name in encoded}} if encoded else {}
        self._source = builder.as_data_source(split=split, **how)

    def _kept(self, example: Any) -> Record:
        """What is kept of an example."""
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
        return self._kept(example)


class TfdsPairs(TfdsRecords[Pair]):
    """One split as a sequence of pairs.

    A set whose examples hold varying languages (`TranslationVariableLanguages`) gives empty text for a
    language that an example lacks.

    Args:
      builder, split: see `TfdsRecords`, and for its errors.
      source, target: the two languages, as the set names them.
    """

    def __init__(self, builder: Any, split: str, source: str, target: str):
        self._languages = source, target
        self._place, _ = translation_feature(builder)
        super().__init__(builder, split)

    def _kept(self, example: Any) -> Pair:
        source, target = _texts(example[self._place] if self._place else example, self._languages)
        return Pair(source, target)


class TfdsTexts(TfdsRecords[str]):
    """One split as a sequence of texts.

    Args:
      builder, split: see `TfdsRecords`, and for its errors.
    """

    def __init__(self, builder: Any, split: str):
        self._feature = text_feature(builder)
        super().__init__(builder, split)

    def _kept(self, example: Any) -> str:
        return example[self._feature].decode("utf-8", "replace")


class TfdsExamples(TfdsRecords[dict[str, Any]]):
    """One split as a sequence of some features by name.

    Args:
      builder, split: see `TfdsRecords`, and for its errors.
      features: names of those that are kept.
      encoded: see `TfdsRecords`.
    """

    def __init__(self, builder: Any, split: str, features: tuple[str, ...], *, encoded: tuple[str, ...] = ()):
        self._features = features
        super().__init__(builder, split, encoded=encoded)

    def _kept(self, example: Any) -> dict[str, Any]:
        return {name: example[name] for name in self._features}


def _skip_decoding() -> Any:
    import tensorflow_datasets as tfds

    return tfds.decode.SkipDecoding()


def _check_shard(path: str, records: int) -> None:
    """That a shard's index can be read and counts what the set's description says."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    found = reader.num_records() if reader.ok() else 0
    with contextlib.suppress(RuntimeError):  # a damaged file is not closed well either
        reader.close()
    if found != records:
        raise UserError(
            f"{path}: {found:,} of {records:,} records can be read; the shard is damaged or missing: "
            "delete the folder and prepare the set again"
        )


def _texts(translations: dict[str, Any], languages: tuple[str, str]) -> list[str]:
    """The text of each language, of a dictionary by language or of parallel lists of languages and texts."""
    if isinstance(translations.get("language"), np.ndarray | list):
        names = [name.decode() for name in translations["language"]]
        translations = dict(zip(names, translations["translation"], strict=True))
    # White space inside would be kept by the tokenizer; a line break ends no sentence here.
    return [
        " ".join(translations.get(language, b"").decode("utf-8", "replace").split()) for language in languages
    ]


def translation_feature(builder: Any) -> tuple[str, list[str]]:
    """Where in an example the translations are, "" being the example itself, and their languages.

    Raises:
      UserError: a set without translations.
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    kinds = (tfds.features.Translation, tfds.features.TranslationVariableLanguages)
    if isinstance(features, kinds):
        return "", list(features.languages)
    for name, feature in features.items() if hasattr(features, "items") else ():
        if isinstance(feature, kinds):
            return name, list(feature.languages)
    raise UserError(
        f"{builder.info.full_name} is not a translation set: it holds "
        f"{', '.join(sorted(features)) if hasattr(features, 'keys') else type(features).__name__}"
    )


def text_feature(builder: Any) -> str:
    """The name of the text in an example: "text" where there is one of this name, else the only one.

    Raises:
      UserError: a set without texts, or with several and none called "text".
    """
    import tensorflow_datasets as tfds

    features = builder.info.features
    items = features.items() if hasattr(features, "items") else ()
    names = [name for name, feature in items if isinstance(feature, tfds.features.Text)]
    if "text" in names:
        return "text"
    if len(names) == 1:
        return names[0]
    held = f"several ({', '.join(names)})" if names else "none"
    raise UserError(f"{builder.info.full_name} is not a set of texts: of features of text it holds {held}")


def direction_of(builder: Any, direction: str | None) -> tuple[str, str]:
    """Source and target language: those of "SOURCE-TARGET", or the set's own two in its order.

    Raises:
      UserError: a language that the set lacks, or more than two languages and no direction.
    """
    _, languages = translation_feature(builder)
    listed = ", ".join(languages)
    if direction is None:
        if len(languages) != 2:
            raise UserError(
                f"{builder.info.full_name} holds {len(languages)} languages ({listed}): choose two with "
                "`direction` SOURCE-TARGET"
            )
        return languages[0], languages[1]
    # A language's own name may have a dash in it.
    for source, target in itertools.permutations(languages, 2):
        if direction == f"{source}-{target}":
            return source, target
    raise UserError(f"{builder.info.full_name} does not hold {direction}: its languages are {listed}")


def prepared_builder(
    name: str, data_dir: str | None = None, *, check: Callable[[Any], Any] = translation_feature
) -> Any:
    """The TFDS builder of a set that is on disk, downloaded and prepared first where it is not.

    Args:
      name: "wmt14_translate/de-en", with ":VERSION" behind it for an older one.
      check: raises where the set is not of the expected kind, before it is downloaded.
      data_dir: TFDS's folder; None is its own default, TFDS_DATA_DIR or ~/tensorflow_datasets.

    Raises:
      UserError: tensorflow-datasets is not installed, an unknown set or configuration, a set that is
        neither on disk nor to be had; in every case at once.
    """
    try:
        import tensorflow_datasets as tfds

        # Sets of the older kind are registered by the import of their own module.
        for module in ("translate", "text", "image_classification"):
            importlib.import_module(f"tensorflow_datasets.{module}")
    except ImportError as error:
        raise UserError(
            f"`corpus` tfds:{name} needs tensorflow-datasets ({error}): pip install 'transformer_jax[tfds]'"
        ) from None
    from tensorflow_datasets.core.registered import DatasetNotFoundError

    if re.search(r":(?![\d.*]+$)", name):
        raise UserError(f"tfds:{name} is of another collection: only sets of TFDS itself are read")
    options: dict[str, Any] = {"data_dir": data_dir} if data_dir else {}
    try:
        try:
            # A set that is on disk needs no code: its folder says what it holds.
            builder, on_disk = tfds.core.read_only_builder.builder_from_files(name, **options), True
        except DatasetNotFoundError:
            builder, on_disk = tfds.builder(name, file_format="array_record", **options), False
    except DatasetNotFoundError:
        known = tfds.list_builders(with_community_datasets=False)
        short = name.split("/")[0].split(":")[0]
        near = difflib.get_close_matches(short, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        folder = data_dir or tfds.core.constants.DATA_DIR
        raise UserError(f"unknown data set {name!r}: neither TFDS nor {folder} has it{hint}") from None
    except Exception as error:  # noqa: BLE001  a builder's own code, or a damaged description on disk
        raise UserError(f"tfds:{name} cannot be had: {_one_line(error)}{_configurations(tfds, name)}") from None
    check(builder)
    if not on_disk:
        _download(builder)
    file_format = builder.info.file_format.value
    if file_format != "array_record":
        raise UserError(
            f"{builder.data_dir} holds {file_format} files, which have no random access: name another folder "
            "with `data_dir`, where the set is prepared as array_record"
        )
    return builder


def _configurations(tfds: Any, name: str) -> str:
    try:
        configurations = list(tfds.builder_cls(name.split("/")[0]).builder_configs)
    except Exception:  # noqa: BLE001  only for the message
        return ""
    return f"; its configurations are {', '.join(configurations)}" if configurations else ""


def _one_line(error: BaseException) -> str:
    # TFDS sets its own context around what went wrong, on lines of its own.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).split(" Here are ")[0].strip("'\".")


def _hosts(builder: Any) -> list[tuple[str, int]]:
    """Where a set is downloaded from: (host, port) of its files, or of its page where none are listed."""
    try:
        urls = list(builder.url_infos or ())
    except Exception:  # noqa: BLE001  some builders fail to list them
        urls = []
    # A set without files or a page of its own, which then has TFDS's, may need no network at all.
    if not urls and "/datasets/catalog/" not in (builder.info.homepage or "/datasets/catalog/"):
        urls = [builder.info.homepage]
    found: dict[tuple[str, int], None] = {}
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        proxy = urllib.request.getproxies().get(parts.scheme)
        if proxy and parts.hostname and not urllib.request.proxy_bypass(parts.hostname):
            parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        if parts.hostname:
            port = parts.port or {"https": 443, "ftp": 21}.get(parts.scheme, 80)
            found[parts.hostname, port] = None
    return list(found)


def _download(builder: Any) -> None:
    """Downloads and prepares a set; where none of its hosts can be reached, that is an error at once."""
    missing = f"{builder.info.full_name} is not on disk (looked in {builder.data_dir})"
    # TFDS's downloader tries a dead host for minutes. One that answers is enough to let it try.
    failed = None
    for host, port in _hosts(builder)[:_HOSTS_ASKED]:
        try:
            socket.create_connection((host, port), timeout=_PATIENCE).close()
            failed = None
            break
        except OSError as error:
            failed = f"{host} cannot be reached ({error})"
    if failed:
        raise UserError(
            f"{missing} and {failed}: connect to a network, or name the folder of a prepared set with "
            "`data_dir`"
        )
    _encode_by_pillow()
    try:
        builder.download_and_prepare()
    except Exception as error:  # noqa: BLE001  whatever a builder's own code raises
        raise UserError(
            f"{missing} and cannot be prepared: {type(error).__name__}: {_one_line(error)}"
        ) from None


def _encode_by_pillow() -> None:
    """Has TFDS write arrays of pixels, which a builder gives, by Pillow where TensorFlow is not installed.

    It reads images without TensorFlow, and writes those that it has as files; arrays alone it gives to a
    function of TensorFlow's, in this one method.
    """
    if importlib.util.find_spec("tensorflow") is not None:
        return
    from PIL import Image
    from tensorflow_datasets.core.features import image_feature

    def encoded(self: Any, pixels: np.ndarray) -> bytes:
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(
            file, self.encoding_format, quality=95
        )
        return file.getvalue()

    image_feature._ImageEncoder._encode_image = encoded


def tfds_fingerprint(builder: Any, splits: Sequence[str], direction: Sequence[str]) -> str:
    """Tells a prepared set, its splits and what is read of it from any other, without reading its records."""
    described = [builder.info.full_name, *splits, *direction]
    for name, split in sorted(builder.info.splits.items()):
        described += [name, *map(str, split.shard_lengths), str(split.num_bytes)]
    return hashlib.sha256("\t".join(described).encode()).hexdigest()[:16]
