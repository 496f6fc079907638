"""The command `translate` as users run it: train, resume, extend, translate, draw, and its errors."""

import json
import pathlib
import re
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from tests.cases import others_soak
from tests.commands.in_process import call, error_line, start, succeed
from tests.runs import train, write_pairs
from transformer_jax import configure, load
from transformer_jax.commands import translate
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.config import Start
from transformer_jax.training.loop import Diverged
from transformer_jax.training.metrics import read_metrics


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"), train=300, valid=20, test=20)


def flags_of(files):
    return [word for split, paths in files.items() for word in (f"--{split}", *paths)]


SMALL = ("--preset", "mini", "--vocab-size", 270, "--batch-tokens", 256, "--buckets", 1, "--warmup", 10,
         "--learning-rate", 3e-3, "--schedule", "constant", "--max-length", 32)  # fmt: skip


def config(files, *, model="transformer", **changes):
    options = dict(
        **files, preset="mini", vocab_size=270, batch_tokens=256, buckets=1, warmup=10, learning_rate=3e-3,
        schedule="constant", max_length=32, steps=12, save_every=4, evaluate_every=6, average=2, dropout=0.1,
    )  # fmt: skip
    return configure("translation", "files", model=model, **(options | changes))


@pytest.fixture(scope="module")
def run_dir(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    return folder, succeed(translate, *flags_of(files), *SMALL, "--steps", 30, "--run-dir", folder)


def test_files_and_results_of_a_run(run_dir):
    folder, completed = run_dir
    results = json.loads((folder / "results.json").read_text())
    for name in ("bleu", "chrf", "exact_match"):
        assert 0 <= results[name] <= 100
    for name in ("steps", "parameters", "seconds", "tokens_per_second"):
        assert results[name] > 0
    assert results["steps"] == 30
    assert results["signature"].startswith("nrefs:1|case:mixed")
    assert f"BLEU {results['bleu']:.2f}" in completed.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps[0] <= 10
    assert max(np.diff(steps)) <= 10
    assert rows[-1]["step"] == 30
    assert any("valid_bleu" in row and "valid_loss" in row for row in rows)
    assert list(folder.glob("events.out.tfevents.*"))
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {"config.json", "tokenizer.json", "checkpoints"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["model"] == "transformer"


def test_the_saved_config_contains_every_value(run_dir):
    folder, _ = run_dir
    run = json.loads((folder / "config.json").read_text())["run"]
    values = run["task"] | run["model"] | run["optimization"]
    assert {name for name, value in values.items() if value is None} == {"direction", "data_dir"}


def test_the_same_command_again_only_scores(run_dir, files):
    folder, _ = run_dir
    metrics = (folder / "metrics.jsonl").read_text()
    scores = json.loads((folder / "results.json").read_text())
    completed = succeed(translate, *flags_of(files), *SMALL, "--steps", 30, "--run-dir", folder)
    assert "resuming" in completed.stderr
    assert (folder / "metrics.jsonl").read_text() == metrics
    assert json.loads((folder / "results.json").read_text())["bleu"] == scores["bleu"]


@pytest.mark.long
def test_text_stdin_python_and_pictures_agree(run_dir, tmp_path):
    folder, _ = run_dir
    sentences = ["a dog sees a cat", "", "big red cat"]
    expected = load(folder).translate(sentences)
    assert expected[1] == ""
    completed = succeed(translate, "--run-dir", folder, "--stdin", stdin="\n".join(sentences) + "\n")
    assert completed.stdout == "\n".join(expected) + "\n"
    picture, page = tmp_path / "alignment.png", tmp_path / "page.html"
    for flags in ((), ("--plot-attention", picture), ("--html", page)):
        completed = succeed(translate, "--run-dir", folder, "--text", sentences[0], *flags)
        assert completed.stdout.strip() == expected[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert '"name": "decoder/cross_attention", "shape": [2, 4, ' in page.read_text()
    alignment = load(folder).align(sentences[0])
    layers, heads, target, source = alignment.weights.shape
    assert (layers, heads) == (2, 4)
    assert (target, source) == (len(alignment.target_tokens), len(alignment.source_tokens))
    np.testing.assert_allclose(alignment.weights.sum(-1), 1, atol=1e-5)
    aligned = load(folder).align(sentences[0], "a cat")
    assert aligned.target_tokens[-1] == alignment.target_tokens[-1]
    assert aligned.text == "a cat"
    aligned = load(folder).align(sentences[0], alignment.text)
    if aligned.target_tokens == alignment.target_tokens:  # the model may have split a word into other tokens
        np.testing.assert_allclose(aligned.weights, alignment.weights, atol=1e-4)
    with pytest.raises(UserError, match="an empty sentence has no alignment"):
        load(folder).align(sentences[0], " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "phrases:en-xx"], "unknown locale 'xx'"),
        (["--corpus", "wmt"], "unknown corpus 'wmt': write phrases:en-de"),
        (["--recipe", "wmt"], "unknown recipe 'wmt': choose one of phrases"),
        (["--direction", "en-de"], "--direction needs a --corpus tfds:NAME"),
        (["--bpe-dropout", "1"], "--bpe-dropout 1.0 must be below 1"),
        (["--preset", "huge"], "unknown preset 'huge': choose one of mini, tiny, small, base, big"),
        (["--model", "rnn"], "unknown model 'rnn'"),
        (["--model", "lstm", "--preset", "base"], "unknown preset 'base': choose one of mini, tiny, small"),
        (["--model", "luong", "--norm", "pre"], "--norm is a flag of transformer, not of luong"),
        (
            ["--hidden", "64"],
            "--hidden is a flag of lstm, gru, bahdanau, hard_attention, luong, not of transformer",
        ),
        (["--model", "gru", "--hidden", "0"], "hidden=0 must be at least 1"),
        (["--model", "hard_attention", "--r-drop", "5"], "--r-drop needs two passes with the same attention"),
        (["--train", "nowhere.en", "nowhere.de"], "--train needs --valid and --test"),
        (["--train", "x.en", "x.de", "--valid", "x.en", "x.de", "--test", "x.en", "x.de"], "no such file"),
        (["--bleu-tokenize", "moses"], "unknown BLEU tokenizer 'moses'"),
        (["--steps", "0"], "--steps 0 is below 1"),
        (["--bleu-tokenize", "ja-mecab"], "BLEU tokenizer 'ja-mecab' cannot be used"),
        (["--seed", "-1"], "--seed -1 must be at least 0"),
        (["--dropout", "-0.1"], "dropout=-0.1 must be at least 0"),
        (["--width", "30"], "width 30 must be a multiple of heads 4"),
        (["--lerning-rate", "1"], "unknown argument --lerning-rate; did you mean --learning-rate"),
        (["--start", "nowhere"], "nowhere/config.json: no such file"),
        (["--trainable", "nothing"], "--trainable 'nothing' matches no parameter"),
        (["--text", " "], "--text is empty"),
        (["--plot-attention", "x.png"], "--plot-attention draws the sentence of --text"),
        (["--html", "x.html"], "--html shows the sentence of --text"),
        (["--text", "a", "--html", "none/x.html"], "--html 'none/x.html': no file can be written there"),
        (["--text", "a", "--html", "x.html", "--plot-attention", "x.png"], "contradict each other"),
        (["--text", "a", "--stdin"], "contradict each other"),
        (["--text", "a"], "is .* the folder of a run, or of weights?"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    folder = tmp_path / "run"
    completed = call(translate.main, "--run-dir", folder, *arguments)
    assert completed.returncode == 2
    assert re.search(message, completed.stderr), completed.stderr
    assert completed.stderr.count("\n") == 1
    assert not folder.exists()


def test_load_returns_the_averaged_parameters(run_dir):
    assert load(run_dir[0]).weights == "averaged"
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load(run_dir[0], weights="7")


def test_a_sentence_longer_than_the_limit(run_dir):
    run = load(run_dir[0])
    with pytest.raises(UserError, match=r"sentence 2 has .* tokens, above the limit of 31"):
        run.translate(["a dog", "dog " * 40])


def test_another_config_leaves_the_run_untouched(run_dir, files):
    folder, _ = run_dir
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    for changes, message in (
        (("--seed", 1), "--seed is 0 there, not 1"),
        (("--width", 64), "--width is 128 there, not 64"),
        (("--model", "lstm"), "holds a run of transformer, not of lstm"),
    ):
        flags = (*flags_of(files), *SMALL, "--steps", 30, "--run-dir", folder, *changes)
        assert message in error_line(translate, *flags)
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_folder_that_is_not_a_run(files, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a run: name another `run_dir`"):
        train(config(files), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        train(config(files), tmp_path / "file" / "run")


def final_state(folder):
    import orbax.checkpoint as ocp

    from transformer_jax.training.checkpoints import Checkpoints

    step = Checkpoints(folder / "checkpoints").steps()[-1]
    with ocp.PyTreeCheckpointer() as reader:
        parts = {p: reader.restore(folder / "checkpoints" / str(step) / p) for p in ("model", "training")}
    return step, named_leaves(parts)


@pytest.mark.long
def test_an_interrupted_run_ends_bit_equal(files, tmp_path):
    """A run of 12 steps equals one of 6, which is not a multiple of `save_every`, extended to 12."""
    changes = dict(bpe_dropout=0.1)
    complete = train(config(files, **changes), tmp_path / "complete")
    train(config(files, steps=6, **changes), tmp_path / "extended")
    before = named_leaves(load(tmp_path / "extended").model)
    extended = train(config(files, **changes), tmp_path / "extended")
    averaged = [
        named_leaves(load(tmp_path / name, weights="averaged").model) for name in ("complete", "extended")
    ]
    for name, leaf in averaged[0].items():
        assert isinstance(leaf, jax.Array)
        np.testing.assert_array_equal(leaf, averaged[1][name], err_msg=name)
    assert any((leaf != before[name]).any() for name, leaf in averaged[1].items())
    assert extended["exact_match"] == complete["exact_match"]
    step, expected = final_state(tmp_path / "complete")
    resumed_step, resumed = final_state(tmp_path / "extended")
    assert step == resumed_step == 12
    assert expected.keys() == resumed.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    assert extended["steps"] == complete["steps"] == 12


@pytest.mark.soak
def test_scoring_again_does_not_change_the_averaged_parameters(files, tmp_path):
    train(config(files, steps=4), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    train(config(files, steps=4, beam_size=2), tmp_path)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")} == before
    assert json.loads((tmp_path / "config.json").read_text())["run"]["task"]["beam_size"] == 2


@pytest.mark.soak
def test_the_number_of_steps_can_be_reduced_before_they_are_trained(files, tmp_path):
    train(config(files, steps=4), tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["run"]["optimization"]["steps"] = 100_000  # as saved by a command that was interrupted at once
    stored["sha256"] = ""
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="is a run of 4 steps: `steps` 3 would shorten it"):
        train(config(files, steps=3), tmp_path)
    assert train(config(files, steps=5), tmp_path)["steps"] == 5


@pytest.mark.soak
@pytest.mark.parametrize("batching", ["buckets", "packed"])
def test_a_length_limit_that_no_bucket_divides(files, tmp_path, batching):
    """Buckets round lengths up, but not above the limit of the model."""
    source, target = tmp_path / "train.en", tmp_path / "train.de"
    source.write_text("a dog\n" * 30 + "dog " * 12 + "\n")
    target.write_text("ein hund\n" * 30 + "hund " * 12 + "\n")
    limits = dict(max_length=27, vocab_size=259, batching=batching)
    results = train(config(files | dict(train=(str(source), str(target))), steps=2, **limits), tmp_path / "run")
    assert results["steps"] == 2


def test_a_path_that_is_too_long(files, tmp_path):
    for changes, folder in (({"train": ("x" * 300, "y")}, "run"), ({}, "x" * 300)):
        with pytest.raises(UserError, match="File name too long"):
            train(config(files | changes), tmp_path / folder)


@pytest.mark.soak
def test_a_cosine_run_is_neither_extended_nor_shortened(files, tmp_path):
    cosine = config(files, schedule="cosine", steps=4)
    train(cosine, tmp_path / "run")
    with pytest.raises(UserError, match="trained for 4 steps on a cosine schedule, which ends there"):
        train(config(files, schedule="cosine", steps=9), tmp_path / "run")
    with pytest.raises(UserError, match="`steps` 2 would shorten it"):
        train(config(files, schedule="cosine", steps=2), tmp_path / "run")


@pytest.mark.long
def test_a_run_starts_from_another(files, tmp_path):
    notes: list[str] = []
    first = train(config(files, schedule="cosine"), tmp_path / "first")
    start = (Start(str(tmp_path / "first")),)
    changes = dict(schedule="cosine", start=start, vocab_size=300, dropout=0.2, steps=8)
    second = train(config(files, **changes), tmp_path / "second", note=notes.append)
    assert f"starting from {tmp_path / 'first'} (averaged)" in notes
    assert second["parameters"] == first["parameters"]
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("first", "second")
    ]
    assert losses[1][0] < losses[0][0] - 0.5
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "second")]
    assert tokenizers[0] == tokenizers[1]
    for values, message in (
        (dict(start=(Start(str(tmp_path / "nowhere")),)), "is .* the folder of a run"),
        (dict(start=start, norm="pre"), "holds another model: norm is 'post' there, not 'pre'"),
        (dict(start=start, model="lstm"), "holds a Transformer, not a model of Seq2SeqConfig"),
        (dict(start=(Start(str(tmp_path / "third")),)), "is the run itself"),
    ):
        with pytest.raises(UserError, match=message):
            train(config(files, **values), tmp_path / "third")
        assert not (tmp_path / "third").exists()
    # A run with a checkpoint resumes without the folder of its start.
    (tmp_path / "first").rename(tmp_path / "gone")
    resumed = train(config(files, **changes), tmp_path / "second")
    assert resumed["bleu"] == second["bleu"]


@pytest.mark.soak
def test_metrics_after_the_restored_step_are_dropped(files, tmp_path):
    train(config(files, steps=8), tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 11, "loss": 1.0}) + '\n{"step": 12, "lo')
    train(config(files), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    assert len([s for s in steps if s == 11]) == 0


@pytest.mark.long
def test_a_diverging_run_names_the_step_and_keeps_its_checkpoint(files, tmp_path):
    with pytest.raises(Diverged, match=r"step \d+: the loss or its gradient is (nan|inf)") as error:
        train(config(files, learning_rate=1e30, clip=0.0, steps=20, save_every=1), tmp_path)
    assert "is kept" in str(error.value) or "nothing was saved yet" in str(error.value)
    saved = sorted((tmp_path / "checkpoints").glob("*/manifest.json"))
    for manifest in saved:
        step = int(manifest.parent.name)
        leaves = named_leaves(load(tmp_path, weights=str(step)).model)
        assert all(np.isfinite(leaf).all() for leaf in leaves.values())


@pytest.mark.long
def test_over_long_and_empty_pairs_are_counted(files, tmp_path):
    folder = pathlib.Path(files["train"][0]).parent
    changed = {}
    for split, empty_lines in (("train", "\n"), ("valid", ""), ("test", "\n\n")):
        changed[split] = (str(tmp_path / f"{split}.en"), str(tmp_path / f"{split}.de"))
        lines = (empty_lines, "rot\n" * len(empty_lines))
        for path, word, line in zip(changed[split], ("dog ", "hund "), lines, strict=True):
            text = (folder / pathlib.Path(path).name).read_text()
            pathlib.Path(path).write_text(text + (word * 60 + "\n" if split != "test" else "") + line)
    notes = []
    train(config(files | changed, steps=1), tmp_path / "run", note=notes.append)
    assert notes[0] == (
        "300 pairs (1 empty and 1 longer than 32 tokens left out) for training, 20 pairs (1 longer than 32 "
        "tokens left out) for validation, 20 pairs (2 empty left out) for test, vocabulary 270"
    )


OPTIONS = [
    dict(r_drop=5.0, bpe_dropout=0.1, accumulation=2, batching="packed"),
    dict(accumulation=2, ema=0.9), dict(optimizer="muon", norm="pre", tie="none"),
    dict(dtype="bfloat16", beam_size=1, schedule="inverse_sqrt"),
    dict(model="hard_attention", batching="packed"), dict(model="bahdanau", r_drop=5.0, hidden=24),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("changes", others_soak(OPTIONS, OPTIONS[0]))
def test_runs_of_all_options_end_with_scores(files, tmp_path, changes):
    results = train(config(files, steps=2, save_every=1, **changes), tmp_path)
    assert np.isfinite(results["bleu"])


@pytest.mark.long
@pytest.mark.parametrize("name", others_soak(["lstm", "luong", "hard_attention"], "luong"))
def test_recurrent_models_train_resume_and_translate(files, tmp_path, name):
    options = dict(model=name, save_every=2, schedule="constant")
    train(config(files, steps=4, **options), tmp_path / "complete")
    train(config(files, steps=2, **options), tmp_path / "resumed")
    train(config(files, steps=4, **options), tmp_path / "resumed")
    (_, expected), (_, resumed) = final_state(tmp_path / "complete"), final_state(tmp_path / "resumed")
    for leaf, value in expected.items():
        np.testing.assert_array_equal(value, resumed[leaf], err_msg=leaf)
    run = load(tmp_path / "resumed")
    assert len(run.translate(["a red dog", "", "a zebra ☃ unseen"])) == 3
    if name == "lstm":
        with pytest.raises(UserError, match="this model has no attention"):
            run.align("a red dog")
    else:
        weights = run.align("a red dog").weights
        assert weights.shape[:2] == (1, 1)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("number", others_soak([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_signals_save_before_the_command_ends(files, tmp_path, number):
    process = start("translate", *flags_of(files), *SMALL, "--steps", 100_000, "--run-dir", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.time() + 120
    while not (metrics.exists() and metrics.read_text()) and time.time() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "is saved; the same command resumes from there" in error
    step = int(error.split("stopped after step ")[1].split(",")[0])
    assert int(final_state(tmp_path / "run")[0]) == step


@pytest.mark.long
def test_a_full_disk_is_one_clear_line(files, tmp_path):
    """The test mounts a file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        completed = call(translate.main, *flags_of(files), *SMALL, "--steps", 40, "--run-dir", disk / "run")
        assert completed.returncode == 2, completed.stderr
        last = completed.stderr.strip().splitlines()[-1]
        assert last.startswith("error:")
        assert "free some space" in last
    finally:
        subprocess.run(["umount", disk], check=True)
