"""Training a translator from a config: corpus -> tokenizer -> batches -> loop -> averaged -> scores."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax import runs
from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.distributed.mesh import check_model, check_rows, mesh_of, on_mesh, place_batch, rows_here
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
from transformer_jax.evaluation.translation import bleu_signature, translation_scores
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.run_training import Trainer, check_same_run, first_tokenizer, machine, stored_config
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.hard_attention_loss import hard_attention_loss
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.step import Loss
from transformer_jax.training.step_watch import check_limit
from transformer_jax.training.translation_loss import model_loss, token_loss
from transformer_jax.translation_config import FREE_FIELDS, ResolvedConfig, TranslationConfig, resolve
from transformer_jax.translation_data import TranslationData, load_corpus, prepare

_log = logging.getLogger(__name__)

# The paper's constants (section 5.3).
ADAM: dict[str, float] = dict(b1=0.9, b2=0.98, epsilon=1e-9)

# Sentences whose greedy translations are scored while training; the loss is over all.
_TRANSLATED_WHILE_TRAINING = 200


_validation_loss = jax.jit(lambda model, batch: token_loss(model, batch, 0.0)[1:])


def _validate(
    model: Any, data: TranslationData, config: ResolvedConfig, mesh: Mesh | None
) -> Iterator[tuple[str, float]]:
    totals = [_validation_loss(model, place_batch(batch, mesh)) for batch in data.valid]
    likelihood = sum(float(total) for total, _ in totals)
    loss = likelihood / max(1.0, sum(float(weight) for _, weight in totals))
    yield "valid_loss", loss
    yield "valid_perplexity", float(np.exp(min(loss, 80.0)))
    some = data.corpus.valid[:_TRANSLATED_WHILE_TRAINING]
    translated = Translator(model, data.tokenizer, beam_size=1)([p.source for p in some], truncate=True)
    for name, value in translation_scores(
        translated, [p.target for p in some], bleu_tokenize=config.bleu_tokenize
    ):
        yield f"valid_{name}", value


def model_config(config: ResolvedConfig, vocab_size: int) -> Any:
    """The model that a training config asks for, with the vocabulary that its corpus gave."""
    changes: dict[str, Any] = dict(tie=config.tie, dtype=config.dtype, max_length=config.max_length)
    if config.model == "transformer":
        changes["norm"] = config.norm
    if config.hidden is not None:
        changes["hidden"] = config.hidden
    if config.dropout is not None:
        changes["dropout"] = config.dropout
    return TRANSLATORS[config.model].preset(config.preset, vocab_size, **changes)


def check_start(folder: pathlib.Path, config: ResolvedConfig) -> None:
    """That the run to start from is a translator of the model that is to be trained.

    Raises:
      UserError: no run, or one of another model, with the fields that differ.
    """
    stored = runs.read_config(folder)
    if stored["model"] != config.model or stored.get("task", "translation") != "translation":
        raise UserError(f"--start-from {folder} holds a {stored['model']}, not a translator {config.model}")
    there = stored["model_config"]
    wanted = dataclasses.asdict(model_config(config, there["vocab_size"]))
    # Neither changes what the parameters mean.
    differ = [
        f"{name} is {there.get(name)!r} there, not {value!r}"
        for name, value in wanted.items()
        if name not in ("dropout", "dtype", "max_length") and there.get(name, value) != value
    ]
    if differ:
        raise UserError(f"--start-from {folder} holds another model: {'; '.join(differ[:4])}")


def loss_of(config: ResolvedConfig) -> Loss:
    """The loss that a config trains on."""
    if config.model == "hard_attention":
        return hard_attention_loss(config.label_smoothing)
    return model_loss(config.label_smoothing, config.r_drop)


def train_translator(
    config: TranslationConfig,
    run_dir: str | pathlib.Path,
    *,
    compute: ComputeOptions = ComputeOptions(),
    mesh: str | None = None,
    step_timeout: float | None = None,
    note: Callable[[str], None] = _log.info,
    started: float | None = None,
) -> dict[str, Any]:
    """Trains, resumes or extends a run, then scores it on the test split.

    Args:
      config: what to train on and how.
      run_dir: the run's folder; a run of the same config that stands there is continued.
      compute: how the model is computed.
      mesh: that the run is spread over, as "data=2,fsdp=4", see `make_mesh`; None is one device, or all devices
        of several processes. It may be another each time that the run goes on.
      step_timeout: seconds that a step may take; None is half an hour where there are several processes, and
        no limit for one.
      note: receives a line of text now and then, in the first process.
      started: `time.perf_counter()` when the command started, for `seconds`.

    Returns:
      The contents of `results.json`, and under "translations" (source, translation, reference) of the
      test split.

    Raises:
      UserError: bad input, another run in the folder, a full disk, a diverging loss.
      Stopped: interrupted and saved.
    """
    started = time.perf_counter() if started is None else started
    resolved, devices = on_every_process(lambda: (resolve(config), mesh_of(mesh)))
    on_every_process(lambda: check_limit(step_timeout))
    if devices is not None:
        on_every_process(lambda: check_model(model_config(resolved, resolved.vocab_size), devices))
    with on_mesh(devices), reporting_lost_process():
        note = note if is_first() else (lambda line: None)
        return _train(resolved, pathlib.Path(run_dir), compute, devices, step_timeout, note, started)


def _train(
    config: ResolvedConfig,
    folder: pathlib.Path,
    compute: ComputeOptions,
    mesh: Mesh | None,
    step_timeout: float | None,
    note: Callable[[str], None],
    started: float,
) -> dict[str, Any]:
    stored = stored_config(folder)
    corpus = on_first_then_every_process(lambda: load_corpus(config))
    start = None if config.start_from is None else pathlib.Path(config.start_from)

    def make_tokenizer() -> BytePairTokenizer:
        if stored is not None:
            return BytePairTokenizer.load(folder / runs.TOKENIZER)
        if start is not None:
            check_start(start, config)
            return BytePairTokenizer.load(start / runs.TOKENIZER)
        if not isinstance(corpus.train, list):
            note(f"learning the vocabulary of {len(corpus.train):,} pairs")
        texts = (text for pair in corpus.train for text in pair if text)
        return BytePairTokenizer.train(texts, config.vocab_size)

    tokenizer = first_tokenizer(BytePairTokenizer, make_tokenizer)
    data = on_every_process(lambda: prepare(config, corpus, tokenizer, note, runs.read_lengths(folder)))
    described_model = model_config(config, tokenizer.vocab_size)
    fewest = min(bucket.rows for bucket in data.train.buckets) // config.accumulation
    on_every_process(lambda: check_rows(fewest, mesh, "--batch-tokens", whole=False))
    described = dict(
        format_version=runs.FORMAT_VERSION,
        task="translation",
        model=config.model,
        model_config=dataclasses.asdict(described_model),
        corpus_fingerprint=corpus.fingerprint(),
        training=dataclasses.asdict(config),
    )
    where = {} if mesh is None else dict(mesh.shape)
    check_same(described | {"mesh": where, "run_dir": str(folder), "compute": dataclasses.asdict(compute)})
    if stored is not None:
        with Checkpoints(folder / runs.CHECKPOINTS) as checkpoints:
            done = max(checkpoints.steps(), default=0)
        defaults = dataclasses.asdict(resolve(TranslationConfig()))
        broadcast_from_first(
            lambda: check_same_run(folder, stored, described, done, defaults=defaults, free=FREE_FIELDS)
        )

    model = runs.make_model(described_model, seed=config.seed, compute=compute, mesh=mesh)
    parameters = model.parameter_count
    with Checkpoints(
        folder / runs.CHECKPOINTS, keep_last=config.average, save_every=config.save_every
    ) as checkpoints:
        if start is not None and not checkpoints.steps():
            model, weights = runs.trained_parameters(start, model)
            note(f"starting from {start}, {weights}")
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
            if not isinstance(corpus.train, list):
                # A corpus read from disk is not read through again each time that the run goes on.
                runs.write_lengths(folder, data.lengths)
            runs.write_json(folder / runs.CONFIG, described)

        broadcast_from_first(write_config)
        on_every_process(lambda: runs.read_config(folder))  # a folder that one process does not see is no run's
        shapes = ", ".join(f"{b.rows} x {b.length}" for b in data.train.buckets)
        note(f"{config.model} {config.preset}, {parameters:,} parameters, {config.batching} {shapes}")
        for line in describe_sharding(trainer.state, mesh):
            note(line)
        model = trainer.train(
            folder,
            data.train.share(lambda rows: rows_here(rows, mesh, micro_batches=config.accumulation)).from_step,
            loss_of(config),
            lambda model: _validate(model, data, config, mesh),
            best="valid_bleu",
            step_timeout=step_timeout,
        )
    last = broadcast_from_first(lambda: runs.draw_losses(folder, read_metrics(folder)))
    results, translations = _score(model, data, config, last, note)
    results |= {"parameters": parameters, "seconds": time.perf_counter() - started} | machine(mesh)
    broadcast_from_first(lambda: runs.write_json(folder / runs.RESULTS, results))
    return results | {"translations": translations}


def _score(model, data: TranslationData, config: ResolvedConfig, last: dict[str, Any], note):
    """(what `results.json` says of the run, (source, translation, reference) of the test split)."""
    translator = Translator(model, data.tokenizer, beam_size=config.beam_size, alpha=config.length_penalty)
    sources, references = [p.source for p in data.corpus.test], [p.target for p in data.corpus.test]
    cut = sum(len(ids) > translator.max_source for ids in data.tokenizer.encode(sources))
    if cut:
        note(f"{cut} test source(s) are longer than {translator.max_source} tokens and were cut there")
    began = time.perf_counter()
    translations = translator(sources, truncate=True)
    spent = time.perf_counter() - began
    scores = dict(translation_scores(translations, references, bleu_tokenize=config.bleu_tokenize))
    results = scores | {
        "signature": bleu_signature(references, config.bleu_tokenize),
        "steps": config.steps,
        "training_seconds": last.get("seconds", 0.0),
        "tokens_per_second": last.get("target_tokens", 0.0) / max(last.get("seconds", 0.0), 1e-9),
        "target_tokens": last.get("target_tokens", 0.0),
        "test_sentences": len(sources),
        "test_sentences_per_second": len(sources) / spent,
        "skipped_steps": last.get("skipped_steps", 0),
    }
    return results, list(zip(sources, translations, references, strict=True))
