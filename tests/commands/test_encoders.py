"""The commands pretrain, classify, tag, answer and embed as users run them, and their one-line errors."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.commands.in_process import call, error_line, json_lines, succeed
from transformer_jax import load, pretrained
from transformer_jax.commands import answer, classify, embed, generate, pretrain, tag
from transformer_jax.errors import UserError
from transformer_jax.models.encoders.bert import BertMaskedLM
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.encoders.trained_heads import Answer, TrainedElectra, TrainedMaskedLM
from transformer_jax.training.run_folder import read_config

SIZES = ("--width", 16, "--layers", 1, "--heads", 2, "--feed-forward", 32, "--vocab-size", 120)
TINY = (*SIZES, "--batch-size", 8, "--steps", 4)
WORDS = ["good", "bad"]


def write_table(folder, name, header, rows):
    path = folder / f"{name}.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in [header, *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = [(f"the film number {rng.integers(99)} is {WORDS[n % 2]}", n % 2) for n in range(40)]
    write_table(folder, "label", ("sentence", "label"), rows)
    write_table(folder, "pair", ("sentence1", "sentence2", "label"), [(t, t, k) for t, k in rows])
    write_table(folder, "tags", ("tokens", "tags"), [(t, "D N N N V J") for t, _ in rows])
    paragraphs = []
    for n in range(12):
        question = {"id": n, "question": "how is it?", "answers": [{"text": "good", "answer_start": 21}]}
        paragraphs.append({"context": f"the film number 7 is good {n}", "qas": [question]})
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (folder / "text.txt").write_text("\n\n".join(" ".join(t for t, _ in rows[n:]) for n in range(30)))
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Train a run per command, and return the folder that contains them."""
    root = tmp_path_factory.mktemp("runs")
    jobs = {
        "pretrain": (pretrain, ("--text", data / "text.txt", "--context", 32)),
        "classify": (classify, ("--train", data / "label.tsv")),
        "tag": (tag, ("--train", data / "tags.tsv")),
        "answer": (answer, ("--train", data / "squad.json", "--max-length", 48, "--stride", 4)),
        "embed": (embed, ("--train", data / "pair.tsv", "--pooling", "max", "--temperature", 0.1)),
    }
    for name, (command, flags) in jobs.items():
        completed = succeed(command, *flags, *TINY, "--run-dir", root / name)
        assert f"run folder   {root / name}" in completed.stdout
    return root


def test_keys_and_values_of_json_lines(runs):
    lines = "the film is good\nthe film is bad\n"
    outputs = json_lines(classify, "--run-dir", runs / "classify", "--stdin", stdin=lines)
    assert [output["text"] for output in outputs] == lines.splitlines()
    for output in outputs:
        assert list(output) == ["text", "label", "probabilities"]
        assert list(output["probabilities"]) == ["0", "1"]
        assert output["label"] == max(output["probabilities"], key=output["probabilities"].get)
    outputs = json_lines(tag, "--run-dir", runs / "tag", "--stdin", stdin=lines)
    assert outputs[0]["tokens"] == ["the", "film", "is", "good"]
    assert len(outputs[0]["tags"]) == 4
    question = "how is it?\tthe film number 7 is good\n"
    (output,) = json_lines(answer, "--run-dir", runs / "answer", "--stdin", stdin=question)
    assert list(output)[-3:] == ["answer", "start", "score"]
    assert "the film number 7 is good"[output["start"] :].startswith(output["answer"])
    for flags, options in (
        ((), {}),
        (("--pooling", "first", "--normalize", "True"), dict(pooling="first", normalize=True)),
    ):
        for name in ("pretrain", "embed"):
            outputs = json_lines(embed, "--weights", runs / name, "--stdin", *flags, stdin=lines)
            expected = load(runs / name).embed(lines.splitlines(), **options)
            np.testing.assert_allclose([output["embedding"] for output in outputs], expected, atol=1e-6)
    task = read_config(runs / "embed")["run"]["task"]
    assert (task["pooling"], task["temperature"]) == ("max", 0.1)
    (words,) = json_lines(pretrain, "--run-dir", runs / "pretrain", "--fill", "the [MASK] is good")
    assert len(words) == 5
    assert set(words[0]) == {"token", "probability", "text"}


