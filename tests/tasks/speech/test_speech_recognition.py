"""Training, resuming, sharding, loading and use of a speech recognizer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.tasks.resuming import check_devices_and_micro_batches, losses, resumed_results
from transformer_jax import tasks
from transformer_jax.data.corpora.recordings import Recordings
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.plotting.speech import plot_speech
from transformer_jax.tasks.speech import data as speech_data
from transformer_jax.tasks.speech import speech_recognition
from transformer_jax.tasks.speech.speech_recognition import SpeechRecognition, mask_bands
from transformer_jax.training import plan
from transformer_jax.training.execution import Execution

SIZES = dict(
    width=24, encoder_layers=1, decoder_layers=1, heads=2, feed_forward=32, mel_bins=16, max_frames=120,
    max_length=12, batch_size=8, steps=8, evaluate_every=4, save_every=2, learning_rate=3e-3, warmup=2,
    join=3, speed=0.1, pitch=0.1, noise=0.1, masks=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def corpus():
    """Replace the synthesized digits by short tones."""
    rng = np.random.default_rng(0)
    words = ("low", "high")

    def record(count, name):
        chosen = rng.integers(0, 2, count)
        time = np.arange(3_200) / 16_000
        sounds = [
            np.float32(0.3 * np.sin(2 * np.pi * (300 + 900 * n) * time) + 0.01 * rng.normal(size=3_200))
            for n in chosen
        ]
        speakers = [f"{name} {number % 2}" for number in range(count)]
        return Recordings(name, sounds, [words[n] for n in chosen], speakers)

    splits = record(24, "train"), record(8, "valid"), record(8, "test")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speech_data, "spoken_digits", lambda: splits)
        yield splits


def config_of(**changes):
    return tasks.configure("speech_recognition", "digits", **(SIZES | changes))


def train(config, folder, mesh=None, note=lambda line: None):
    return tasks.train(config, folder, execution=Execution(mesh=mesh), note=note)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, train(config_of(), folder)


def test_it_is_trained(trained):
    folder, results = trained
    assert {"word_error_rate", "character_error_rate", "test_recordings"} <= set(results)
    assert losses(folder)[-1] < losses(folder)[0]
    assert json.loads((folder / "results.json").read_text())["test_recordings"] == 8


@pytest.mark.long
def test_it_is_resumed_bit_for_bit(trained, tmp_path, monkeypatch):
    complete, results = trained
    resumed = resumed_results(
        lambda folder: train(config_of(), folder), SpeechRecognition, complete, tmp_path / "run", monkeypatch
    )
    assert resumed["word_error_rate"] == results["word_error_rate"]


@pytest.mark.long
def test_eight_devices_and_micro_batches_learn_the_same(trained, tmp_path):
    check_devices_and_micro_batches(train, config_of, trained[0], tmp_path, dropout=0.0, masks=0)


def test_it_is_planned():
    lines = dict(plan.describe(tasks.TASKS["speech_recognition"], config_of(), "data=2,tensor=2"))
    assert lines["work"].endswith("in total")


def test_losses_are_those_of_their_formulas(trained, corpus):
    """The CTC loss of a row is optax's for its transcript alone; spoken tokens and the end are predicted."""
    run = tasks.load(trained[0])
    objective = speech_recognition.objective(run.config, run.model.config)
    processor, model = run.processor, run.model
    encoded = processor.encode(["low high", "high"], processor.prefix())
    sounds = np.zeros((2, processor.samples), np.int16)
    sounds[:, :3_200] = np.round(corpus[0].sounds[0] * 32_768)
    batch = {
        "sounds": jnp.asarray(sounds), "tokens": jnp.asarray(encoded.tokens), "lengths": encoded.lengths,
        "prompts": jnp.ones(2, jnp.int32), "weight": jnp.array([1.0, 0.0]),
    }  # fmt: skip
    _, likelihood, ctc, weight = objective.losses(model, batch, None)
    spectrograms = speech_recognition.log_mel(jnp.asarray(sounds) / 32_768.0, 16)
    length = int(encoded.lengths[0])
    assert weight == length - 1
    logits = model(spectrograms, encoded.tokens[:, :-1])
    chosen = jax.nn.log_softmax(logits[0])[np.arange(length - 1), encoded.tokens[0, 1:length]]
    np.testing.assert_allclose(likelihood, -chosen.sum(), rtol=1e-5)
    rows = model.ctc_logits(model.encode(spectrograms))[:1]
    labels = encoded.tokens[:1, 1 : length - 1]
    expected = optax.ctc_loss(
        rows, jnp.zeros(rows.shape[:2]), labels, jnp.zeros(labels.shape), blank_id=rows.shape[-1] - 1
    )
    np.testing.assert_allclose(ctc, expected[0], rtol=1e-5)


