"""What a translator's training is made of: every flag, its recipes, and which values can be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from transformer_jax.config_values import check_at_least, check_below_one, choose
from transformer_jax.data.corpora import parallel
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import check_bleu_tokenizer
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.recipes import COMMON, RECIPES
from transformer_jax.training.optimizers import OPTIMIZERS
from transformer_jax.training.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True)
class TranslationConfig:
    """A translator's training, from corpus to scores. A field that is None takes its recipe's value."""

    recipe: str | None = None
    """What the flags that are not given stand for: phrases, files, multi30k, wmt14-en-de-base,
    wmt14-en-de-big, wmt14-en-fr-base or wmt14-en-fr-big; None: phrases for the embedded corpus, else files."""
    corpus: str | None = None
    """phrases:SOURCE-TARGET, the embedded corpus in any two CLDR locales (de, fr, ja, ru, pt_BR ...), or
    tfds:NAME, a translation set of TensorFlow Datasets (tfds:wmt14_translate/de-en), downloaded where it
    is not on disk; None: the recipe's, phrases:en-de. Ignored where --train names files."""
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
    """Model of the zoo: transformer, lstm or gru (Sutskever et al. 2014), bahdanau, luong, or
    hard_attention (bahdanau that looks at one position at a time)."""
    preset: str | None = None
    """Size of the model: mini, tiny, small, base or big (the last two are the paper's); None: the
    recipe's, mini for the phrases and tiny for files."""
    hidden: int | None = None
    """Width of a recurrent model's cells; None: the preset's."""
    norm: Literal["post", "pre"] | None = None
    """Layer normalisation after each sub-layer (post, the paper) or before it (pre); None: the recipe's."""
    dropout: float | None = None
    """Dropout rate; None: the recipe's, or where it has none the preset's."""
    tie: Literal["all", "decoder", "none"] | None = None
    """Shared embedding matrices: source, target and logits (all, every recipe's), target and logits
    (decoder), none."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute dtype; parameters, softmax and loss stay float32. None: the recipe's, bfloat16 for wmt14."""
    vocab_size: int | None = None
    """Size of the shared BPE vocabulary; None: the recipe's, 1,500 for the phrases and 10,000 for files."""
    bpe_dropout: float | None = None
    """Rate at which merges of training words are left out at random (BPE-dropout); the paper's is 0.1.
    None: the recipe's, 0.1 for multi30k and 0 for others."""
    max_length: int | None = None
    """Longest sentence in tokens; None: the recipe's, 256 for wmt14 and 128 for others. Longer training
    pairs are left out and counted; longer test sources are cut and counted."""
    start_from: str | None = None
    """Folder of a finished run to start from: its parameters and its vocabulary, with a new optimizer and
    schedule. Goes on after the end of a cosine schedule, or fine-tunes on other pairs."""
    steps: int | None = None
    """Training steps in all; None: the recipe's. A larger number extends a finished run, unless its
    schedule is cosine."""
    batch_tokens: int | None = None
    """Padded tokens a side in one batch; None: the recipe's."""
    batching: Literal["buckets", "packed"] | None = None
    """Batches of sentences of about equal length (buckets), or of rows that each hold several sentences
    (packed: nearly no padding and one shape to compile); None: the recipe's."""
    buckets: int = 4
    """Number of length buckets, each compiled once. Packed batches have one shape."""
    accumulation: int = 1
    """Cut each batch into this many micro-batches and add up their gradients: less memory, same result."""
    optimizer: str | None = None
    """adam or muon; None: the recipe's."""
    learning_rate: float | None = None
    """Peak learning rate; None: the recipe's."""
    schedule: str | None = None
    """inverse_sqrt (the paper), cosine or constant, each after a linear warm-up; None: the recipe's."""
    warmup: int | None = None
    """Warm-up steps; None: the recipe's."""
    weight_decay: float | None = None
    """Decoupled weight decay of the matrices; None: the recipe's, 0.1 for multi30k and 0 for others."""
    label_smoothing: float | None = None
    """Probability spread over the vocabulary; None: the recipe's, 0 for the phrases and the paper's 0.1
    for others."""
    r_drop: float | None = None
    """Weight of the agreement of two passes with different dropout (R-Drop), which doubles a step; the
    paper's is 5. None: the recipe's, 0."""
    clip: float | None = None
    """Largest global norm of the gradient; 0 for no clipping. None: the recipe's."""
    ema: float = 0.0
    """Decay of an exponential moving average of the parameters, evaluated in their stead; 0 for none."""
    average: int | None = None
    """Evaluate the mean of this many last checkpoints; 1 for the last alone. None: the recipe's, 5 for
    most."""
    save_every: int | None = None
    """Steps between checkpoints; None: a 20th of the run, or fewer where the recipe says so."""
    evaluate_every: int | None = None
    """Steps between validations (loss, and BLEU of greedy translations); None: a 5th of the run, half of
    it for the phrases, or fewer where the recipe says so."""
    beam_size: int | None = None
    """Beam size of the test's translations, and with --text or --stdin of those; 1 is greedy. None: the
    recipe's; the run's own with --text or --stdin."""
    length_penalty: float | None = None
    """Exponent of the length penalty; None: the recipe's 0.6, or the run's own with --text or --stdin."""
    bleu_tokenize: str | None = None
    """sacreBLEU's tokenizer: 13a (the default) for plain text, none for tokenised text, zh, ja-mecab,
    char ..."""
    seed: int = 0
    """Of the parameters, the shuffling, dropout and the training phrases."""