def test_one_text(runs, tmp_path):
    completed = succeed(
        classify, "--run-dir", runs / "classify", "--text", "a film", "--html", tmp_path / "a.html"
    )
    assert completed.stdout.split()[0] in ("0", "1")
    assert "[CLS]" in (tmp_path / "a.html").read_text()
    succeed(embed, "--weights", runs / "tag", "--stdin", "--similarity", tmp_path / "a.png", stdin="a\nb\n")
    assert (tmp_path / "a.png").stat().st_size > 1_000
    completed = call(embed.main, "--weights", runs / "tag", "--text", "a", "--similarity", tmp_path / "b.png")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "--similarity draws the texts of --stdin" in completed.stderr
    both = ("--weights", runs / "tag", "--stdin", "--similarity", tmp_path / "b.png", "--json")
    assert "--similarity draws a picture and prints nothing" in error_line(embed, *both, stdin="a\nb\n")


def test_masks_of_a_stream_are_filled(runs, tmp_path):
    lines = "a [MASK] is good\nthe [MASK] is [MASK]\n"
    outputs = json_lines(pretrain, "--run-dir", runs / "pretrain", "--stdin", stdin=lines)
    assert len(outputs) == 3
    assert all(len(words) == 5 and set(words[0]) == {"token", "probability", "text"} for words in outputs)
    page = tmp_path / "a.html"
    completed = succeed(
        pretrain, "--run-dir", runs / "pretrain", "--fill", "a [MASK]", "--top", 2, "--html", page
    )
    assert len(completed.stdout.split()) == 4
    assert "[MASK]" in page.read_text()


def test_unfilled_masks_keep_their_space(data, tmp_path):
    """The mask of a byte-level vocabulary includes the space before it."""
    sizes = (*SIZES[:-1], 270, "--batch-size", 8, "--steps", 1, "--context", 32)
    flags = ("--model", "roberta", "--tokenizer", "bpe", *sizes, "--run-dir", tmp_path / "run")
    succeed(pretrain, "--text", data / "text.txt", *flags)
    first, second = load(tmp_path / "run").fill("the <mask> is <mask> here", top=1)
    assert first[0].text.endswith(" is <mask> here")
    assert second[0].text.startswith("the <mask> is")


def test_trained_runs_refuse_arguments_that_are_not_lists_of_texts(runs):
    """The errors in Python have one line, as those of the commands do."""
    classifier, tagger, reader = (load(runs / name) for name in ("classify", "tag", "answer"))
    for function, message in (
        (lambda: classifier.classify([("a", "b", "c")]), "text 1 is neither a text nor a pair of texts"),
        (lambda: classifier.classify([("a",)]), "text 1 is neither a text nor a pair of texts"),
        (lambda: classifier.classify(["a", 7]), "text 2 is neither a text nor a pair of texts, but 7"),
        (lambda: classifier.embed({"a": 1}), "give a list of texts, not a dict"),
        (lambda: tagger.tag(text for text in "ab"), "give a list of texts, not a generator"),
        (lambda: tagger.tag([["a", 7]]), "text 1 is neither a text nor a pair of texts"),
        (lambda: classifier.embed(text for text in "ab"), "give a list of texts, not a generator"),
        (lambda: reader.answers(["who"]), "give pairs of a question and its text"),
        (lambda: load(runs / "pretrain").fill(["a [MASK]"]), "give one text with a mask, not a list"),
    ):
        with pytest.raises(UserError, match=message):
            function()


def test_the_page_shows_the_network_that_fills_masks():
    """ELECTRA fills masks with its generator, although a run keeps the discriminator as its model."""
    model_and_text = pretrain._fill(5).page_input
    electra = TrainedElectra("discriminator", None, None, "", "generator")
    assert model_and_text(electra, "a") == ("generator", "a")
    assert model_and_text(TrainedMaskedLM("masked", None), "a") == ("masked", "a")


@pytest.mark.filterwarnings("ignore:1 of 1 text")
def test_the_page_of_a_truncated_text_shows_the_tokens_that_were_read(runs, tmp_path):
    page = tmp_path / "a.html"
    for command, run in ((classify, "classify"), (tag, "tag"), (embed, "embed")):
        assert succeed(command, "--run-dir", runs / run, "--text", "a film " * 100, "--html", page).stdout
        limit = load(runs / run).model.config.max_length
        tokens = ["[CLS]", *(["a", "film"] * 100)[: limit - 2], "[SEP]"]
        assert json.dumps(tokens) in page.read_text()


