"""Speech recognition: an encoder-decoder on spectrograms, with a second loss on the encoder alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax.data.batches.row_batches import RowBatches
from transformer_jax.data.batches.spoken_batches import (
    SpeechAugmentation,
    SpokenViews,
    as_integers,
    join_recordings,
)
from transformer_jax.data.corpora.audio_files import SAMPLE_RATE
from transformer_jax.data.corpora.held_out import sample_rows
from transformer_jax.data.corpora.recordings import Recordings
from transformer_jax.data.corpora.tables import fingerprint
from transformer_jax.data.tokenizers.speech_processor import SpeechProcessor
from transformer_jax.decoding.transcripts import Transcriber
from transformer_jax.distributed.mesh import place_batch, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.transcripts import transcript_scores
from transformer_jax.layers.log_mel import log_mel
from transformer_jax.layers.losses import cross_entropy_in_parts
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.tasks.speech.data import SpeechRecognitionConfig, open_splits
from transformer_jax.tasks.speech.trained import TrainedRecognizer
from transformer_jax.training.config import RunConfig, check_accumulation
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization, fine_tuned_start, preset_config
from transformer_jax.training.task import Files, TaskEntry, processor_of, shared_processor
from transformer_jax.training.totals import Totals

KIND = "speech_recognizer"
# Number of validation recordings to transcribe during training; the loss uses all.
_TRANSCRIBED_WHILE_TRAINING = 200


def _config_of(
    task: SpeechRecognitionConfig, model: str, preset: str, steps: int, learning_rate: float, recipe: str
) -> RunConfig:
    config = preset_config(KIND, model, preset)
    if not config.ctc:
        task = dataclasses.replace(task, search="attention")
    optimization = cosine_optimization(steps, b2=0.98, learning_rate=learning_rate)
    return RunConfig(task=task, model=config, optimization=optimization, recipe=recipe, preset=preset)


def digits(*, model: str = "whisper", preset: str = "mini", steps: int = 320) -> RunConfig:
    """Train on synthesized digits, two minutes on a CPU."""
    return _config_of(SpeechRecognitionConfig(batch_size=16), model, preset, steps, 3e-3, "digits")


def recordings(*, model: str = "whisper", preset: str = "mini", steps: int = 2_000) -> RunConfig:
    """Train on your own recordings with transcripts.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
    """
    task = SpeechRecognitionConfig(batch_size=16, speed=0.15, pitch=0.1, noise=0.1, masks=1)
    return _config_of(task, model, preset, steps, 3e-3, "recordings")


def fine_tune(*, start: tuple[str, ...] = (), steps: int = 1_000) -> RunConfig:
    """Fine-tune a trained or published speech recognizer on your own recordings.

    Args:
      start: Folder of the model.
      steps: Number of training steps.

    Raises:
      UserError: `start` is empty or holds another model.
    """
    starts, _, model = fine_tuned_start(start, KIND)
    task = SpeechRecognitionConfig(batch_size=16, speed=0.1, search="ctc" if model.ctc else "attention")
    optimization = cosine_optimization(steps, b2=0.98, learning_rate=1e-4)
    return RunConfig(task=task, model=model, optimization=optimization, recipe="fine_tune", start=starts)


def mask_bands(spectrograms: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """Mask random bands of spectrograms (B, frames, bins) by their mean (SpecAugment, Park et al. 2019).

    Args:
      spectrograms: The spectrograms.
      count: Number of bands in each direction; a band covers at most a fifth of the mel bands or a tenth of the
        frames.
      key: Random key.
    """
    B, frames, bins = spectrograms.shape
    hidden = jnp.zeros((B, frames, bins), bool)
    for axis, (size, share) in enumerate(((frames, 10), (bins, 5))):
        for number in range(count):
            width_key, start_key = jax.random.split(jax.random.fold_in(key, 2 * number + axis))
            width = jax.random.randint(width_key, (B, 1), 0, max(size // share, 1) + 1)
            start = jax.random.randint(start_key, (B, 1), 0, size)
            index = jnp.arange(size)
            band = (index >= start) & (index < start + width)
            hidden |= jnp.expand_dims(band, 2 - axis)
    return jnp.where(hidden, spectrograms.mean(axis=(1, 2), keepdims=True), spectrograms)


class SpeechLoss(Objective):
    """Cross-entropy of each token of a transcript, and the CTC loss of the encoder (Watanabe et al. 2017).

    Args:
      config: Config of the task.
      mel_bins: Number of mel bands.
    """

    def __init__(self, config: SpeechRecognitionConfig, mel_bins: int):
        self._config, self._mel_bins = config, mel_bins

    def losses(self, model: Any, batch: dict[str, jax.Array], key: jax.Array | None) -> tuple[jax.Array, ...]:
        """Return sums over a batch: smoothed loss, negative log-likelihood, CTC loss, and number of tokens.

        Args:
          model: A speech recognizer.
          batch: `sounds` (B, n) int16, `tokens` (B, T), transcripts between control tokens and the end token;
            `lengths` (B,); `prompts` (B,) numbers of control tokens; `weight` (B,).
          key: Random key of dropout and masks; None disables them.
        """
        tokens, lengths = batch["tokens"], batch["lengths"]
        B, T = tokens.shape
        spectrograms = log_mel(batch["sounds"].astype(jnp.float32) / 32_768, self._mel_bins)
        encoder_key = decoder_key = None
        if key is not None:
            mask_key, encoder_key, decoder_key = jax.random.split(key, 3)
            if self._config.masks:
                spectrograms = mask_bands(spectrograms, self._config.masks, mask_key)
        memory = model.encode(spectrograms, dropout_key=encoder_key)
        states = model.decoder.hidden_states(tokens[:, :-1], memory=memory, dropout_key=decoder_key)
        index = jnp.arange(T)
        # Control tokens are given, so only what follows them is predicted.
        predicted = (index < lengths[:, None]) & (index >= batch["prompts"][:, None])
        weights = predicted[:, 1:] * batch["weight"][:, None]
        parts = model.compute.loss_parts_of(B, T - 1, model.config.vocab_size)
        smoothing = self._config.label_smoothing if key is not None else 0.0
        total, likelihood, weight = cross_entropy_in_parts(
            model.logits, states, tokens[:, 1:], weights, smoothing, parts=parts
        )
        ctc = jnp.zeros(())
        if model.config.ctc:
            logits = model.ctc_logits(memory)
            spoken = predicted & (index < lengths[:, None] - 1)
            # The labels of a row start with its transcript.
            order = jnp.argsort(~spoken, axis=1, stable=True)
            labels, padding = (jnp.take_along_axis(x, order, axis=1) for x in (tokens, ~spoken))
            rows = optax.ctc_loss(
                logits, jnp.zeros(logits.shape[:2]), labels, padding.astype(jnp.float32),
                blank_id=logits.shape[-1] - 1,
            )  # fmt: skip
            ctc = (rows * batch["weight"]).sum()
        return total, likelihood, ctc, weight

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss, the negative log-likelihood and the CTC loss."""
        total, likelihood, ctc, weight = self.losses(model, batch, key)
        share = self._config.ctc_weight if model.config.ctc else 0.0
        sums = {"loss": (1 - share) * total + share * ctc, "nll": likelihood, "ctc": ctc}
        return sums, dict.fromkeys(sums, weight)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    check_accumulation(config.task.batch_size, config.optimization)
    if config.task.search == "ctc" and not model_config.ctc:
        raise UserError("`search` ctc needs a model with `ctc`: use `search` attention")
    return SpeechLoss(config.task, model_config.mel_bins)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    B, model = config.task.batch_size, config.model
    return {
        "sounds": jax.ShapeDtypeStruct((B, SAMPLE_RATE // 100 * model.max_frames), jnp.int16),
        "tokens": jax.ShapeDtypeStruct((B, model.max_length), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
        "prompts": jax.ShapeDtypeStruct((B,), jnp.int32),
        "weight": jax.ShapeDtypeStruct((B,), jnp.float32),
    }


class SpeechRecognition:
    """A speech recognition task with its recordings loaded, a `training.task.Task`."""

    best: tuple[str, Literal["min", "max"]] = ("valid_word_error_rate", "min")
    unit = "tokens"

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[Recordings],
        processor: SpeechProcessor,
        loss: SpeechLoss,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: SpeechRecognitionConfig = config.task
        self._settings, self._mesh, self._note = task, mesh, note
        self.processor = processor
        changes = {} if config.start else {"vocab_size": processor.vocab_size}
        self.model_config = dataclasses.replace(config.model, **changes)
        self.files: Files = {}
        self.fingerprint = fingerprint([split.fingerprint() for split in splits])
        train, valid, test = splits
        self._prefix = processor.prefix(language=task.language or None)
        train = self._within_window(train, "training")
        encoded = processor.encode(train.transcripts, self._prefix)
        if encoded.truncated:
            note(
                f"{encoded.truncated:,} of {len(train):,} transcripts for training are truncated to "
                f"{processor.settings.max_length} tokens; a larger `max_length` keeps them"
            )
        self._valid = join_recordings(valid, processor, task.join, self._prefix)
        self._test = self._valid
        if test is not valid:
            self._test = join_recordings(test, processor, task.join, self._prefix)
        augmentation = SpeechAugmentation(task.speed, task.pitch, task.noise)
        self._views = SpokenViews(train, processor, self._prefix, join=task.join, augmentation=augmentation)
        batches = RowBatches(train.sounds, task.batch_size, config.seed, views=self._row, workers=task.workers)
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        hours = sum(len(train.sounds[n]) for n in range(len(train))) / SAMPLE_RATE / 3_600
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} examples a batch, {epochs:.1f} epochs"
        note(
            f"{len(train):,} recordings ({hours:.2f} hours) for training, {len(self._valid):,} examples for "
            f"validation, {len(self._test):,} for test, vocabulary {processor.vocab_size:,}"
        )
        self._losses = jax.jit(lambda model, batch: loss.losses(model, batch, None)[1::2])

    def _row(self, images: Any, number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self._views(images, number, rng) | {"prompts": np.array(len(self._prefix), np.int32)}

    def _within_window(self, recordings: Recordings, split: str) -> Recordings:
        """Return the recordings that fit into the model's window, and note how many do not.

        Raises:
          UserError: None does.
        """
        limit = self.processor.samples
        short = np.array([len(recordings.sounds[n]) <= limit for n in range(len(recordings))], bool)
        if short.all():
            return recordings
        seconds = limit / SAMPLE_RATE
        if not short.any():
            raise UserError(
                f"{recordings.path}: all recordings are longer than the model's {seconds:g} seconds"
            )
        self._note(
            f"{(~short).sum():,} of {len(short):,} {split} recordings are longer than the model's {seconds:g} "
            "seconds and are left out"
        )
        return recordings.select(np.flatnonzero(short))

    def _validation_batches(self) -> Iterator[dict[str, np.ndarray]]:
        rows, samples = self._settings.batch_size, self.processor.samples
        encoded = self.processor.encode(self._valid.transcripts, self._prefix)
        for first in range(0, len(self._valid), rows):
            numbers = np.arange(first, first + rows)
            indices = np.minimum(numbers, len(self._valid) - 1)
            yield {
                "sounds": np.stack([as_integers(self._valid.sounds[int(n)], samples) for n in indices]),
                "tokens": encoded.tokens[indices],
                "lengths": encoded.lengths[indices],
                "prompts": np.full(rows, len(self._prefix), np.int32),
                "weight": (numbers < len(self._valid)).astype(np.float32),
            }

    def _transcribe(self, model: Any, recordings: Recordings, **search: Any) -> list[str]:
        transcriber = Transcriber(
            model,
            self.processor,
            language=self._settings.language or None,
            search="attention" if search.get("beam_size", 1) > 1 else self._settings.search,
            rows=32,
            **search,
        )
        sounds = [recordings.sounds[n] for n in range(len(recordings))]
        return [transcript.text for transcript in transcriber(sounds)]

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the loss of the validation recordings, and the error rates of some."""
        totals = [self._losses(model, place_batch(b, self._mesh)) for b in self._validation_batches()]
        yield (
            "valid_loss",
            sum(float(total) for total, _ in totals) / max(1.0, sum(float(w) for _, w in totals)),
        )
        # Tables are often sorted, so the recordings are drawn.
        part = self._valid.select(sample_rows(len(self._valid), _TRANSCRIBED_WHILE_TRAINING))
        transcripts = self._transcribe(model, part)
        for name, value in transcript_scores(transcripts, part.transcripts):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model's transcripts of the test recordings."""
        task, test = self._settings, self._test
        transcripts = self._transcribe(kept_model, test, beam_size=task.beam_size, alpha=task.length_penalty)
        results: dict[str, Any] = dict(transcript_scores(transcripts, test.transcripts))
        results |= {
            "tokens_per_second": totals.weight / max(totals.seconds, 1e-9),
            "test_recordings": len(test),
        }
        lines: list[str] = []
        for number in range(0, len(test), max(1, len(test) // 4)):
            lines += ["", f"transcript {transcripts[number]}", f"reference  {test.transcripts[number]}"]
        lines += [
            "",
            f"word error rate {results['word_error_rate']:.2f} %, character error rate "
            f"{results['character_error_rate']:.2f} %, {len(test):,} recordings",
        ]
        return results, lines


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the recordings, train or read the tokenizer, and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: open_splits(config, note))

    def make() -> SpeechProcessor:
        model = config.model
        if (processor := processor_of(starts)) is not None:
            settings = msgspec.structs.replace(processor.settings, max_length=model.max_length)
            return dataclasses.replace(processor, settings=settings)
        return SpeechProcessor.train(
            splits[0].transcripts, model.vocab_size, mel_bins=model.mel_bins, max_frames=model.max_frames,
            max_length=model.max_length,
        )  # fmt: skip

    processor = shared_processor(SpeechProcessor, make, stored)
    return on_every_process(lambda: SpeechRecognition(config, splits, processor, objective, mesh, note))


ENTRY = TaskEntry(
    "speech_recognition",
    SpeechRecognitionConfig,
    KIND,
    {"digits": digits, "recordings": recordings, "fine_tune": fine_tune},
    SpeechProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedRecognizer,
    check_mesh=check_mesh,
)
