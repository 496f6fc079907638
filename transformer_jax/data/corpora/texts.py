"""Corpora of a language model: documents for training and for validation."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import lzma
import pathlib
import pydoc_data.topics
import re
import zlib
from collections.abc import Sequence

import numpy as np

from transformer_jax.errors import UserError

# The share of a corpus that is held out where the user names no validation text.
_HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class TextCorpus:
    """Documents of two splits, in memory or read from disk when asked for.

    Attributes:
      identity: distinguishes this corpus from any other; None if only its texts do.
    """

    train: Sequence[str]
    valid: Sequence[str]
    identity: str | None = None

    def fingerprint(self) -> str:
        """Tells this corpus from any other."""
        if self.identity is not None:
            return self.identity
        digest = hashlib.sha256()
        for split in (self.train, self.valid):
            for text in split:
                digest.update(text.encode() + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()[:16]


def _read(path: pathlib.Path) -> str:
    try:
        raw = path.read_bytes()
        opened = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix)
        return (raw if opened is None else opened(raw)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}; convert it first") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


_ENDINGS = (".txt", ".txt.gz", ".txt.xz")


def read_documents(paths: Sequence[str]) -> list[str]:
    """The texts of files, and of all `.txt`, `.txt.gz` and `.txt.xz` files below folders, in the order of
    paths.

    Raises:
      UserError: a file that is missing or is not UTF-8, a folder without text files, or nothing but
        white space.
    """
    documents = []
    for name in paths:
        path = pathlib.Path(name)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.name.endswith(_ENDINGS) and p.is_file())
            if not files:
                raise UserError(f"{path}: no .txt, .txt.gz or .txt.xz file in this folder")
            documents += [_read(file) for file in files]
        else:
            documents.append(_read(path))
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise UserError(f"{', '.join(paths)}: no text in it")
    return documents


def parted(texts: Sequence[str]) -> list[str]:
    """The documents of texts in which an empty line ends a document."""
    found = (part.strip("\n") for text in texts for part in re.split(r"\n(?:[ \t\r]*\n)+", text))
    return [part for part in found if part.strip()]


def parted_corpus(texts: Sequence[str], valid: Sequence[str]) -> TextCorpus:
    """`files_corpus` of files in which an empty line ends a document.

    Raises:
      UserError: see `read_documents`.
    """
    documents = parted(read_documents(texts))
    return TextCorpus(documents, parted(read_documents(valid))) if valid else split_documents(documents)


def split_documents(documents: Sequence[str], seed: int = 0) -> TextCorpus:
    """A tenth held out: the last tenth of one document, else complete documents, drawn from the seed.

    The seed is of the corpus, not of a run: what is held out never changes.
    """
    if len(documents) == 1:
        (text,) = documents
        # As nanoGPT cuts its Shakespeare.
        cut = int(len(text) * (1 - _HELD_OUT))
        return TextCorpus([text[:cut]], [text[cut:]])
    order = np.random.default_rng(seed).permutation(len(documents))
    held = set(order[: max(1, round(len(documents) * _HELD_OUT))].tolist())
    return TextCorpus(
        [text for n, text in enumerate(documents) if n not in held],
        [text for n, text in enumerate(documents) if n in held],
    )


def python_reference() -> TextCorpus:
    """The Python language reference that ships with every Python: a document for each topic of `help()`."""
    topics = pydoc_data.topics.topics
    # Some topics have two names: what is held out must not be in the training text as well.
    return split_documents(list(dict.fromkeys(topics[name] for name in sorted(topics))))


def files_corpus(texts: Sequence[str], valid: Sequence[str]) -> TextCorpus:
    """Files or folders to train on, and to validate on; without the latter a tenth is held out.

    Raises:
      UserError: see `read_documents`.
    """
    documents = read_documents(texts)
    return TextCorpus(documents, read_documents(valid)) if valid else split_documents(documents)


def tfds_corpus(name: str, splits: Sequence[str], data_dir: str | None) -> TextCorpus:
    """Two splits of the TFDS text set "tfds:NAME".

    Raises:
      UserError: see `prepared_builder`, `text_feature` and `TfdsRecords`.
    """
    from transformer_jax.data.corpora import tfds_sources  # tensorflow-datasets is an extra, and takes a second

    builder = tfds_sources.prepared_builder(
        name.removeprefix("tfds:"), data_dir, check=tfds_sources.text_feature
    )
    train, valid = (tfds_sources.TfdsTexts(builder, split) for split in splits)
    identity = tfds_sources.tfds_fingerprint(builder, splits, [tfds_sources.text_feature(builder)])
    return TextCorpus(train, valid, identity)