def test_the_page_of_a_long_text_shows_the_window_with_the_answer(runs, tmp_path):
    question, text = "how is it?", " ".join(f"the film number {n} is good" for n in range(100, 140))
    page = tmp_path / "a.html"
    flags = ("--run-dir", runs / "answer", "--text", f"{question}\t{text}", "--html", page)
    output = Answer(**json_lines(answer, *flags)[0])
    run = load(runs / "answer")
    ((repeated, window),) = run.answers_in_windows([(question, text)])
    assert repeated.answer == output.answer
    (first, *_), (*_, last) = window.offsets[window.sequences == 1].T
    assert last - first < len(text) / 2
    assert first <= output.start
    assert output.start + len(output.answer) <= last
    labels = [
        f"{t} ²" if n == 1 else t
        for t, n in zip(run.processor.tokens(window.ids), window.sequences, strict=True)
    ]
    assert json.dumps(labels, ensure_ascii=False) in page.read_text()


def test_words_are_separated_only_by_spaces(runs, tmp_path):
    line = "the film number 7\u00a0000  is\tgood"
    (output,) = json_lines(tag, "--run-dir", runs / "tag", "--text", line)
    assert output["tokens"] == ["the", "film", "number", "7\u00a0000", "is", "good"]
    assert load(runs / "tag").tag([line]) == [list(zip(output["tokens"], output["tags"], strict=True))]
    page = ("--html", tmp_path / "a.html")
    succeed(tag, "--run-dir", runs / "tag", "--text", "good \u00a0 film", *page)


def test_a_run_starts_from_another_and_keeps_its_name(runs, data, tmp_path):
    flags = ("--start-from", runs / "pretrain", "--model", "bert", "--train", data / "pair.tsv", "--steps", 2)
    succeed(classify, *flags, "--run-dir", tmp_path / "run")
    (output,) = json_lines(classify, "--run-dir", tmp_path / "run", "--stdin", stdin="a film\tthe film\n")
    assert (output["text1"], output["text2"]) == ("a film", "the film")
    for line, message in (
        ("one text\n", r"separate text1 and text2 by a tab"),
        ("a\tb\tc\n", "3 column(s)"),
    ):
        assert message in error_line(classify, "--run-dir", tmp_path / "run", "--stdin", stdin=line)
    error = error_line(classify, *flags[:3], "electra", *flags[4:], "--run-dir", tmp_path / "other")
    assert "holds a bert, not a electra" in error
    assert not (tmp_path / "other").exists()


