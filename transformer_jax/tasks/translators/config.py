"""Config of the translation task: data, batches, loss and scores."""

from __future__ import annotations

import dataclasses
from typing import Literal

from transformer_jax.data.corpora import parallel
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import check_bleu_tokenizer
from transformer_jax.training.config import FREE, check_at_least, check_below_one


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """Pairs to train on, their batches, the loss, and the scoring of translations.

    Raises:
      UserError: A value is out of range, or values contradict each other.
    """

    corpus: str = "phrases:en-de"
    """phrases:SOURCE-TARGET, the embedded corpus in any two CLDR locales (de, fr, ja, ru, pt_BR ...), or
    tfds:NAME, a translation set of TensorFlow Datasets (tfds:wmt14_translate/de-en), which is downloaded unless
    it is on disk. Ignored if `train` names files."""
    direction: str | None = None
    """SOURCE-TARGET languages of a tfds: corpus; None means the order of the set."""
    splits: tuple[str, str, str] = ("train", "validation", "test")
    """Training, validation and test split of a tfds: corpus, in TFDS syntax: train[:98%] ..."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS data sets; None means TFDS_DATA_DIR or ~/tensorflow_datasets."""
    train: tuple[str, ...] = ()
    """Files of training pairs: two aligned text files (SRC TGT) or one tab-separated file; plain or .gz.
    Requires `valid` and `test`."""
    valid: tuple[str, ...] = ()
    """Validation pairs, files as in `train`."""
    test: tuple[str, ...] = ()
    """Test pairs, files as in `train`."""
    phrases: int = 75_000
    """Number of training phrases to draw from the embedded corpus."""
    bpe_dropout: float = 0.0
    """Probability of skipping each merge of a training word (BPE-dropout); 0.1 in the paper."""
    batch_tokens: int = 4_096
    """Padded tokens per batch, for the source and for the target."""
    batching: Literal["buckets", "packed"] = "buckets"
    """buckets: batches of sentences of similar length. packed: rows of several sentences, almost no padding,
    and a single shape to compile."""
    buckets: int = 4
    """Number of length buckets, each compiled once; has no effect on packed batches."""
    label_smoothing: float = 0.1
    """Probability to spread over the vocabulary; 0.1 in the paper."""
    r_drop: float = 0.0
    """Weight of the divergence between two passes with different dropout (R-Drop), which doubles the work of a
    step; 5 in the paper, 0 for a single pass."""
    beam_size: int = dataclasses.field(default=4, metadata=FREE)
    """Beam size of the test translations; 1 is greedy search."""
    length_penalty: float = dataclasses.field(default=0.6, metadata=FREE)
    """Exponent of the length penalty."""
    bleu_tokenize: str = dataclasses.field(default="auto", metadata=FREE)
    """Tokenizer of sacreBLEU: 13a for plain text, none for tokenised text, zh, ja-mecab, char ... auto: the one
    for the script of the references, 13a for languages with spaces between words."""

    def __post_init__(self) -> None:
        try:
            check_bleu_tokenizer(self.bleu_tokenize)
        except ValueError as error:
            raise UserError(str(error)) from None
        if self.train and not (self.valid and self.test):
            raise UserError("`train` needs `valid` and `test`: scores require pairs outside the training set")
        if not self.train and (self.valid or self.test):
            raise UserError("`valid` and `test` need `train`")
        is_tfds = not self.train and self.corpus.startswith("tfds:")
        if not self.train and not is_tfds:
            parallel.parse_phrases_name(self.corpus)
        for field in ("direction", "data_dir"):
            if not is_tfds and getattr(self, field) is not None:
                raise UserError(f"`{field}` needs a `corpus` tfds:NAME")
        check_at_least(
            self, phrases=1, batch_tokens=1, buckets=1, beam_size=1, label_smoothing=0, bpe_dropout=0, r_drop=0
        )
        check_below_one(self, "label_smoothing", "bpe_dropout")
