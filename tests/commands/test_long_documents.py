"""Long documents from the command line: a Longformer from another encoder, random passages, a picture."""

import json

import numpy as np
import pytest

from tests.commands.in_process import error_line, succeed
from transformer_jax import configure, load
from transformer_jax.commands import classify, pretrain
from transformer_jax.errors import UserError

SIZES = ("--width", 16, "--layers", 2, "--heads", 2, "--feed-forward", 32, "--vocab-size", 120)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Write texts of 60 words, of which one near the end decides the label."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("long") / "texts.tsv"
    words = [f"{a}{b}" for a in "bcdf" for b in "aeiou"]
    lines = ["sentence\tlabel"]
    for n in range(48):
        text = rng.choice(words, 60).tolist()
        text[50] = ("yes", "no")[n % 2]
        lines.append(f"{' '.join(text)}\t{('good', 'bad')[n % 2]}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def bert(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert") / "run"
    succeed(classify, "--train", table, *SIZES, "--max-length", 20, "--steps", 2, "--run-dir", folder)
    return folder


def test_a_longformer_is_built_from_a_run_and_shows_where_it_looks(table, bert, tmp_path):
    run, picture = tmp_path / "run", tmp_path / "picture.png"
    flags = ("--model", "longformer", "--window", 8, "--max-length", 70, "--start-from", bert)
    succeed(classify, *flags, "--train", table, "--steps", 2, "--batch-size", 8, "--run-dir", run)
    assert json.loads((run / "results.json").read_text())["accuracy"] >= 0
    trained = load(run)
    assert (trained.model.config.window, trained.model.config.max_length) == (8, 70)
    assert trained.model.config.padding_id == trained.processor.pad
    text = table.read_text().splitlines()[1].partition("\t")[0]
    completed = succeed(classify, "--run-dir", run, "--text", text, "--plot-attention", picture)
    assert completed.stdout.startswith(("good", "bad"))
    assert picture.stat().st_size > 5_000


def test_random_passages_are_read_completely_in_the_end(table, bert, tmp_path):
    flags = ("--passages", "random", "--max-length", 20, "--start-from", bert, "--batch-size", 8)
    succeed(classify, *flags, "--train", table, "--steps", 2, "--run-dir", tmp_path / "run")
    run = load(tmp_path / "run")
    text = table.read_text().splitlines()[1].partition("\t")[0]
    (complete,), (start,) = run.classify([text]), run.classify([" ".join(text.split()[:5])])
    assert complete.probabilities != start.probabilities
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("sentence1\tsentence2\tlabel\n" + "a b\tc d\tgood\na d\tb c\tbad\n" * 8)
    line = error_line(
        classify, "--passages", "random", *SIZES, "--train", pairs, "--run-dir", tmp_path / "pairs"
    )
    assert "--passages random is for single texts" in line


@pytest.mark.long
def test_a_longformer_continues_masked_language_modeling(bert, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"ba be {n % 7} co du fa" for n in range(200)))
    flags = ("--model", "longformer", "--window", 8, "--start-from", bert, "--context", 64)
    succeed(pretrain, *flags, "--text", text, "--steps", 2, "--batch-size", 4, "--run-dir", tmp_path / "run")
    assert type(load(tmp_path / "run").model).__name__ == "LongformerMaskedLM"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--window", 7), "window=7 must be an even number of at least 2"),
        (("--window", 0), "window=0 must be an even number of at least 2"),
        (("--global-tokens", 0), "global_tokens=0 must be at least 1"),
        (("--plot-attention", "x.png"), "--plot-attention shows a text: name it with --text or --stdin"),
    ],
)
def test_flags_that_are_refused(flags, message, table, bert):
    line = error_line(classify, "--model", "longformer", *flags, "--start-from", bert, "--train", table)
    assert message in line


def test_texts_above_the_positions_of_a_start(table, bert, tmp_path):
    flags = ("--model", "longformer", "--window", 8, "--train", table, "--steps", 1, "--batch-size", 8)
    succeed(classify, *flags, "--start-from", bert, "--max-length", 40, "--run-dir", tmp_path / "run")
    line = error_line(
        classify, *flags, "--start-from", tmp_path / "run", "--max-length", 41, "--run-dir", tmp_path / "longer"
    )
    assert "has positions for 40 tokens: --max-length 41 is above them" in line
    start = (str(tmp_path / "run"),)
    config = configure("sequence_classification", "fine_tune", start=start, model="longformer").model
    assert (config.window, config.max_length) == (8, 40), "a longformer keeps its sizes"


def test_a_mesh_with_parts_shorter_than_a_window(table, bert):
    flags = ("--model", "longformer", "--window", 64, "--max-length", 64, "--batch-size", 8)
    line = error_line(classify, *flags, "--start-from", bert, "--train", table, "--mesh", "sequence=8")
    assert "into parts of 8, fewer than the 32 that a window reaches on one side" in line


def test_questions_above_the_global_tokens(bert):
    from transformer_jax.evaluation.answers import question_windows

    tokenizer = load(bert).processor
    with pytest.raises(UserError, match="more than the 4 global tokens of the model"):
        question_windows(tokenizer, [("ba be co du fa", "ba")], max_length=60, stride=0, global_tokens=4)
