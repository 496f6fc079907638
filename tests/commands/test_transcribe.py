"""The command transcribe as users run it, and its one-line errors."""

import json

import numpy as np
import pytest

from tests.commands.in_process import call, error_line, json_lines, succeed
from transformer_jax import load
from transformer_jax.commands import transcribe

soundfile = pytest.importorskip("soundfile", reason="sound needs the extra speech")

SIZES = (
    "--width", 16, "--encoder-layers", 1, "--heads", 2, "--feed-forward", 16, "--mel-bins", 8,
    "--max-frames", 80, "--kernel", 3, "--batch-size", 4, "--steps", 2, "--save-every", 2,
    "--evaluate-every", 2,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a table of tones beside their files, of which one is stereo, and return the table."""
    folder = tmp_path_factory.mktemp("sounds")
    rows = ["file\ttranscript\tspeaker"]
    for number in range(12):
        time = np.arange(4_000) / 8_000
        tone = 0.3 * np.sin(2 * np.pi * (300 + 600 * (number % 2)) * time)
        sound = np.stack([tone, tone], axis=1) if number == 3 else tone
        soundfile.write(folder / f"{number}.wav", sound, 8_000)
        rows.append(f"{number}.wav\t{('low', 'high')[number % 2]}\t{'ab'[number % 3 == 0]}")
    soundfile.write(folder / "long.wav", 0.1 * np.ones(40_000), 16_000)
    (folder / "table.tsv").write_text("\n".join(rows) + "\n")
    return folder / "table.tsv"


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "speech"
    flags = ("--data", data, "--valid-speaker", "b", "--test", data, "--join", 2)
    return folder, succeed(transcribe, *SIZES, *flags, "--run-dir", folder)


def test_training_counts_what_is_converted(run):
    folder, completed = run
    results = json.loads((folder / "results.json").read_text())
    assert results["test_recordings"] == 12
    assert {"word_error_rate", "character_error_rate"} <= set(results)
    assert "1 sound files of" in completed.stderr
    assert "11 recordings of" in completed.stderr
    assert "1 recordings of" in completed.stderr
    assert "are stereo and 8,000 Hz: converted to mono at 16,000 Hz" in completed.stderr
    assert "word error rate" in completed.stdout


def test_files_are_transcribed_and_drawn(run, data, tmp_path):
    folder, _ = run
    files = [str(data.parent / name) for name in ("0.wav", "long.wav")]
    picture = tmp_path / "words.png"
    lines = json_lines(
        transcribe, "--run-dir", folder, "--audio", *files, "--plot-attention", picture, "--audio-batch-size", 1
    )
    texts = load(folder).transcribe(files)
    assert [(line["file"], line["text"]) for line in lines] == list(zip(files, texts, strict=True))
    assert picture.stat().st_size > 5_000
    plain = call(transcribe.main, "--run-dir", folder, "--audio", *files, "--search", "attention")
    assert plain.stdout.count("\n") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--audio", "a.wav"), "name the trained run with --run-dir"),
        (("--plot-attention", "a.png"), "--plot-attention and --timestamps need --audio"),
        (("--audio", "--run-dir", "x"), "--audio names no sound file"),
        (("--audio-batch-size", 2), "--audio-batch-size needs --audio"),
        (("--audio", "a.wav", "--run-dir", "x", "--audio-batch-size", 0), "--audio-batch-size 0 is below 1"),
        (("--data", "nothing.tsv"), "nothing.tsv"),
        (("--speech-task", "translate"), "--speech-task needs --audio"),
        (("--no-ctc",), "--search ctc needs a model with --ctc"),
        (("--valid-speaker", "b"), "--valid, --test and --valid-speaker need --data"),
        (("--start-from", "nothing"), "nothing"),
    ],
)
def test_bad_flags(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_line(transcribe, *flags)


def test_bad_files(run, data, tmp_path):
    folder, _ = run
    (tmp_path / "note.wav").write_text("no sound")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 16_000)
    for name, message in (
        ("note.wav", "not a readable sound file"),
        ("empty.wav", "the recording is empty"),
        ("none.wav", "no such sound file"),
    ):
        assert message in error_line(transcribe, "--run-dir", folder, "--audio", tmp_path / name)
    flags = ("--run-dir", folder, "--audio", data.parent / "0.wav")
    assert "the model was trained without them" in error_line(transcribe, *flags, "--timestamps")
    assert "need a model of several languages" in error_line(transcribe, *flags, "--language", "en")
    table = tmp_path / "table.tsv"
    table.write_text("file\ttranscript\nnone.wav\tone\n")
    line = error_line(transcribe, *SIZES, "--data", table, data.parent, "--run-dir", tmp_path / "run")
    assert "line 2: no sound file 'none.wav'" in line
    line = error_line(transcribe, *SIZES, "--data", data, "--valid-speaker", "c", "--run-dir", tmp_path / "run")
    assert "--valid-speaker 'c' is not one of the speakers, a, b" in line
