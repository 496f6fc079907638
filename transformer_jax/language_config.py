"""What a language model's training is made of: every flag, its defaults, and which values can be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from transformer_jax.config_values import check_at_least, check_below_one, choose
from transformer_jax.errors import UserError
from transformer_jax.layers.position_schemes import SCHEMES
from transformer_jax.models.registry import DECODERS
from transformer_jax.training.optimizers import OPTIMIZERS
from transformer_jax.training.schedules import SCHEDULES


@dataclasses.dataclass(frozen=True)
class LanguageConfig:
    """A language model's training, from text to scores. A field that is None takes its model's value."""

    text: tuple[str, ...] = ()
    """Text to train on: files, or folders of .txt files, plain or .gz. None: --corpus."""
    valid: tuple[str, ...] = ()
    """Text to validate on, as --text; without it a tenth of the text is held out."""
    corpus: str = "python"
    """python, the language reference that ships with every Python, or tfds:NAME, any set of TensorFlow
    Datasets with texts. Ignored where --text names files."""
    splits: tuple[str, str] = ("train", "validation")
    """Training and validation split of a tfds: corpus, in its syntax: train[:98%] ..."""
    data_dir: str | None = None
    """Folder of TFDS's sets; None: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    tokenizer: str = "bpe"
    """char (a token for each character), bpe (byte-level, trained on the text), or the file of a published
    one: tokenizer.json, NAME.tiktoken, or a folder that holds tokenizer.json or vocab.json and merges.txt."""
    vocab_size: int = 1_024
    """Size of a vocabulary that is trained here."""
    packing: Literal["stream", "documents"] = "stream"
    """Rows are windows of one long stream, or whole documents that do not see each other."""
    model: str = "gpt"
    """Model of the zoo: gpt (GPT-2), llama, modern_gpt, lstm or gru."""
    preset: str = "mini"
    """Size of the model: mini, or another of its own (124M, 3.2-1B, small ...)."""
    positions: str | None = None
    """Of gpt: learned (GPT-2's), sinusoidal, rotary, alibi, bucketed, shaw or none; None: learned."""
    dropout: float | None = None
    """Dropout rate; None: the preset's, 0."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, softmax and loss stay float32."""
    context: int = 128
    """Tokens of a row T."""
    max_length: int | None = None
    """The longest text that the model takes; None: --context."""
    batch_size: int = 16
    """Rows of a batch B."""
    accumulation: int = 1
    """Cut each batch into this many micro-batches and add up their gradients: less memory, same result."""
    steps: int = 1_000
    """Training steps in all. A larger number extends a finished run, unless its schedule is cosine."""
    optimizer: str | None = None
    """adam (with decay) or muon; None: the model's, muon for modern_gpt."""
    learning_rate: float | None = None
    """Peak learning rate; None: the model's."""
    schedule: str = "cosine"
    """cosine, inverse_sqrt or constant, each after a linear warm-up."""
    warmup: int = 100
    """Warm-up steps."""
    weight_decay: float | None = None
    """Decoupled weight decay of the matrices; None: the model's."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 for no clipping."""
    ema: float = 0.0
    """Decay of an exponential moving average of the parameters, evaluated in their stead; 0 for none."""
    average: int = 1
    """Evaluate the mean of this many last checkpoints; 1 for the last alone."""
    save_every: int | None = None
    """Steps between checkpoints; None: a 10th of the run."""
    evaluate_every: int | None = None
    """Steps between validations, each with a sample; None: a 5th of the run."""
    sample: str | None = None
    """What samples begin with while training; None: the first words of the validation text."""
    sample_tokens: int = 48
    """Tokens of a sample; 0 for none."""
    seed: int = 0
    """Of the parameters, the order of the text, and dropout."""


class ResolvedLanguageConfig(LanguageConfig):
    """A config with every field filled and checked; made by `resolve_language`. What is of TFDS, and dropout,
    may still be None."""

    if TYPE_CHECKING:
        max_length: int
        optimizer: str
        learning_rate: float
        weight_decay: float
        save_every: int
        evaluate_every: int


# Fields that may differ between a run and the command that resumes it.
FREE_FIELDS = {"data_dir", "steps", "save_every", "evaluate_every", "sample", "sample_tokens"}

_LEARNING: dict[str, dict[str, Any]] = {
    "gpt": dict(optimizer="adam", learning_rate=3e-3, weight_decay=0.1),
    "llama": dict(optimizer="adam", learning_rate=3e-3, weight_decay=0.1),
    "modern_gpt": dict(optimizer="muon", learning_rate=5e-3, weight_decay=0.0),
    "lstm": dict(optimizer="adam", learning_rate=5e-3, weight_decay=0.0),
    "gru": dict(optimizer="adam", learning_rate=5e-3, weight_decay=0.0),
}


def resolve_language(config: LanguageConfig) -> ResolvedLanguageConfig:
    """The config with what it leaves open filled from its model.

    Raises:
      UserError: a value outside its choices or its range, or flags that contradict each other.
    """
    choose("model", config.model, tuple(DECODERS))
    steps = max(1, config.steps)
    values: dict[str, Any] = _LEARNING[config.model] | dict(
        max_length=config.context, save_every=max(1, steps // 10), evaluate_every=max(1, steps // 5)
    )
    given = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    resolved = ResolvedLanguageConfig(**(values | given))
    _check(resolved)
    return resolved


def _check(config: ResolvedLanguageConfig) -> None:
    choose("preset", config.preset, DECODERS[config.model].presets)
    choose("optimizer", config.optimizer, OPTIMIZERS)
    choose("schedule", config.schedule, SCHEDULES)
    if config.positions is not None:
        choose("positions", config.positions, SCHEMES)
    if config.positions is not None and config.model != "gpt":
        has = "the order of its steps" if config.model in ("lstm", "gru") else "rotary positions"
        raise UserError(f"--positions is of gpt: {config.model} has {has}")
    if config.valid and not config.text:
        raise UserError("--valid needs --text beside it")
    if not config.text and config.corpus != "python" and not config.corpus.startswith("tfds:"):
        raise UserError(
            f"unknown corpus {config.corpus!r}: write python or tfds:NAME, or name files with --text"
        )
    if not config.corpus.startswith("tfds:") and config.data_dir is not None:
        raise UserError("--data-dir is for a corpus tfds:NAME")
    check_at_least(
        config, steps=1, context=1, batch_size=1, accumulation=1, average=1, save_every=1, evaluate_every=1,
        learning_rate=0, clip=0, ema=0, weight_decay=0, warmup=0, seed=0, dropout=0, sample_tokens=0,
    )  # fmt: skip
    check_below_one(config, "ema", "dropout")
    if config.max_length < config.context:
        raise UserError(f"--max-length {config.max_length} is below --context {config.context}")
    if config.batch_size % config.accumulation:
        raise UserError(
            f"--batch-size {config.batch_size} is not a multiple of --accumulation {config.accumulation}"
        )
