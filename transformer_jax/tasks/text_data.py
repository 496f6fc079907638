"""Text without labels that language models and text encoders are trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from transformer_jax.data.corpora import texts
from transformer_jax.distributed.mesh import check_reach, check_rows, check_tokens
from transformer_jax.errors import UserError
from transformer_jax.training.config import FREE, RunConfig, check_accumulation, check_at_least


@dataclasses.dataclass(frozen=True)
class TextDataConfig:
    """Text to train and validate on, its tokenizer, and its division into rows.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    text: tuple[str, ...] = ()
    """Text to train on: files, or folders of .txt files, plain, .gz or .xz; without it, `corpus` is read. For
    encoders, an empty line ends a document."""
    valid: tuple[str, ...] = ()
    """Text to validate on, in the formats of `text`; without it, a tenth of the text is held out."""
    corpus: str = "python"
    """python, the language reference that ships with every Python, or tfds:NAME, any set of TensorFlow
    Datasets with texts. Ignored if `text` names files."""
    splits: tuple[str, str] = ("train", "validation")
    """Training and validation split of a tfds: corpus, in the syntax of TFDS: train[:98%] ..."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of the TFDS sets; None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    tokenizer: str = "bpe"
    """bpe (byte-level, trained on the text), or the file or folder of a published tokenizer."""
    context: int = 128
    """Tokens per row T."""
    batch_size: int = 16
    """Rows per batch B."""

    def __post_init__(self) -> None:
        if self.valid and not self.text:
            raise UserError("`valid` needs `text`")
        if not self.text and self.corpus != "python" and not self.corpus.startswith("tfds:"):
            raise UserError(
                f"unknown corpus {self.corpus!r}: write python or tfds:NAME, or name files with `text`"
            )
        names_tfds = self.data_dir is not None or self.splits != TextDataConfig.splits
        if names_tfds and (self.text or not self.corpus.startswith("tfds:")):
            raise UserError("`data_dir` and `splits` are for a corpus tfds:NAME")
        check_at_least(self, context=1, batch_size=1)


def load_texts(
    task: TextDataConfig, read: Callable[[Sequence[str], Sequence[str]], texts.TextCorpus]
) -> texts.TextCorpus:
    """Load the documents that a config names.

    Args:
      task: The config.
      read: Function (training files, validation files) -> corpus that divides files into documents.

    Raises:
      UserError: A file cannot be read, see `read` and `tfds_corpus`.
    """
    if task.text:
        return read(task.text, task.valid)
    if task.corpus.startswith("tfds:"):
        return texts.tfds_corpus(task.corpus, task.splits, task.data_dir)
    return texts.python_reference()


def check_context(config: RunConfig, model_config: Any) -> None:
    """Check that the model reads rows of `context` tokens, and that micro-batches divide a batch.

    Raises:
      UserError: One of them does not hold.
    """
    task: TextDataConfig = config.task
    if model_config.max_length < task.context:
        raise UserError(f"`max_length` {model_config.max_length} is below `context` {task.context}")
    check_accumulation(task.batch_size, config.optimization)


def check_mesh(config: RunConfig, mesh: Any) -> None:
    """Check that the mesh can shard the rows and tokens of a batch.

    Raises:
      UserError: The mesh does not divide them.
    """
    task: TextDataConfig = config.task
    check_rows(task.batch_size // config.optimization.accumulation, mesh, "`batch_size`", whole=True)
    check_tokens(task.context, mesh, "`context`")
    check_reach(config.model, task.context, mesh, "`context`")