def test_bad_data(data, tmp_path):
    good = [("a film", "0"), ("a dog", "1"), ("a tree", "0")]

    def error_of(rows, header=("sentence", "label"), command=classify, **splits):
        files = {"train": write_table(tmp_path, "train", header, rows)}
        files |= {n: write_table(tmp_path, n, header, r) for n, r in splits.items()}
        flags = [word for n, path in files.items() for word in (f"--{n}", path)]
        return error_line(command, *flags, *TINY, "--run-dir", tmp_path / "run")

    assert "every label is '0': classes need two" in error_of([("a", "0"), ("b", "0")])
    assert "train.tsv, line 3: no label" in error_of([("a", "0"), ("b", " "), ("c", "1")], valid=good)
    assert "valid.tsv, line 2: no label" in error_of(good, valid=[("b", " "), ("c", "1")])
    assert "no row has a label" in error_of([("a", " "), ("b", "")])
    constant = [("a", "2.5"), ("b", "2.5")]
    assert "every score is '2.5'" in error_of(constant, header=("sentence", "score"))
    assert "the column labels has only 'x', and several labels" in error_of(
        [("a", "x"), ("b", "")], header=("sentence", "labels")
    )
    assert "the column labels is empty" in error_of([("a", ""), ("b", "")], header=("sentence", "labels"))
    assert "valid.tsv, line 2: the label '2' was not in training, which has 0, 1" in error_of(
        good, valid=[("x", "2")]
    )
    assert "test.tsv, line 3: the label 'x' was not in training" in error_of(
        good, valid=good, test=[good[0], ("a", "x")]
    )
    assert "line 3: the text has no tokens" in error_of([good[0], (" ", "1")])
    assert "line 3: the text has no tokens" in error_of([good[0], ("\u200b", "1")])
    message = "name the columns either sentence, or sentence1 and sentence2; it has"
    assert f"{message} sentence1, label" in error_of(good, header=("sentence1", "label"))
    rows = [("a", "b", n) for n in (0, 1)]
    assert f"{message} sentence, sentence2, label" in error_of(rows, header=("sentence", "sentence2", "label"))
    assert "the first line must name columns among" in error_of(good[1:], header=good[0])
    assert "line 3: 1 column(s), but the header has 2" in error_of([good[0], ("b",)])
    assert "two columns are called label" in error_of([("a", "0", "1")], header=("sentence", "label", "label"))
    assert "the score 'high' is not a number" in error_of(
        [("a", "b", "1"), ("a", "b", "high")], header=("sentence1", "sentence2", "score")
    )
    assert "no column label or labels or score to predict" in error_of([("a",), ("b",)], header=("sentence",))
    unlabeled = write_table(tmp_path, "unlabeled", ("sentence",), [("a",)])
    assert "unlabeled.tsv: no column label, which the training set has" in error_line(
        classify, "--train", data / "label.tsv", "--test", unlabeled, *TINY, "--run-dir", tmp_path / "run"
    )
    assert "the score 'nan' is not a number" in error_of(
        [("a", "b", "1"), ("c", "d", "nan")], header=("sentence1", "sentence2", "score"), command=embed
    )
    assert "line 3: the text has no tokens" in error_of(
        [("a b", "N V"), ("\u200b", "N")], header=("tokens", "tags"), command=tag, valid=[("a", "N")]
    )
    assert "a training set of one example" in error_of([("a", "1.5")], header=("sentence", "score"))
    assert "line 2: 2 word(s) and 1 tag(s)" in error_of([("a b", "N")], header=("tokens", "tags"), command=tag)
    assert "every tag is 'N': classes need two" in error_of(
        [("a b", "N N")] * 3, header=("tokens", "tags"), command=tag
    )
    assert "the tag 'Z' was not in training" in error_of(
        [("a b", "N V")] * 3, header=("tokens", "tags"), command=tag, valid=[("a", "Z")]
    )
    assert "BERT's classes are read from its pooler" in error_line(
        classify, "--train", data / "label.tsv", "--no-pooler", *TINY, "--run-dir", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()
    assert "name the examples to train on with --train" in error_line(classify, "--run-dir", tmp_path / "run")
    wrong = {"data": [{"paragraphs": [{"context": "a", "qas": [
        {"id": 1, "question": "q", "answers": [{"text": "b", "answer_start": 0}]}]}]}]}  # fmt: skip
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    assert "the answer 'b' is not at character 0 of its text" in error_line(
        answer, "--train", tmp_path / "wrong.json", *TINY
    )
    pairs = data / "pair.tsv"
    assert "pairs, but the training set has single texts" in error_line(
        classify, "--train", data / "label.tsv", "--valid", pairs, *TINY, "--run-dir", tmp_path / "run"
    )
    (tmp_path / "blank.txt").write_text(" \n")
    assert "there is no text" in error_line(pretrain, "--text", tmp_path / "blank.txt", *TINY)
    assert not (tmp_path / "run").exists()


def test_held_out_and_excluded_examples_and_the_default_run_folder(data, tmp_path, monkeypatch):
    """A run without `--run-dir` is saved in `runs/DATA-COMMAND-MODEL`."""
    monkeypatch.chdir(tmp_path)
    rows = [(f"a film {n}", f"film {n}", n % 5) for n in range(80)]
    (tmp_path / "pairs").mkdir()
    path = write_table(tmp_path / "pairs", "scored", ("sentence1", "sentence2", "score"), rows)
    flags = ("--train", path, *TINY, "--held-out", 0.25, "--min-score", 3, "--max-length", 16)
    completed = succeed(embed, *flags)
    held_out = 20
    kept = sum(float(row[2]) >= 3 for row in rows)
    assert f"{held_out} for valid" in completed.stderr
    count = int(re.search(r"(\d+) for training", completed.stderr)[1])
    assert kept - held_out <= count < kept
    assert "run folder   runs/pairs-embed-bert" in completed.stdout
    assert load("runs/pairs-embed-bert").processor.settings["max_length"] == 16
    assert "10 for training" in succeed(embed, *flags, "--examples", 10, "--run-dir", "runs/few").stderr
    shutil.rmtree("runs/few")
    succeed(tag, "--train", data / "tags.tsv", *TINY)
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"pairs-embed-bert", f"{data.name}-tag-bert"}


