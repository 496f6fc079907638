"""Text corpora: documents for training and for validation."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import pydoc_data.topics
import re
from collections.abc import Sequence

import numpy as np

from transformer_jax.data.corpora.text_files import read_text
from transformer_jax.errors import UserError

# Fraction of a corpus that is held out if no validation text is named.
_HELD_OUT = 0.1


@dataclasses.dataclass(frozen=True)
class TextCorpus:
    """Documents of two splits, in memory or read from disk on access.

    Attributes:
      train: Training documents.
      valid: Validation documents.
      identity: Digest of the corpus; None if it must be computed from the texts.
    """

    train: Sequence[str]
    valid: Sequence[str]
    identity: str | None = None

    def fingerprint(self) -> str:
        """Return a digest of the corpus."""
        if self.identity is not None:
            return self.identity
        digest = hashlib.sha256()
        for split in (self.train, self.valid):
            for text in split:
                digest.update(text.encode() + b"\0")
            digest.update(b"\1")
        return digest.hexdigest()[:16]


_ENDINGS = (".txt", ".txt.gz", ".txt.xz")


def read_documents(paths: Sequence[str]) -> list[str]:
    """Read the texts of files, and of all `.txt`, `.txt.gz` and `.txt.xz` files below folders, in order.

    Raises:
      UserError: A file is missing or not UTF-8, a folder has no text files, or there is only white space.
    """
    documents = []
    for name in paths:
        path = pathlib.Path(name)
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.name.endswith(_ENDINGS) and p.is_file())
            if not files:
                raise UserError(f"{path}: no .txt, .txt.gz or .txt.xz file in this folder")
            documents += [read_text(file) for file in files]
        else:
            documents.append(read_text(path))
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise UserError(f"{', '.join(paths)}: there is no text")
    return documents


def split_at_empty_lines(texts: Sequence[str]) -> list[str]:
    """Split texts into documents at empty lines."""
    parts = (part.strip("\n") for text in texts for part in re.split(r"\n(?:[ \t\r]*\n)+", text))
    return [part for part in parts if part.strip()]


def paragraphs_corpus(texts: Sequence[str], valid: Sequence[str]) -> TextCorpus:
    """Read a corpus from files in which an empty line ends a document; see `files_corpus`.

    Raises:
      UserError: See `read_documents`.
    """
    documents = split_at_empty_lines(read_documents(texts))
    if not valid:
        return split_documents(documents)
    return TextCorpus(documents, split_at_empty_lines(read_documents(valid)))


def split_documents(documents: Sequence[str], seed: int = 0) -> TextCorpus:
    """Hold out a tenth: the last tenth of a single document, else complete documents drawn with the seed.

    The seed belongs to the corpus, so that all runs hold out the same documents.
    """
    if len(documents) == 1:
        (text,) = documents
        # The split of nanoGPT's Shakespeare.
        end = int(len(text) * (1 - _HELD_OUT))
        return TextCorpus([text[:end]], [text[end:]])
    order = np.random.default_rng(seed).permutation(len(documents))
    held = set(order[: max(1, round(len(documents) * _HELD_OUT))].tolist())
    return TextCorpus(
        [text for n, text in enumerate(documents) if n not in held],
        [text for n, text in enumerate(documents) if n in held],
    )


def python_reference() -> TextCorpus:
    """Return the Python language reference that ships with Python, a document for each topic of `help()`."""
    topics = pydoc_data.topics.topics
    # Some topics have two names, which must not put the same text into both splits.
    return split_documents(list(dict.fromkeys(topics[name] for name in sorted(topics))))


def files_corpus(texts: Sequence[str], valid: Sequence[str]) -> TextCorpus:
    """Read a corpus from files or folders; without validation files a tenth is held out.

    Raises:
      UserError: See `read_documents`.
    """
    documents = read_documents(texts)
    return TextCorpus(documents, read_documents(valid)) if valid else split_documents(documents)


def tfds_corpus(name: str, splits: Sequence[str], data_dir: str | None) -> TextCorpus:
    """Open two splits of the TFDS text dataset "tfds:NAME".

    Raises:
      UserError: See `prepared_builder`, `text_feature` and `TfdsRecords`.
    """
    from transformer_jax.data.corpora import tfds_sources  # imports tensorflow-datasets, an extra

    builder = tfds_sources.prepared_builder(
        name.removeprefix("tfds:"), data_dir, check=tfds_sources.text_feature
    )
    train, valid = (tfds_sources.TfdsTexts(builder, split) for split in splits)
    identity = tfds_sources.tfds_fingerprint(builder, splits, [tfds_sources.text_feature(builder)])
    return TextCorpus(train, valid, identity)