def test_bands_are_hidden():
    spectrograms = jnp.asarray(np.random.default_rng(0).normal(size=(4, 60, 20)), jnp.float32)
    hidden = mask_bands(spectrograms, 2, jax.random.key(0))
    changed = np.asarray(hidden != spectrograms)
    assert 0 < changed.mean() < 0.5
    means = np.broadcast_to(spectrograms.mean(axis=(1, 2), keepdims=True), spectrograms.shape)
    np.testing.assert_allclose(hidden[changed], means[changed])


def test_recordings_are_transcribed(trained, corpus, tmp_path):
    run = tasks.load(trained[0])
    sounds = corpus[2].sounds[:3]
    texts = run.transcribe(sounds)
    assert len(texts) == 3
    assert texts[:1] == run.transcribe(sounds[:1])
    long = np.concatenate([*sounds, *sounds, *sounds, *sounds])
    (transcript,) = run.transcripts([long])
    ends = [segment.end for segment in transcript.segments]
    assert ends == sorted(ends)
    assert all(segment.end - segment.start <= 1.2 for segment in transcript.segments)
    attention = run.align(sounds[0], beam_size=2)
    assert attention.text == run.transcribe(sounds[:1], beam_size=2)[0]
    assert attention.weights.shape[:3] == (1, 2, len(attention.tokens))
    # The decoder reads what the CTC head wrote.
    aligned = run.align(sounds[0])
    assert aligned.text == texts[0]
    assert aligned.weights.shape == (1, 2, len(aligned.tokens), attention.weights.shape[3])
    plot_speech(attention, path=tmp_path / "words.png")
    assert (tmp_path / "words.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="samples must be floats"):
        run.transcribe([np.zeros(100, np.int16)])
    with pytest.raises(UserError, match="but one is 32767: divide"):
        run.transcribe([np.array([0.0, 32_767.0])])
    for value, message in (([], "one or more"), ("a.wav", "a list"), ([np.zeros((2, 2))], "finite samples")):
        with pytest.raises(UserError, match=message):
            run.transcribe(value)
    for options, message in (
        ({"timestamps": True}, "`timestamps`: the model was trained without"),
        ({"language": "en"}, "`language` and `speech_task` need a model of several languages"),
        ({"beam_size": 0}, "`beam_size` 0 is below 1"),
    ):
        with pytest.raises(UserError, match=message):
            run.transcribe(sounds, **options)


def test_a_complete_model_is_fine_tuned(trained, tmp_path):
    folder, _ = trained
    config = tasks.configure(
        "speech_recognition", "fine_tune", start=(str(folder),), batch_size=8, steps=1, learning_rate=0.0
    )
    train(config, tmp_path / "run")
    expected = named_leaves(tasks.load(folder).model)
    for name, leaf in named_leaves(tasks.load(tmp_path / "run").model).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def test_values_that_cannot_be(tmp_path):
    for changes, message in (
        (dict(valid_speaker="a"), "`valid`, `test` and `valid_speaker` need `data`"),
        (dict(data=("a",), valid=("b",), valid_speaker="c"), "contradict each other"),
        (dict(held_out=0.0), "`held_out` 0.0 must be above 0"),
        (dict(ctc_weight=1.0), "`ctc_weight` 1.0 must be below 1"),
        (dict(join=0), "`join` 0 is below 1"),
    ):
        with pytest.raises(UserError, match=message):
            config_of(**changes)
    with pytest.raises(UserError, match=r"all recordings are longer than the model's 0\.12 seconds"):
        train(config_of(max_frames=12), tmp_path / "run")