@pytest.mark.filterwarnings("default:.* were truncated", "default:.* have no tokens")  # shown as lines
def test_bad_use(data, runs, tmp_path):
    folder = runs / "classify"
    assert "holds a BertTagger, which cannot classify" in error_line(
        classify, "--run-dir", runs / "tag", "--text", "a"
    )
    assert "--text is empty" in error_line(classify, "--run-dir", folder, "--text", " ")
    # The command answers 512 lines at a time, and numbers lines from the start of the input.
    lines = "a film\n" * 512 + "\n"
    assert "standard input, line 513 is empty" in error_line(
        classify, "--run-dir", folder, "--stdin", stdin=lines
    )
    assert "--text and --stdin contradict" in error_line(
        classify, "--run-dir", folder, "--text", "a", "--stdin"
    )
    embedded = succeed(embed, "--weights", folder, "--stdin", stdin="a film\n\n")
    assert len(embedded.stdout.splitlines()) == 2
    assert "1 text(s) have no tokens, the first is text 2" in embedded.stderr
    assert "name the trained run with --run-dir" in error_line(classify, "--text", "a")
    assert "name the model with --weights" in error_line(embed, "--stdin", stdin="a\n")
    assert "trained on single texts: give one text" in error_line(
        classify, "--run-dir", folder, "--stdin", stdin="a film\ta dog\n"
    )
    lines = "a\n" * 513 + "\u200b\n"
    assert "standard input, lines 513 to 514: text 2: the text has no tokens" in error_line(
        classify, "--run-dir", folder, "--stdin", stdin=lines
    )
    assert "--fill and --stdin contradict" in error_line(
        pretrain, "--run-dir", runs / "pretrain", "--fill", "a [MASK]", "--stdin"
    )
    assert "a start brings its own" in error_line(
        pretrain, "--start-from", runs / "pretrain", "--tokenizer", "bpe", "--text", data / "text.txt", *TINY,
        "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert "--lowercase is for a vocabulary that is trained, and vocab.txt brings its own" in error_line(
        pretrain, "--tokenizer", "vocab.txt", "--no-lowercase", "--text", data / "text.txt"
    )
    assert "1 column(s) in " in error_line(answer, "--run-dir", runs / "answer", "--stdin", stdin="a\n")
    assert "question 1: the text has no tokens" in error_line(
        answer, "--run-dir", runs / "answer", "--stdin", stdin="where is it\t\u200b\n"
    )
    assert "--normalize scales the vectors of --text or --stdin" in error_line(
        embed, "--train", data / "pair.tsv", "--normalize", "True"
    )
    assert "no column score, which --min-score 3.0 needs" in error_line(
        embed, "--train", data / "pair.tsv", "--min-score", 3
    )
    assert "--valid and --held-out contradict each other" in error_line(
        tag, "--train", data / "tags.tsv", "--valid", data / "tags.tsv", "--held-out", 0.3
    )
    assert "--json needs a --dry-run with a --topology, or an input for a trained run" in error_line(
        tag, "--train", data / "tags.tsv", "--json"
    )
    assert "--data-dir and --splits are for a corpus tfds:NAME" in error_line(
        classify, "--train", data / "label.tsv", "--splits", "a", "b"
    )
    assert "holds a BertClassifier, which does not generate text" in error_line(
        generate, "--run-dir", folder, "--prompt", "a"
    )
    assert "--unanswerable needs --text or --stdin" in error_line(
        answer, "--train", data / "squad.json", "--unanswerable", "True", *TINY, "--run-dir", tmp_path / "run"
    )
    assert "no [MASK] in the text" in error_line(pretrain, "--run-dir", runs / "pretrain", "--fill", "a film")
    assert "which cannot fill" in error_line(pretrain, "--run-dir", folder, "--fill", "a [MASK]")
    assert "config.json: no such file" in error_line(embed, "--weights", tmp_path, "--stdin", stdin="a\n")
    assert "unknown model 't5'" in error_line(classify, "--model", "t5", "--train", data / "label.tsv")
    completed = succeed(classify, "--run-dir", folder, "--stdin", stdin="the film " * 200 + "\n")
    assert "note: 1 of 1 text(s) are longer than 128 tokens and were truncated" in completed.stderr


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (classify, ("--text", "a film", "--max-length", 9), "--max-length has no effect on a trained run"),
        (tag, ("--stdin", "--learning-rate=1e-3"), "--learning-rate has no effect on a trained run"),
        (
            answer,
            ("--text", "how is it?\ta film", "--no-lowercase"),
            "--lowercase has no effect",
        ),
        (pretrain, ("--fill", "a [MASK]", "--context", 9), "--context has no effect on a trained run"),
        (embed, ("--text", "a film", "--seed", 1), "--seed has no effect on a trained run"),
        (answer, ("--text", "how is it?\ta film", "--max-answer-length", 1, "--stride", 40), "from 0 to 24"),
        (tag, ("--text", "a film", "--mesh", "data=2"), "--mesh has no effect on a trained run"),
        (classify, ("--text", "a film", "--model", "roberta"), "which is not the --model named"),
        (
            classify,
            ("--text", "a film", "--dry-run"),
            "--dry-run plans a training, but --text",
        ),
        (pretrain, ("--fill", "a [MASK]", "--top", 0), "--top 0 must be at least 1"),
        (embed, ("--text", "a film", "--weights", "b"), "--weights and --run-dir both name the model"),
    ],
)
def test_flags_without_effect_are_refused(runs, command, flags, message):
    name = command.__name__.rpartition(".")[2]
    assert message in error_line(command, "--run-dir", runs / name, *flags, stdin="a film\n")


