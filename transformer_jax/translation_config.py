"""What a translator's training is made of: every flag, its recipes, and which values can be."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, Literal

from transformer_jax.data import corpora
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import check_bleu_tokenizer
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.training.optimizers import OPTIMIZERS
from transformer_jax.training.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """A translator's training, from corpus to scores. A field that is None takes its recipe's value:
    one recipe for the embedded phrases, another for files."""

    corpus: str = "phrases:en-de"
    """phrases:SOURCE-TARGET, the embedded corpus in any two CLDR locales (de, fr, ja, ru, pt_BR ...), or
    tfds:NAME, a translation set of TensorFlow Datasets (tfds:wmt14_translate/de-en), downloaded where it
    is not on disk. Ignored where --train names files."""
    direction: str | None = None
    """SOURCE-TARGET languages of a tfds: corpus; None: in the set's own order."""
    splits: tuple[str, str, str] = ("train", "validation", "test")
    """Training, validation and test split of a tfds: corpus, in its syntax: train[:98%] ..."""
    data_dir: str | None = None
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    train: tuple[str, ...] = ()
    """Your own training pairs: two aligned text files (SRC TGT) or one tab-separated file; plain or .gz.
    --valid and --test are needed beside it."""
    valid: tuple[str, ...] = ()
    """Validation pairs, files as in --train."""
    test: tuple[str, ...] = ()
    """Test pairs, files as in --train."""
    phrases: int = 75_000
    """Number of training phrases drawn from the embedded corpus."""
    model: str = "transformer"
    """Model of the zoo: transformer."""
    preset: str | None = None
    """Size of the model: mini, tiny, small, base or big (the last two are the paper's); None: mini for
    the phrases, else tiny."""
    norm: Literal["post", "pre"] | None = None
    """Layer normalisation after each sub-layer (post, the paper) or before it (pre); None: pre for the
    phrases, post for files."""
    dropout: float | None = None
    """Dropout rate; None: 0 for the phrases, of which there are enough, else the preset's."""
    tie: Literal["all", "decoder", "none"] = "all"
    """Shared embedding matrices: source, target and logits (all), target and logits (decoder), none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, softmax and loss stay float32."""
    vocab_size: int | None = None
    """Size of the shared BPE vocabulary; None: 1,500 for the phrases, else 10,000."""
    bpe_dropout: float = 0.0
    """Rate at which merges of training words are left out at random (BPE-dropout); the paper's is 0.1."""
    max_length: int = 128
    """Longest sentence in tokens. Longer training pairs are left out and counted; longer test sources
    are cut and counted."""
    steps: int | None = None
    """Training steps in all; None: the recipe's. A larger number extends a finished run, unless its
    schedule is cosine."""
    batch_tokens: int | None = None
    """Padded tokens a side in one batch; None: 1,024 for the phrases, else 4,096."""
    batching: Literal["buckets", "packed"] | None = None
    """Batches of sentences of about equal length (buckets), or of rows that each hold several sentences
    (packed: nearly no padding and one shape to compile); None: packed for the phrases, else buckets."""
    buckets: int = 4
    """Number of length buckets, each compiled once. Packed batches have one shape."""
    accumulation: int = 1
    """Cut each batch into this many micro-batches and add up their gradients: less memory, same result."""
    optimizer: str | None = None
    """adam or muon; None: muon for the phrases, else adam."""
    learning_rate: float | None = None
    """Peak learning rate; None: the recipe's."""
    schedule: str | None = None
    """inverse_sqrt (the paper), cosine or constant, each after a linear warm-up; None: cosine for the
    phrases, else inverse_sqrt."""
    warmup: int | None = None
    """Warm-up steps; None: the recipe's."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices."""
    label_smoothing: float | None = None
    """Probability spread over the vocabulary; None: 0 for the phrases, else the paper's 0.1."""
    r_drop: float = 0.0
    """Weight of the agreement of two passes with different dropout (R-Drop), which doubles a step; the
    paper's is 5."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""
    ema: float = 0.0
    """Decay of an exponential moving average of the parameters, evaluated in their stead; 0 for none."""
    average: int = 5
    """Evaluate the mean of this many last checkpoints (the paper's 5); 1 for the last alone."""
    save_every: int | None = None
    """Steps between checkpoints; None: a 20th of the run."""
    evaluate_every: int | None = None
    """Steps between validations (loss, and BLEU of greedy translations); None: a 5th
    of the run, half of it for the phrases."""
    beam_size: int | None = None
    """Beam size of the test's translations, and with --text or --stdin of those; 1 is greedy. None: 1 for
    the phrases, else 4; the run's own with --text or --stdin."""
    length_penalty: float | None = None
    """Exponent of the length penalty; None: the paper's 0.6, or the run's own with --text or --stdin."""
    bleu_tokenize: str = "13a"
    """sacreBLEU's tokenizer: 13a for plain text, none for tokenised text, zh, ja-mecab, char ..."""
    seed: int = 0
    """Of the parameters, the shuffling, dropout and the training phrases."""


# What None stands for. The phrases' recipe is tuned for two CPU cores and four minutes; the other one
# follows the literature's tiny Transformer for Multi30k (Wu et al. 2021).
_RECIPES: dict[str, dict[str, Any]] = {
    "phrases": dict(
        preset="mini",
        norm="pre",
        dropout=0.0,
        vocab_size=1_500,
        steps=1_000,
        batch_tokens=1_024,
        batching="packed",
        optimizer="muon",
        learning_rate=8e-3,
        schedule="cosine",
        warmup=50,
        label_smoothing=0.0,
        beam_size=1,
        length_penalty=0.6,
    ),
    "files": dict(
        preset="tiny",
        norm="post",
        vocab_size=10_000,
        steps=20_000,
        batch_tokens=4_096,
        batching="buckets",
        optimizer="adam",
        learning_rate=5e-3,
        schedule="inverse_sqrt",
        warmup=2_000,
        label_smoothing=0.1,
        beam_size=4,
        length_penalty=0.6,
    ),
}

# Fields that may change on an existing run: they do not touch what was trained so far.
FREE_FIELDS = {
    "steps",
    "beam_size",
    "length_penalty",
    "bleu_tokenize",
    "save_every",
    "evaluate_every",
    "data_dir",
}


def resolve(config: TranslationConfig) -> TranslationConfig:
    """The config with every None filled from its recipe, checked.

    Raises:
      UserError: a value that no run can have; nothing was written.
    """

    def choose(field: str, value: str, choices: Sequence[str]) -> None:
        if value not in choices:
            near = difflib.get_close_matches(value, choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"unknown {field} {value!r}: choose one of {', '.join(choices)}{hint}")

    choose("model", config.model, tuple(TRANSLATORS))
    phrases = not config.train and config.corpus.startswith("phrases:")
    recipe = _RECIPES["phrases" if phrases else "files"]
    config = dataclasses.replace(
        config, **{name: value for name, value in recipe.items() if getattr(config, name) is None}
    )
    steps = config.steps or 0
    if config.save_every is None:
        config = dataclasses.replace(config, save_every=max(1, steps // 20))
    if config.evaluate_every is None:
        share = 2 if phrases else 5
        config = dataclasses.replace(config, evaluate_every=max(1, steps // share))
    choose("preset", str(config.preset), TRANSLATORS[config.model].presets)
    choose("optimizer", str(config.optimizer), OPTIMIZERS)
    choose("schedule", str(config.schedule), SCHEDULES)
    try:
        check_bleu_tokenizer(config.bleu_tokenize)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.train and not (config.valid and config.test):
        raise UserError("--train needs --valid and --test beside it: scores come from pairs not trained on")
    if not config.train and (config.valid or config.test):
        raise UserError("--valid and --test need --train beside them")
    if not config.train and not config.corpus.startswith("tfds:"):
        corpora.parse_phrases_name(config.corpus)
    if not config.corpus.startswith("tfds:"):
        for field in ("direction", "data_dir"):
            if getattr(config, field) is not None:
                raise UserError(f"--{field.replace('_', '-')} is for a corpus tfds:NAME, not {config.corpus}")
    least: dict[str, float] = dict(
        steps=1, batch_tokens=1, buckets=1, accumulation=1, average=1, beam_size=1, save_every=1,
        evaluate_every=1, max_length=8, learning_rate=0, label_smoothing=0, clip=0, ema=0, weight_decay=0,
        warmup=0, phrases=1, seed=0, dropout=0, bpe_dropout=0, r_drop=0,
    )  # fmt: skip
    for field, limit in least.items():
        if (value := getattr(config, field)) is not None and value < limit:
            raise UserError(f"--{field.replace('_', '-')} {getattr(config, field)} is below {limit}")
    for field in ("label_smoothing", "ema", "dropout", "bpe_dropout"):
        if (getattr(config, field) or 0) >= 1:
            raise UserError(f"--{field.replace('_', '-')} {getattr(config, field)} must be below 1")
    return config
