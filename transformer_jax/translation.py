"""Training a translator from a config: corpus -> tokenizer -> batches -> loop -> averaged -> scores."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from transformer_jax import runs
from transformer_jax.data.tokenizer import BytePairTokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.evaluation.translation import bleu_signature, translation_scores
from transformer_jax.layers.dials import Dials
from transformer_jax.models.registry import TRANSLATORS
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.loop import fit
from transformer_jax.training.metrics import MetricsLog, read_metrics
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.schedules import extends, make_schedule
from transformer_jax.training.state import TrainState, create_state, make_train_step
from transformer_jax.training.translation_loss import model_loss, token_loss
from transformer_jax.translation_config import FREE_FIELDS, ResolvedConfig, TranslationConfig, resolve
from transformer_jax.translation_data import TranslationData, load_corpus, prepare

_log = logging.getLogger(__name__)

# Sentences whose greedy translations are scored while training; the loss is over all.
_TRANSLATED_WHILE_TRAINING = 200


_validation_loss = jax.jit(lambda model, batch: token_loss(model, batch, 0.0)[1:])


def _validate(model: Any, data: TranslationData, config: ResolvedConfig) -> Iterator[tuple[str, float]]:
    totals = [_validation_loss(model, batch) for batch in data.valid]
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


def _check_same_run(
    folder: pathlib.Path, stored: dict[str, Any], wanted: dict[str, Any], steps_done: int
) -> None:
    """That the config asked for is the one of the run that stands in the folder.

    Raises:
      UserError: another config, with the fields that differ; the run is left as it is.
    """
    # A run from before a field existed was trained with what is the field's default now.
    defaults = {
        field: _as_json(value) for field, value in dataclasses.asdict(resolve(TranslationConfig())).items()
    }
    old, new = defaults | stored["training"], wanted["training"]
    differ = [
        f"--{field.replace('_', '-')} is {old.get(field)!r} there, not {new[field]!r}"
        for field in new
        if field not in FREE_FIELDS and _as_json(new[field]) != old.get(field)
    ]
    differ += [
        f"its {field} differs"
        for field in ("model_config", "corpus_fingerprint")
        if stored[field] != wanted[field]
    ]
    if differ:
        raise UserError(
            f"{folder} holds a run of another config ({'; '.join(differ[:4])}): use the same flags to "
            "resume it, or name another --run-dir"
        )
    if new["steps"] > old["steps"] and not extends(old["schedule"]):
        raise UserError(
            f"{folder} was trained for {old['steps']} steps on a {old['schedule']} schedule, which ends there: "
            f"--steps {new['steps']} needs another --run-dir, or --schedule inverse_sqrt from the start"
        )
    least = steps_done if extends(old["schedule"]) else old["steps"]
    if new["steps"] < least:
        raise UserError(
            f"{folder} is a run of {least} steps: --steps {new['steps']} would cut it short; "
            "name another --run-dir"
        )


def _check_free(folder: pathlib.Path) -> None:
    """That a new run may be made in the folder: it is not there, or holds only an unfinished start.

    Raises:
      UserError: something else is there, or the folder cannot be read or written.
    """
    try:
        there = {p.name.removesuffix(".draft") for p in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another --run-dir") from None
    if there - {runs.TOKENIZER, runs.LENGTHS, runs.CONFIG}:
        raise UserError(f"{folder} exists and is not a run: name another --run-dir")
    # The folder could be looked at above, so its parents can.
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({parent} is no writable folder); name another --run-dir")


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def model_config(config: ResolvedConfig, vocab_size: int) -> Any:
    """The model that a training config asks for, with the vocabulary that its corpus gave."""
    changes: dict[str, Any] = dict(
        norm=config.norm, tie=config.tie, dtype=config.dtype, max_length=config.max_length
    )
    if config.dropout is not None:
        changes["dropout"] = config.dropout
    return TRANSLATORS[config.model].preset(config.preset, vocab_size, **changes)


class _Trainer:
    """The state of a run, restored from its checkpoints where it has some, and what trains it.

    Attributes:
      state: where training goes on; `train` gives its memory away.
      resumed: whether it comes from a checkpoint.
    """

    def __init__(self, config: ResolvedConfig, model: Any, data: TranslationData, checkpoints: Checkpoints):
        self.config, self.data, self.checkpoints = config, data, checkpoints
        self.schedule = make_schedule(
            config.schedule,
            peak=config.learning_rate,
            warmup=config.warmup,
            steps=config.steps,
        )
        self.optimizer = make_optimizer(
            config.optimizer, self.schedule, model,
            weight_decay=config.weight_decay, clip=config.clip, b1=0.9, b2=0.98, epsilon=1e-9,
        )  # fmt: skip
        # The parameters took the seed itself; the steps fold from another key.
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        state = create_state(model, self.optimizer, key, with_ema=config.ema > 0)
        restored = checkpoints.restore(state)
        self.resumed = restored is not None
        self.state = state if restored is None else restored

    def train(self, folder: pathlib.Path) -> Any:
        """Trains to the end, and saves and returns the parameters to use: an average of the run's."""
        config, step = self.config, int(self.state.step)
        if step == config.steps and self.checkpoints.step_of(runs.AVERAGED) == step:
            return self.checkpoints.restore_model(self.state.model, runs.AVERAGED)
        train_step = make_train_step(
            model_loss(self.config.label_smoothing, self.config.r_drop),
            self.optimizer,
            accumulation=config.accumulation,
            ema_decay=config.ema,
        )
        log = MetricsLog(folder, step)
        try:
            self.state = fit(
                self.state,
                train_step,
                self.data.train.from_step(step),
                steps=config.steps,
                schedule=self.schedule,
                log=log,
                checkpoints=self.checkpoints,
                save_every=config.save_every,
                evaluate=self._evaluate,
                evaluate_every=config.evaluate_every,
                best="valid_bleu",
            )
        finally:
            log.close()
        model = self.state.ema
        if model is None:
            last = self.checkpoints.scheduled_steps()[-config.average :]
            model = self.checkpoints.average(self.state.model, last)
        self.checkpoints.save_model(runs.AVERAGED, model, step=int(self.state.step))
        return model

    def _evaluate(self, state: TrainState) -> Iterator[tuple[str, float]]:
        return _validate(state.model if state.ema is None else state.ema, self.data, self.config)