def test_flags_set_the_length_of_an_answer_and_the_stride(runs):
    text = "how is it?\t" + "the film number 7 is good and fine " * 9
    lengths = []
    for max_words in (1, 30):
        flags = ("--max-answer-length", max_words, "--stride", 8, "--unanswerable", "False")
        (output,) = json_lines(answer, "--run-dir", runs / "answer", "--text", text, *flags)
        lengths.append(len(output["answer"].split()))
    assert lengths[0] == 1 < lengths[1]


def test_classes_are_read_from_the_mean_of_the_states(runs, data, tmp_path):
    train = ("--start-from", runs / "pretrain", "--train", data / "label.tsv", "--no-pooler", "--steps", 2)
    mean = (*train, "--classifier-pooling", "mean", "--run-dir", tmp_path / "run")
    succeed(classify, *mean)
    run = load(tmp_path / "run")
    assert (run.model.config.classifier_pooling, run.model.encoder.pooler) == ("mean", None)
    single, *_, padded = run.classify(["a film", "the film number 7 is good " * 3, "a film"])
    assert single.probabilities == pytest.approx(padded.probabilities, abs=1e-6)
    with pytest.raises(UserError, match="a classifier with mean pooling has no published format"):
        pretrained.save(tmp_path / "folder", run.model, run.processor)
    assert "keep --pooler, or choose another --classifier-pooling" in error_line(classify, *train)
    # A start keeps its values, and its head too if the classes are the same.
    again = ("--start-from", tmp_path / "run", "--learning-rate", 0, "--steps", 1)
    completed = succeed(classify, *again, "--train", data / "label.tsv", "--run-dir", tmp_path / "same")
    assert "fresh" not in completed.stderr
    unchanged = load(tmp_path / "same")
    assert (unchanged.model.config.classifier_pooling, unchanged.model.encoder.pooler) == ("mean", None)
    np.testing.assert_array_equal(unchanged.model.head.kernel[...], run.model.head.kernel[...])
    rows = [line.split("\t") for line in (data / "label.tsv").read_text().splitlines()[1:]]
    renamed = write_table(
        tmp_path, "named", ("sentence", "label"), [(t, ("pos", "neg")[int(k)]) for t, k in rows]
    )
    completed = succeed(classify, *again, "--seed", 1, "--train", renamed, "--run-dir", tmp_path / "other")
    assert "with a new head for other classes" in completed.stderr
    head = load(tmp_path / "other").model.head.kernel[...]
    assert np.abs(head - run.model.head.kernel[...]).max() > 1e-3
    # A tagger has no classes of texts.
    succeed(tag, *again, "--train", data / "tags.tsv", "--run-dir", tmp_path / "tags")
    assert load(tmp_path / "tags").model.config.classifier_pooling == "first"
    pooling = ("--classifier-pooling", "max", "--run-dir", tmp_path / "none")
    assert "this task has none: leave it out" in error_line(tag, "--train", data / "tags.tsv", *TINY, *pooling)
    assert "this task has none: leave it out" in error_line(pretrain, "--text", data / "text.txt", *pooling)


def test_flags_that_contradict_a_start(runs, data, tmp_path):
    train = ("--start-from", runs / "pretrain", "--train", data / "label.tsv", "--run-dir", tmp_path / "run")
    message = "has positions for 128 tokens: --max-length 384 is above them"
    assert message in error_line(classify, *train, "--max-length", 384)
    assert "a start brings its own: leave it out" in error_line(classify, *train, "--preset", "tiny")
    assert "--lowercase is for a vocabulary that is trained" in error_line(classify, *train, "--no-lowercase")