class ResolvedConfig(TranslationConfig):
    """A config with every field filled and checked; made by `resolve`. Dropout may still be None, the
    preset's own, and so may what is of TFDS."""

    if TYPE_CHECKING:
        recipe: str
        corpus: str
        preset: str
        norm: Literal["post", "pre"]
        tie: Literal["all", "decoder", "none"]
        dtype: Literal["float32", "bfloat16"]
        vocab_size: int
        bpe_dropout: float
        weight_decay: float
        max_length: int
        steps: int
        batch_tokens: int
        batching: Literal["buckets", "packed"]
        optimizer: str
        learning_rate: float
        schedule: str
        warmup: int
        label_smoothing: float
        r_drop: float
        clip: float
        average: int
        save_every: int
        evaluate_every: int
        beam_size: int
        length_penalty: float
        bleu_tokenize: str


# Fields that may change on an existing run: they do not touch what was trained so far.
FREE_FIELDS = {
    "recipe",  # its values stand in the other fields
    "data_dir",
    "steps",
    "beam_size",
    "length_penalty",
    "bleu_tokenize",
    "save_every",
    "evaluate_every",
}


def resolve(config: TranslationConfig) -> ResolvedConfig:
    """The config with every None filled from its recipe, checked.

    Raises:
      UserError: a value that no run can have; nothing was written.
    """
    choose("model", config.model, tuple(TRANSLATORS))
    recipe = config.recipe
    if recipe is None:
        embedded = not config.train and (config.corpus or "phrases:").startswith("phrases:")
        recipe = "phrases" if embedded else "files"
    choose("recipe", recipe, tuple(RECIPES))
    values = COMMON | RECIPES[recipe].values
    named = not config.train and (config.corpus or values["corpus"]).startswith("tfds:")
    if not named:
        values |= {"direction": None}
        for field in ("direction", "data_dir"):
            if getattr(config, field) is not None:
                raise UserError(f"--{field.replace('_', '-')} is for a corpus tfds:NAME")
    steps = config.steps or values["steps"]
    # A recipe's own intervals are for its own number of steps: a shorter run saves as often.
    for field, share in (("save_every", 20), ("evaluate_every", 2 if recipe == "phrases" else 5)):
        values[field] = min(values.get(field, steps), max(1, steps // share))
    values["recipe"] = recipe
    if config.model != "transformer":
        # A step costs a recurrent model the same however many sentences take part in it.
        values["batching"] = "buckets"
        if config.norm is not None:
            raise UserError(f"--norm is of transformer: {config.model} has no layer normalisation")
    elif config.hidden is not None:
        raise UserError("--hidden is of recurrent models: the transformer's sizes are its preset's")
    if config.model == "hard_attention" and config.r_drop:
        raise UserError("--r-drop needs two passes that look at the same places: hard_attention draws them")
    given = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    resolved = ResolvedConfig(**(values | given))
    _check(resolved)
    return resolved


def _check(config: ResolvedConfig) -> None:
    choose("preset", config.preset, TRANSLATORS[config.model].presets)
    choose("optimizer", config.optimizer, OPTIMIZERS)
    choose("schedule", config.schedule, SCHEDULES)
    try:
        check_bleu_tokenizer(config.bleu_tokenize)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.train and not (config.valid and config.test):
        raise UserError("--train needs --valid and --test beside it: scores come from pairs not trained on")
    if not config.train and (config.valid or config.test):
        raise UserError("--valid and --test need --train beside them")
    if not config.train and not config.corpus.startswith("tfds:"):
        parallel.parse_phrases_name(config.corpus)
    check_at_least(
        config,
        steps=1, batch_tokens=1, buckets=1, accumulation=1, average=1, beam_size=1, save_every=1,
        evaluate_every=1, max_length=8, learning_rate=0, label_smoothing=0, clip=0, ema=0, weight_decay=0,
        warmup=0, phrases=1, seed=0, dropout=0, bpe_dropout=0, r_drop=0, hidden=1,
    )  # fmt: skip
    check_below_one(config, "label_smoothing", "ema", "dropout", "bpe_dropout")
