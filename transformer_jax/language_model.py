"""Training a language model from a config: text -> tokenizer -> rows of tokens -> loop -> scores."""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax import runs
from transformer_jax.data.batches.token_batches import (
    Batch,
    PackedDocuments,
    Rows,
    StreamWindows,
    TokenBatches,
    TokenizedDocuments,
    validation_windows,
)
from transformer_jax.data.corpora import texts
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.text_generation import TextGenerator
from transformer_jax.distributed.mesh import (
    check_model,
    check_rows,
    check_tokens,
    mesh_of,
    on_mesh,
    place_batch,
    rows_here,
)
from transformer_jax.distributed.processes import (
    broadcast_from_first,
    check_same,
    is_first,
    on_every_process,
    on_first_then_every_process,
    reporting_lost_process,
)
from transformer_jax.distributed.sharding import describe_sharding
from transformer_jax.errors import UserError
from transformer_jax.language_config import (
    FREE_FIELDS,
    LanguageConfig,
    ResolvedLanguageConfig,
    resolve_language,
)
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import DECODERS
from transformer_jax.run_training import Trainer, check_same_run, first_tokenizer, machine, stored_config
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.language_loss import language_loss, next_token_loss
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.step_watch import check_limit

_log = logging.getLogger(__name__)

# The constants of GPT-3 (Brown et al. 2020, appendix B).
ADAM: dict[str, float] = dict(b1=0.9, b2=0.95, epsilon=1e-8)

# Tokens of the validation text that a sample begins with, where no other beginning is named.
_SAMPLE_PROMPT = 4

_validation_loss = jax.jit(next_token_loss)


def load_texts(config: ResolvedLanguageConfig) -> texts.TextCorpus:
    """The documents that a resolved config names.

    Raises:
      UserError: see `files_corpus` and `tfds_corpus`.
    """
    if config.text:
        return texts.files_corpus(config.text, config.valid)
    if config.corpus.startswith("tfds:"):
        return texts.tfds_corpus(config.corpus, config.splits, config.data_dir)
    return texts.python_reference()


def make_tokenizer(config: ResolvedLanguageConfig, corpus: texts.TextCorpus) -> TextTokenizer:
    """The tokenizer that a config names, trained on the corpus where it is "char" or "bpe".

    Raises:
      UserError: see `TextTokenizer`.
    """
    if config.tokenizer == "char":
        # Of both splits: a character that only the validation text has must be readable.
        return TextTokenizer.characters([*corpus.train, *corpus.valid])
    if config.tokenizer == "bpe":
        return TextTokenizer.byte_pairs(corpus.train, config.vocab_size)
    return TextTokenizer.open(config.tokenizer)


def model_config(config: ResolvedLanguageConfig, vocab_size: int) -> Any:
    """The model that a training config asks for, with the vocabulary of its tokenizer."""
    changes: dict[str, Any] = dict(max_length=config.max_length, dtype=config.dtype)
    for field in ("dropout", "positions"):
        if getattr(config, field) is not None:
            changes[field] = getattr(config, field)
    return DECODERS[config.model].preset(config.preset, vocab_size, **changes)


def evaluate(
    model: Any, batches: list[Batch], text_bytes: int, mesh: Mesh | None = None
) -> Iterator[tuple[str, float]]:
    """Scores of a model on tokens that are each predicted once.

    Args:
      model: a causal decoder.
      batches: from `validation_windows` or `TokenBatches`.
      text_bytes: size of their text in UTF-8.
      mesh: that the model lies on, or None.

    Yields:
      (name, value): `valid_loss` in nats a token, `valid_perplexity`, and `valid_bits_per_byte`, which
      compares between tokenizers.
    """
    totals = [_validation_loss(model, place_batch(batch, mesh)) for batch in batches]
    likelihood = sum(float(total) for total, _ in totals)
    loss = likelihood / max(1.0, sum(float(weight) for _, weight in totals))
    yield "valid_loss", loss
    yield "valid_perplexity", math.exp(min(loss, 80.0))
    yield "valid_bits_per_byte", likelihood / math.log(2) / max(1, text_bytes)


