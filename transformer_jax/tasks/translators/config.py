"""What a translation run learns from, its loss, and how it is scored."""

from __future__ import annotations

import dataclasses
from typing import Literal

from transformer_jax.data.corpora import parallel
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import check_bleu_tokenizer
from transformer_jax.training.config import FREE, check_at_least, check_below_one


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """Which pairs are learned, how they are batched, the loss, and how translations are scored.

    Raises:
      UserError: a value out of range, or values that contradict each other.
    """

    corpus: str = "phrases:en-de"
    """phrases:SOURCE-TARGET, the embedded corpus in any two CLDR locales (de, fr, ja, ru, pt_BR ...), or
    tfds:NAME, a translation set of TensorFlow Datasets (tfds:wmt14_translate/de-en), which is downloaded if it
    is not on disk. Ignored if `train` names files."""
    direction: str | None = None
    """SOURCE-TARGET languages of a tfds: corpus; None: in the set's own order."""
    splits: tuple[str, str, str] = ("train", "validation", "test")
    """Training, validation and test split of a tfds: corpus, in its syntax: train[:98%] ..."""
    data_dir: str | None = dataclasses.field(default=None, metadata=FREE)
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    train: tuple[str, ...] = ()
    """Training pairs of your own: two aligned text files (SRC TGT) or one tab-separated file; plain or .gz.
    They need `valid` and `test`."""
    valid: tuple[str, ...] = ()
    """Validation pairs, files as in `train`."""
    test: tuple[str, ...] = ()
    """Test pairs, files as in `train`."""
    phrases: int = 75_000
    """Number of training phrases drawn from the embedded corpus."""
    bpe_dropout: float = 0.0
    """Rate at which merges of training words are left out at random (BPE-dropout); the paper's is 0.1."""
    batch_tokens: int = 4_096
    """Padded tokens a side in one batch."""
    batching: Literal["buckets", "packed"] = "buckets"
    """Batches of sentences of about equal length (buckets), or of rows that each hold several sentences
    (packed: nearly no padding and one shape to compile)."""
    buckets: int = 4
    """Number of length buckets, each compiled once. Packed batches have one shape."""
    label_smoothing: float = 0.1
    """Probability that is spread over the vocabulary; the paper's is 0.1."""
    r_drop: float = 0.0
    """Weight of the agreement of two passes with different dropout (R-Drop), which doubles a step; the
    paper's is 5."""
    beam_size: int = dataclasses.field(default=4, metadata=FREE)
    """Beam size of the test's translations; 1 is greedy."""
    length_penalty: float = dataclasses.field(default=0.6, metadata=FREE)
    """Exponent of the length penalty."""
    bleu_tokenize: str = dataclasses.field(default="13a", metadata=FREE)
    """sacreBLEU's tokenizer: 13a for plain text, none for tokenised text, zh, ja-mecab, char ..."""

    def __post_init__(self) -> None:
        try:
            check_bleu_tokenizer(self.bleu_tokenize)
        except ValueError as error:
            raise UserError(str(error)) from None
        if self.train and not (self.valid and self.test):
            raise UserError("`train` needs `valid` and `test`: scores come from pairs that were not trained on")
        if not self.train and (self.valid or self.test):
            raise UserError("`valid` and `test` need `train`")
        named = not self.train and self.corpus.startswith("tfds:")
        if not self.train and not named:
            parallel.parse_phrases_name(self.corpus)
        for field in ("direction", "data_dir"):
            if not named and getattr(self, field) is not None:
                raise UserError(f"`{field}` is for a corpus tfds:NAME")
        check_at_least(
            self, phrases=1, batch_tokens=1, buckets=1, beam_size=1, label_smoothing=0, bpe_dropout=0, r_drop=0
        )
        check_below_one(self, "label_smoothing", "bpe_dropout")
