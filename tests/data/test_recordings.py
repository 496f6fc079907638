"""Sound files, tables of recordings, synthesized digits, and the changes of speech."""

import dataclasses
import importlib.util
import io
import json
import tarfile

import msgspec
import numpy as np
import pytest

from transformer_jax.data.batches.spoken_batches import SpeechAugmentation, change_pitch, join_recordings
from transformer_jax.data.corpora.audio_files import read_audio
from transformer_jax.data.corpora.recordings import Recordings, open_recordings
from transformer_jax.data.corpora.synthetic_speech import DIGITS, Voice, say
from transformer_jax.data.tokenizers.speech_processor import SpeechProcessor
from transformer_jax.errors import UserError

soundfile = pytest.importorskip("soundfile", reason="sound needs the extra speech")


def tone(pitch=440.0, seconds=1.0, rate=16_000):
    return 0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)


def loudest(samples):
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return np.argmax(spectrum) * 16_000 / len(samples)


def encoded(samples, rate, kind="FLAC"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG"])
def test_sounds_are_mono_at_16_kilohertz(kind, tmp_path):
    soundfile.write(tmp_path / "a.sound", tone(), 16_000, format=kind)
    samples, conversion = read_audio(tmp_path / "a.sound")
    assert (samples.dtype, len(samples), conversion) == (np.float32, 16_000, "")
    np.testing.assert_allclose(loudest(samples), 440, atol=2)
    other = np.stack([tone(300, rate=8_000), np.zeros(8_000)], axis=1)
    samples, conversion = read_audio(encoded(other, 8_000))
    assert (len(samples), conversion) == (16_000, "stereo and 8,000 Hz")
    np.testing.assert_allclose(loudest(samples), 300, atol=2)
    assert 0.2 < np.abs(samples).max() < 0.3  # the mean of both channels


def test_sounds_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.wav: no such sound file"):
        read_audio(tmp_path / "nothing.wav")
    (tmp_path / "empty.wav").write_bytes(b"")
    with pytest.raises(UserError, match=r"empty\.wav: not a readable sound file"):
        read_audio(tmp_path / "empty.wav")
    with pytest.raises(UserError, match=r"a\.wav: the recording is empty"):
        read_audio(encoded(np.zeros(0), 16_000, "WAV"), "a.wav")
    content = encoded(tone(), 16_000, "WAV")
    with pytest.raises(UserError, match=r"cut\.wav: the file is truncated"):
        read_audio(content[: len(content) // 2], "cut.wav")
    content = encoded(np.random.default_rng(0).normal(size=16_000) * 0.1, 16_000)
    with pytest.raises(UserError, match=r"a\.flac: (the file is truncated|not a readable sound file)"):
        read_audio(content[: len(content) // 2], "a.flac")
    for kind in ("OGG", "AIFF"):
        content = encoded(np.random.default_rng(0).normal(size=16_000) * 0.1, 16_000, kind)
        assert len(read_audio(content)[0]) == 16_000
        for size in (len(content) // 2, len(content) - 10):
            with pytest.raises(
                UserError, match=r"a: (the file is truncated|not a readable|the recording is empty)"
            ):
                read_audio(content[:size], "a")
    with pytest.raises(UserError, match=r"note\.wav: not a readable sound file"):
        read_audio(b"not a sound", "note.wav")


def test_tables_name_files_of_folders_and_archives(tmp_path):
    for number, word in enumerate(("one", "two")):
        soundfile.write(tmp_path / f"{word}.wav", tone(300 + 100 * number, 0.2), 16_000)
    soundfile.write(tmp_path / "unused.wav", tone(), 16_000)
    with tarfile.open(tmp_path / "sounds.tar", "w") as archive:
        for word in ("one", "two"):
            archive.add(tmp_path / f"{word}.wav", f"deep/{word}.wav")
    rows = [("one.wav", "One", "a"), ("two.wav", " two  times", "b")]
    table = tmp_path / "table.tsv"
    table.write_text("\n".join("\t".join(row) for row in [("file", "transcript", "speaker"), *rows]) + "\n")
    lines = tmp_path / "table.jsonl"
    lines.write_text("".join(json.dumps({"file": row[0], "transcript": row[1]}) + "\n" for row in rows))
    for source, unused in (((table,), 1), ((table, tmp_path / "sounds.tar"), 0), ((lines, tmp_path), 1)):
        recordings = open_recordings([str(path) for path in source], split="train")
        assert list(recordings.transcripts) == ["One", "two times"]
        assert recordings.unused == unused
        assert list(recordings.speakers) == ([] if source[0] == lines else ["a", "b"])
        np.testing.assert_allclose(loudest(recordings.sounds[1]), 400, atol=5)
    for text, message in (
        ("file\ttranscript\nthree.wav\tthree\n", "line 2: no sound file 'three.wav'"),
        ("file\ttranscript\none.wav\t...\n", "line 2: the transcript of one.wav has no letters"),
        ("file\tspoken\none.wav\tone\n", "no column transcript"),
    ):
        table.write_text(text)
        with pytest.raises(UserError, match=message):
            open_recordings([str(table)], split="train")
    with pytest.raises(UserError, match="recordings are a table"):
        open_recordings(["a", "b", "c"], split="train")


def test_every_digit_sounds_different_and_voices_differ_in_pitch():
    rng = np.random.default_rng(0)
    low, high = (Voice(pitch, 1.0, 1.0, 0.0, 1e-4, 6.0) for pitch in (100.0, 250.0))
    spectra = []
    for word in DIGITS:
        sound = say([word], low, rng)
        assert np.isfinite(sound).all()
        assert 0.2 < len(sound) / 16_000 < 1.5
        spectra.append(np.abs(np.fft.rfft(sound, 32_000)))
    normalized = np.stack(spectra) / np.linalg.norm(spectra, axis=1, keepdims=True)
    likeness = normalized @ normalized.T - 2 * np.eye(10)
    assert likeness.max() < 0.9

    def period(voice):
        sound = say(["nine"], voice, np.random.default_rng(1))
        sound = sound - sound.mean()
        correlation = np.correlate(sound, sound, "full")[len(sound) - 1 :]
        return 40 + int(np.argmax(correlation[40:400]))

    assert 1.7 < period(low) / period(high) < 3.3


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_the_pitch_changes_and_the_duration_does_not(factor):
    changed = change_pitch(tone(440.0).astype(np.float32), factor)
    assert abs(len(changed) - 16_000) < 20
    np.testing.assert_allclose(loudest(changed[2_000:14_000]), 440 * factor, rtol=0.02)


def test_changes_of_speech():
    sound = tone(440.0).astype(np.float32)
    rng = np.random.default_rng
    np.testing.assert_array_equal(SpeechAugmentation()(sound, rng(0)), sound)
    faster = SpeechAugmentation(speed=0.2)(sound, rng(0))
    assert 12_000 < len(faster) < 20_000
    np.testing.assert_allclose(loudest(faster) * len(faster), 440 * 16_000, rtol=0.01)
    noisy = SpeechAugmentation(noise=0.5)(sound, rng(0))
    assert 0 < np.std(noisy - sound) < 0.5 * np.std(sound)
    np.testing.assert_array_equal(noisy, SpeechAugmentation(noise=0.5)(sound, rng(0)))


def test_recordings_of_one_speaker_are_joined():
    sounds = [np.full(1_600, 0.1 * (n + 1), np.float32) for n in range(4)]
    recordings = Recordings("set", sounds, ["one", "two", "three", "four"], ["a", "a", "b", "b"])
    processor = SpeechProcessor.train(
        ["one two three four"] * 3, 300, mel_bins=8, max_frames=200, max_length=32
    )
    result = join_recordings(recordings, processor, 5)
    again = join_recordings(recordings, processor, 5)
    assert list(result.transcripts) == list(again.transcripts)
    for number, (sound, text) in enumerate(zip(result.sounds, result.transcripts, strict=True)):
        words = text.split()
        assert words[0] == recordings.transcripts[number]
        assert set(words) <= ({"one", "two"} if number < 2 else {"three", "four"})
        assert sum(sound > 0) == 1_600 * len(words)
    assert max(len(text.split()) for text in result.transcripts) > 1
    # No more recordings are joined than the maximum length of a transcript has room for.
    settings = msgspec.structs.replace(processor.settings, max_length=5)
    short = dataclasses.replace(processor, settings=settings)
    result = join_recordings(recordings, short, 5)
    assert not short.encode(result.transcripts, ()).truncated


def test_recordings_of_a_tfds_set(tmp_path):
    tfds_sets = pytest.importorskip("tests.data.corpora.tfds_sets", reason="needs tensorflow-datasets")
    source = [f"tfds:{tfds_sets.ToySpeech.name}"]
    if importlib.util.find_spec("tensorflow") is None:
        with pytest.raises(UserError, match="by TensorFlow: pip install tensorflow"):
            open_recordings(source, split="train", data_dir=str(tmp_path))
        return
    recordings = open_recordings(source, split="train", data_dir=str(tmp_path))
    assert {len(sound) for sound in recordings.sounds} == {1_600}, "resampled to 16 kHz"
    assert recordings.conversions == {"8,000 Hz": 12}
    pairs = set(zip(recordings.transcripts, recordings.speakers, strict=True))
    assert pairs == {(DIGITS[number % 10], ("ann", "bob")[number % 2]) for number in range(12)}
    loudness = sorted(float(np.abs(sound).max()) for sound in recordings.sounds)
    assert loudness[0] < 1e-4, "a quiet recording of integers stays quiet"
    np.testing.assert_allclose(loudness[1:], 0.25, atol=0.02)