def _one_epoch(rows: Rows, batch_size: int) -> list[Batch]:
    """Every row once, in order; the last batch is filled up with rows of weight 0."""
    order = np.sort(rows.epoch(np.random.default_rng(0)))
    batches = []
    for begin in range(0, len(order), batch_size):
        own = order[begin : begin + batch_size]
        batch = rows.batch(np.resize(own, batch_size))
        batch["weights"][len(own) :] = 0
        batches.append(batch)
    return batches


def _sample_of(
    config: ResolvedLanguageConfig, tokenizer: TextTokenizer, valid: TokenizedDocuments
) -> tuple[str, int]:
    """What samples begin with, and how many tokens they have; 0 where none are made.

    Raises:
      UserError: a beginning that the tokenizer cannot read.
    """
    begin = config.sample
    if begin is None:
        (begin,) = tokenizer.decode([valid.tokens[:_SAMPLE_PROMPT].tolist()])
    try:
        (ids,) = tokenizer.encode_prompts([begin])
    except UserError as error:
        raise UserError(f"--sample: {error}") from None
    return begin, min(config.sample_tokens, config.max_length - len(ids)) if begin and ids else 0


def train_language_model(
    config: LanguageConfig,
    run_dir: str | pathlib.Path,
    *,
    compute: ComputeOptions = ComputeOptions(),
    mesh: str | None = None,
    step_timeout: float | None = None,
    note: Callable[[str], None] = _log.info,
    started: float | None = None,
) -> dict[str, Any]:
    """Trains, resumes or extends a run, then scores it on the validation text.

    Args:
      config: what to train on and how.
      run_dir: the run's folder; a run of the same config that stands there is continued.
      compute: how the model is computed.
      mesh: that the run is spread over, as "data=2,fsdp=4", see `make_mesh`; None is one device, or all devices
        of several processes. It may be another each time that the run goes on.
      step_timeout: seconds that a step may take; None is half an hour where there are several processes, and
        no limit for one.
      note: receives a line of text now and then, samples among them, in the first process.
      started: `time.perf_counter()` when the command started, for `seconds`.

    Returns:
      The contents of `results.json`, and under "sample" a text of the trained model.

    Raises:
      UserError: bad input, another run in the folder, a full disk, a diverging loss.
      Stopped: interrupted and saved.
    """
    started = time.perf_counter() if started is None else started
    resolved, devices = on_every_process(lambda: (resolve_language(config), mesh_of(mesh)))
    on_every_process(lambda: check_limit(step_timeout))
    if devices is not None:

        def check(mesh: Mesh) -> None:
            check_model(model_config(resolved, resolved.vocab_size), mesh)
            check_rows(resolved.batch_size // resolved.accumulation, mesh, "--batch-size", whole=True)
            check_tokens(resolved.context, mesh, "--context")

        on_every_process(lambda: check(devices))
    with on_mesh(devices), reporting_lost_process():
        note = note if is_first() else (lambda line: None)
        return _train(resolved, pathlib.Path(run_dir), compute, devices, step_timeout, note, started)


def _train(
    config: ResolvedLanguageConfig,
    folder: pathlib.Path,
    compute: ComputeOptions,
    mesh: Mesh | None,
    step_timeout: float | None,
    note: Callable[[str], None],
    started: float,
) -> dict[str, Any]:
    stored = stored_config(folder)
    corpus = on_first_then_every_process(lambda: load_texts(config))

    def check_text() -> None:
        if stored is not None and stored["corpus_fingerprint"] != corpus.fingerprint():
            raise UserError(
                f"{folder} holds a run on another text: use the same one to resume it, or another --run-dir"
            )

    on_every_process(check_text)

    def own_tokenizer() -> TextTokenizer:
        if stored is not None:
            return TextTokenizer.load(folder / runs.TOKENIZER)
        return make_tokenizer(config, corpus)

    tokenizer = first_tokenizer(TextTokenizer, own_tokenizer)
    train, valid = (TokenizedDocuments(split, tokenizer) for split in (corpus.train, corpus.valid))
    valid_stream = valid.stream()
    rows: Rows
    if config.packing == "documents":
        rows = PackedDocuments(train, config.context, config.seed)
        valid_batches = _one_epoch(PackedDocuments(valid, config.context, config.seed), config.batch_size)
    else:
        rows = StreamWindows(train.stream(), config.context)
        valid_batches = list(validation_windows(valid_stream, config.context, config.batch_size))
    here = rows_here(config.batch_size, mesh, micro_batches=config.accumulation)
    batches = TokenBatches(rows, config.batch_size, config.seed).share(here)
    described_model = model_config(config, tokenizer.vocab_size)
    described = dict(
        format_version=runs.FORMAT_VERSION,
        task="language",
        model=config.model,
        model_config=dataclasses.asdict(described_model),
        corpus_fingerprint=corpus.fingerprint(),
        training=dataclasses.asdict(config),
    )
    note(
        f"{len(train.tokens):,} tokens of {len(corpus.train):,} document(s) for training, "
        f"{len(valid.tokens):,} of {len(corpus.valid):,} for validation, vocabulary {tokenizer.vocab_size:,}"
    )
    where = {} if mesh is None else dict(mesh.shape)
    check_same(described | {"mesh": where, "run_dir": str(folder), "compute": dataclasses.asdict(compute)})
    if stored is not None:
        with Checkpoints(folder / runs.CHECKPOINTS) as checkpoints:
            done = max(checkpoints.steps(), default=0)
        defaults = dataclasses.asdict(resolve_language(LanguageConfig()))
        broadcast_from_first(
            lambda: check_same_run(folder, stored, described, done, defaults=defaults, free=FREE_FIELDS)
        )

    begin, most = _sample_of(config, tokenizer, valid)

    def sample(model: Any) -> str:
        """A text of the model, or "" where none is asked for."""
        if most < 1:
            return ""
        return TextGenerator(model, tokenizer)([begin], max_new_tokens=most, seed=config.seed)[0][0].text

    def validate(model: Any) -> Iterator[tuple[str, float]]:
        yield from evaluate(model, valid_batches, valid.text_bytes, mesh)
        if text := sample(model):
            note("sample: " + " ".join(text.split()))

    model = runs.make_model(described_model, seed=config.seed, compute=compute, mesh=mesh)
    parameters = model.parameter_count
    with Checkpoints(
        folder / runs.CHECKPOINTS, keep_last=config.average, save_every=config.save_every
    ) as checkpoints:
        trainer = Trainer(config, model, checkpoints, mesh=mesh, **ADAM)
        del model  # the trainer's state owns it, and gives its memory to each step
        if trainer.resumed:
            note(f"resuming {folder} after step {int(trainer.state.step)}")

        def write_config() -> None:
            if stored is not None:
                runs.keep_changes(folder, stored, {name: getattr(config, name) for name in FREE_FIELDS})
                return
            # The config comes last: a folder with a config is a run that can be resumed.
            tokenizer.save(folder / runs.TOKENIZER)
            runs.write_json(folder / runs.CONFIG, described)

        broadcast_from_first(write_config)
        on_every_process(lambda: runs.read_config(folder))  # a folder that one process does not see is no run's
        note(
            f"{config.model} {config.preset}, {parameters:,} parameters, {config.packing} "
            f"{config.batch_size} x {config.context}"
        )
        for line in describe_sharding(trainer.state, mesh):
            note(line)
        model = trainer.train(
            folder,
            batches.from_step,
            language_loss(),
            validate,
            best="valid_loss",
            lower_is_better=True,
            step_timeout=step_timeout,
        )
    scores = dict(evaluate(model, valid_batches, valid.text_bytes, mesh))
    last = broadcast_from_first(lambda: runs.draw_losses(folder, read_metrics(folder)))
    results = {
        "validation_loss": scores["valid_loss"],
        "perplexity": scores["valid_perplexity"],
        "bits_per_byte": scores["valid_bits_per_byte"],
        "tokens_per_second": last.get("target_tokens", 0.0) / max(last.get("seconds", 0.0), 1e-9),
        "tokens": last.get("target_tokens", 0.0),
        "parameters": parameters,
        "steps": config.steps,
        "seconds": time.perf_counter() - started,
        "training_seconds": last.get("seconds", 0.0),
        "skipped_steps": last.get("skipped_steps", 0),
    } | machine(mesh)
    broadcast_from_first(lambda: runs.write_json(folder / runs.RESULTS, results))
    return results | {"sample": sample(model)}