def test_pretraining_continues_with_the_model_of_its_start(runs, data, tmp_path):
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--learning-rate", 0, "--steps", 1)
    start = ("--start-from", runs / "pretrain")
    succeed(pretrain, *start, *text, "--run-dir", tmp_path / "run")
    old, new = (named_leaves(load(folder).model) for folder in (runs / "pretrain", tmp_path / "run"))
    assert old.keys() == new.keys()
    for name, leaf in new.items():
        np.testing.assert_array_equal(leaf, old[name], err_msg=name)
    assert "do not belong together" in error_line(
        pretrain, *start, *text, "--vocab-size", 60, "--run-dir", tmp_path / "other"
    )
    assert "does not fit: " in error_line(
        pretrain, *start, *text, "--vocab-size", 900, "--run-dir", tmp_path / "other"
    )
    for flags, message in (
        (("--preset", "tiny"), "a start brings its own: leave it out"),
        (("--no-lowercase",), "--lowercase is for a vocabulary that is trained"),
        (("--splits", "a", "b"), "--data-dir and --splits are for a corpus tfds:NAME"),
        (("--context", 10), "--context 10 is too short for next sentences: two texts need 11 tokens"),
        (("--token-types", 1), "--next-sentence needs two --token-types"),
        (("--model", "roberta"), "holds a bert, not a roberta: leave --model out"),
        (("--model", "electra"), "holds a Bert: this needs a model of electra"),
    ):
        assert message in error_line(pretrain, *start, *text, *flags, "--run-dir", tmp_path / "other")


def test_pretraining_continues_from_a_masked_lm_without_a_pooler(runs, data, tmp_path):
    run = load(runs / "classify")
    config = dataclasses.replace(run.model.config, pooler=False, classes=0)
    model = BertMaskedLM(config, rngs=nnx.Rngs(0))
    pretrained.save(tmp_path / "published", model, run.processor)
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--steps", 1)
    flags = ("--start-from", tmp_path / "published", *text)
    succeed(pretrain, *flags, "--run-dir", tmp_path / "run")
    assert "encoder/pooler/kernel" not in named_leaves(load(tmp_path / "run").model)
    succeed(pretrain, *flags, "--pooler", "--next-sentence", "--run-dir", tmp_path / "pairs")
    assert "encoder/pooler/kernel" in named_leaves(load(tmp_path / "pairs").model)


def test_pretraining_drops_the_labels_and_settings_of_a_classifier(runs, data, tmp_path):
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--steps", 1)
    succeed(pretrain, "--start-from", runs / "classify", *text, "--run-dir", tmp_path / "run")
    old, new = (load(folder).processor for folder in (runs / "classify", tmp_path / "run"))
    assert old.labels
    assert old.settings
    assert (new.labels, new.settings) == ((), {})


def test_labels_of_a_run_that_starts_from_another(runs, data, tmp_path):
    """Names of classes may be numbers; a tagger keeps tags that are missing in the new data."""
    rows = [(f"a film {n}", n % 3) for n in range(30)]
    three = write_table(tmp_path, "three", ("sentence", "label"), rows)
    succeed(classify, "--train", three, *TINY, "--run-dir", tmp_path / "three")
    flags = ("--start-from", tmp_path / "three", "--train", data / "label.tsv", "--steps", 1)
    succeed(classify, *flags, "--run-dir", tmp_path / "two")
    assert load(tmp_path / "two").processor.labels == ("0", "1")
    few = write_table(tmp_path, "few", ("tokens", "tags"), [("the film", "D N")] * 30)
    flags = ("--start-from", runs / "tag", "--train", few, "--steps", 1)
    succeed(tag, *flags, "--run-dir", tmp_path / "tags")
    assert load(tmp_path / "tags").processor.labels == load(runs / "tag").processor.labels


def test_flags_without_effect_on_pretraining_are_refused(data, tmp_path):
    text = ("--text", data / "text.txt", *SIZES)
    for flags, message in (
        (("--top", 3), "--top is the number of words that --fill or --stdin prints"),
        (("--classes", 5), "--classes 5: pretraining has none"),
        (("--model", "distilbert", "--next-sentence"), "--next-sentence needs a model with a pooler"),
    ):
        assert message in error_line(pretrain, *text, *flags, "--run-dir", tmp_path / "run")
    (tmp_path / "chinese.txt").write_text("\u4f60\u597d\n")
    flags = ("--valid", tmp_path / "chinese.txt", "--model", "roberta", "--run-dir", tmp_path / "run")
    assert "the validation text has no token to predict" in error_line(pretrain, *text, *flags)