def train_translator(
    config: TranslationConfig,
    run_dir: str | pathlib.Path,
    *,
    dials: Dials = Dials(),
    note: Callable[[str], None] = _log.info,
    started: float | None = None,
) -> dict[str, Any]:
    """Trains, resumes or extends a run, then scores it on the test split.

    Args:
      config: what to train on and how.
      run_dir: the run's folder; a run of the same config that stands there is continued.
      dials: how the model is computed.
      note: receives a line of text now and then.
      started: `time.perf_counter()` when the command started, for `seconds`.

    Returns:
      The contents of `results.json`, and under "translations" (source, translation, reference) of the
      test split.

    Raises:
      UserError: bad input, another run in the folder, a full disk, a diverging loss.
      Stopped: interrupted and saved.
    """
    started = time.perf_counter() if started is None else started
    return _train(resolve(config), pathlib.Path(run_dir), dials, note, started)


def _train(config: ResolvedConfig, folder: pathlib.Path, dials: Dials, note, started: float) -> dict[str, Any]:
    stored = runs.read_config(folder) if runs.is_run(folder) else None
    if stored is None:
        _check_free(folder)
    corpus = load_corpus(config)
    if stored is None:
        if not isinstance(corpus.train, list):
            note(f"learning the vocabulary of {len(corpus.train):,} pairs")
        texts = (text for pair in corpus.train for text in pair if text)
        tokenizer = BytePairTokenizer.train(texts, config.vocab_size)
    else:
        tokenizer = BytePairTokenizer.load(folder / runs.TOKENIZER)
    data = prepare(config, corpus, tokenizer, note, runs.read_lengths(folder))
    described_model = model_config(config, tokenizer.vocab_size)
    described = dict(
        format_version=runs.FORMAT_VERSION,
        model=config.model,
        model_config=dataclasses.asdict(described_model),
        corpus_fingerprint=corpus.fingerprint(),
        training=dataclasses.asdict(config),
    )
    if stored is not None:
        with Checkpoints(folder / runs.CHECKPOINTS) as checkpoints:
            _check_same_run(folder, stored, described, max(checkpoints.steps(), default=0))

    model = runs.make_model(config.model, described_model, seed=config.seed, dials=dials)
    parameters = model.parameter_count
    with Checkpoints(
        folder / runs.CHECKPOINTS, keep_last=config.average, save_every=config.save_every
    ) as checkpoints:
        trainer = _Trainer(config, model, data, checkpoints)
        del model  # the trainer's state owns it, and gives its memory to each step
        if trainer.resumed:
            note(f"resuming {folder} after step {int(trainer.state.step)}")
        if stored is None:
            # The config comes last: a folder with a config is a run that can be resumed.
            tokenizer.save(folder / runs.TOKENIZER)
            if not isinstance(corpus.train, list):
                # A corpus read from disk is not read through again each time that the run goes on.
                runs.write_lengths(folder, data.lengths)
            runs.write_json(folder / runs.CONFIG, described)
        else:
            changed = {name: getattr(config, name) for name in FREE_FIELDS}
            training = stored["training"] | changed
            if training != stored["training"]:
                runs.write_json(folder / runs.CONFIG, stored | {"training": training})
        shapes = ", ".join(f"{b.rows} x {b.length}" for b in data.train.buckets)
        note(f"{config.model} {config.preset}, {parameters:,} parameters, {config.batching} {shapes}")
        model = trainer.train(folder)
    from transformer_jax.plotting.curves import plot_losses  # matplotlib takes seconds to import

    rows = read_metrics(folder)
    try:
        plot_losses(rows, folder / "loss.png")
    except OSError as error:
        raise UserError(f"{folder / 'loss.png'}: cannot be written ({error}); free some space") from None
    return _score(model, data, config, folder, parameters, rows[-1] if rows else {}, started, note)


def _score(model, data: TranslationData, config: ResolvedConfig, folder, parameters, last, started, note):
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
        "parameters": parameters,
        "seconds": time.perf_counter() - started,
        "training_seconds": last.get("seconds", 0.0),
        "tokens_per_second": last.get("target_tokens", 0.0) / max(last.get("seconds", 0.0), 1e-9),
        "target_tokens": last.get("target_tokens", 0.0),
        "test_sentences": len(sources),
        "test_sentences_per_second": len(sources) / spent,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    runs.write_json(folder / runs.RESULTS, results)
    return results | {"translations": list(zip(sources, translations, references, strict=True))}