def test_pretraining_recognises_an_electra_by_its_folder(data, tmp_path):
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--learning-rate", 0)
    # A published folder contains only the discriminator. The new generator has a quarter of its heads,
    # but at least one.
    sizes = ("--model", "electra", *SIZES, "--generator-size", 1)
    first = (*sizes, *text, "--steps", 2, "--run-dir", tmp_path / "first")
    succeed(pretrain, *first)
    electra = load(tmp_path / "first")
    pretrained.save(tmp_path / "published", electra.model, electra.processor)
    for start, share in (("first", 1), ("published", 0.5)):
        run = tmp_path / f"from {start}"
        succeed(pretrain, "--start-from", f"{tmp_path}/{start}", *text, "--steps", 1, "--run-dir", run)
        assert read_config(run)["task"] == "replaced_token_detection"
        assert read_config(run)["model_config"]["generator_size"] == share
        new, old = (named_leaves(trained.model) for trained in (load(run), electra))
        assert new.keys() == old.keys()
        for name, leaf in new.items():
            np.testing.assert_array_equal(leaf, old[name], err_msg=name)
    pretrained.save(tmp_path / "generator", electra.generator, electra.processor)
    flags = ("--start-from", tmp_path / "generator", "--steps", 1, "--run-dir")
    message = error_line(pretrain, *text, *flags, tmp_path / "run")
    assert "holds a generator, but a pretraining starts from a discriminator" in message
    succeed(classify, "--train", data / "label.tsv", *flags, tmp_path / "classes")


@pytest.mark.parametrize(
    ("command", "file"), others_soak([(classify, "label.tsv"), (embed, "pair.tsv")], (embed, "pair.tsv"))
)
def test_a_run_resumes_without_the_folder_of_its_start(runs, data, tmp_path, command, file):
    start = tmp_path / "start"
    shutil.copytree(runs / "pretrain", start)
    again = ("--start-from", start, "--train", data / file, "--batch-size", 8, "--steps", 4)
    succeed(command, *again, "--run-dir", tmp_path / "run")
    first = json.loads((tmp_path / "run/results.json").read_text())
    start.rename(tmp_path / "elsewhere")
    succeed(command, *again, "--run-dir", tmp_path / "run")
    second = json.loads((tmp_path / "run/results.json").read_text())
    assert {n for n in first if first[n] != second[n]} <= {"seconds"}
    assert "no such file" in error_line(command, *again, "--preset", "large", "--run-dir", tmp_path / "run")
    # A new run needs the folder.
    assert "no such file" in error_line(command, *again, "--run-dir", tmp_path / "new")
    assert "no such file" in error_line(command, *again, "--model", "electra", "--run-dir", tmp_path / "run")
    assert "--learning-rate is 5e-05 there" in error_line(
        command, *again, "--learning-rate", 1, "--run-dir", tmp_path / "run"
    )


def test_a_vocabulary_of_another_model(runs, data, tmp_path):
    """The tokenizer of the published folder has more tokens than the embedding table has rows."""
    from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
    from transformer_jax.pretrained import save

    run = load(runs / "pretrain")
    texts = [f"some{n}thing quite{n} other" for n in range(90)]
    save(tmp_path / "odd", run.model, EncoderTokenizer.wordpiece(texts, 200))
    message = error_line(
        classify, "--start-from", tmp_path / "odd", "--train", data / "label.tsv", "--run-dir", tmp_path / "run"
    )
    assert "do not belong together" in message
    assert not (tmp_path / "run").exists()


def test_truncated_texts_are_counted(data, tmp_path):
    rows = [(f"the film {n} " * 30 + WORDS[n % 2], n % 2) for n in range(12)]
    path = write_table(tmp_path, "long", ("sentence", "label"), rows)
    completed = succeed(classify, "--train", path, *TINY, "--max-length", 16, "--run-dir", tmp_path / "run")
    assert (
        "11 of 11 training texts are longer than 16 tokens and were truncated"
        in completed.stdout + completed.stderr
    )
    assert "1 of 1 validation texts are longer" in completed.stdout + completed.stderr


@pytest.mark.parametrize("command", others_soak([pretrain, classify, tag, answer, embed], answer))
def test_a_plan_needs_no_data(command, tmp_path):
    completed = succeed(command, *TINY, "--dry-run", "--run-dir", tmp_path / "run")
    assert "parameters" in completed.stdout
    assert not (tmp_path / "run").exists()
    assert "--learning-rate" in call(command.main, "--help").stdout
