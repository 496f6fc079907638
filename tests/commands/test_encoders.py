"""pretrain, classify, tag, answer and embed as users run them, and the line that answers each bad input."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from flax import nnx

from tests.cases import others_long
from tests.commands.in_process import call
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


def table(folder, name, header, rows):
    path = folder / f"{name}.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in [header, *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = [(f"the film number {rng.integers(99)} is {WORDS[n % 2]}", n % 2) for n in range(40)]
    table(folder, "label", ("sentence", "label"), rows)
    table(folder, "pair", ("sentence1", "sentence2", "label"), [(t, t, k) for t, k in rows])
    table(folder, "tags", ("tokens", "tags"), [(t, "D N N N V J") for t, _ in rows])
    context = "the film number 7 is good"
    asked = [
        {"id": n, "question": "how is it?", "answers": [{"text": "good", "answer_start": 21}]}
        for n in range(12)
    ]
    content = {
        "data": [{"paragraphs": [{"context": f"{context} {n}", "qas": asked[n : n + 1]} for n in range(12)]}]
    }
    (folder / "squad.json").write_text(json.dumps(content))
    (folder / "text.txt").write_text("\n\n".join(" ".join(t for t, _ in rows[n:]) for n in range(30)))
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The folder of each command's run."""
    root = tmp_path_factory.mktemp("runs")
    jobs = {
        "pretrain": (pretrain, ("--text", data / "text.txt", "--context", 32)),
        "classify": (classify, ("--train", data / "label.tsv")),
        "tag": (tag, ("--train", data / "tags.tsv")),
        "answer": (answer, ("--train", data / "squad.json", "--max-length", 48, "--stride", 4)),
        "embed": (embed, ("--train", data / "pair.tsv", "--pooling", "max", "--temperature", 0.1)),
    }
    for name, (command, flags) in jobs.items():
        done = call(command.main, *flags, *TINY, "--run-dir", root / name)
        assert done.returncode == 0, done.stderr
        assert f"run folder   {root / name}" in done.stdout
    return root


def objects(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_a_line_of_json_holds(runs):
    lines = "the film is good\nthe film is bad\n"
    found = objects(call(classify.main, "--run-dir", runs / "classify", "--stdin", "--json", stdin=lines))
    assert [one["text"] for one in found] == lines.splitlines()
    for one in found:
        assert list(one) == ["text", "label", "probabilities"]
        assert list(one["probabilities"]) == ["0", "1"]
        assert one["label"] == max(one["probabilities"], key=one["probabilities"].get)
    found = objects(call(tag.main, "--run-dir", runs / "tag", "--stdin", "--json", stdin=lines))
    assert found[0]["tokens"] == ["the", "film", "is", "good"]
    assert len(found[0]["tags"]) == 4
    asked = "how is it?\tthe film number 7 is good\n"
    (found,) = objects(call(answer.main, "--run-dir", runs / "answer", "--stdin", "--json", stdin=asked))
    assert list(found)[-3:] == ["answer", "start", "score"]
    assert "the film number 7 is good"[found["start"] :].startswith(found["answer"])
    for flags, how in (
        ((), {}),
        (("--pooling", "first", "--normalise", "True"), dict(pooling="first", normalise=True)),
    ):
        for name in ("pretrain", "embed"):
            asked = ("--weights", runs / name, "--stdin", "--json", *flags)
            found = objects(call(embed.main, *asked, stdin=lines))
            expected = load(runs / name).embed(lines.splitlines(), **how)
            np.testing.assert_allclose([one["embedding"] for one in found], expected, atol=1e-6)
    task = read_config(runs / "embed")["run"]["task"]
    assert (task["pooling"], task["temperature"]) == ("max", 0.1)
    (words,) = objects(
        call(pretrain.main, "--run-dir", runs / "pretrain", "--fill", "the [MASK] is good", "--json")
    )
    assert len(words) == 5
    assert set(words[0]) == {"token", "probability", "text"}


def test_one_text(runs, tmp_path):
    done = call(
        classify.main, "--run-dir", runs / "classify", "--text", "a film", "--html", tmp_path / "a.html"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in ("0", "1")
    assert "[CLS]" in (tmp_path / "a.html").read_text()
    done = call(
        embed.main, "--weights", runs / "tag", "--stdin", "--similarity", tmp_path / "a.png", stdin="a\nb\n"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").stat().st_size > 1_000
    alone = call(embed.main, "--weights", runs / "tag", "--text", "a", "--similarity", tmp_path / "b.png")
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "--similarity draws the texts of --stdin" in alone.stderr
    both = ("--weights", runs / "tag", "--stdin", "--similarity", tmp_path / "b.png", "--json")
    assert "--similarity draws a picture and prints nothing" in refused(embed, *both, stdin="a\nb\n")


def test_masks_of_a_stream_are_filled(runs, tmp_path):
    lines = "a [MASK] is good\nthe [MASK] is [MASK]\n"
    found = objects(call(pretrain.main, "--run-dir", runs / "pretrain", "--stdin", "--json", stdin=lines))
    assert len(found) == 3
    assert all(len(words) == 5 and set(words[0]) == {"token", "probability", "text"} for words in found)
    page = tmp_path / "a.html"
    done = call(pretrain.main, "--run-dir", runs / "pretrain", "--fill", "a [MASK]", "--top", 2, "--html", page)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 4
    assert "[MASK]" in page.read_text()


def test_the_masks_that_remain_keep_their_space(data, tmp_path):
    """A byte-level vocabulary's mask takes the space before it."""
    sizes = (*SIZES[:-1], 270, "--batch-size", 8, "--steps", 1, "--context", 32)
    flags = ("--model", "roberta", "--tokenizer", "bpe", *sizes, "--run-dir", tmp_path / "run")
    done = call(pretrain.main, "--text", data / "text.txt", *flags)
    assert done.returncode == 0, done.stderr
    first, second = load(tmp_path / "run").fill("the <mask> is <mask> here", top=1)
    assert first[0].text.endswith(" is <mask> here")
    assert second[0].text.startswith("the <mask> is")


def test_what_is_no_list_of_texts_is_refused(runs):
    """In Python, in one line as in the command."""
    classifier, tagger, reader = (load(runs / name) for name in ("classify", "tag", "answer"))
    for call_it, message in (
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
            call_it()


def test_the_page_is_of_the_network_that_fills_masks_in():
    """Of ELECTRA the generator, though the discriminator is what a run is for."""
    shown = pretrain._fill(5).shown
    assert shown(TrainedElectra("discriminator", None, None, "", "generator"), "a") == ("generator", "a")
    assert shown(TrainedMaskedLM("masked", None), "a") == ("masked", "a")


@pytest.mark.filterwarnings("ignore:1 of 1 text")
def test_the_page_of_a_text_that_was_cut_shows_what_was_read(runs, tmp_path):
    page = tmp_path / "a.html"
    for main, run in ((classify.main, "classify"), (tag.main, "tag"), (embed.main, "embed")):
        flags = ("--run-dir", runs / run, "--text", "a film " * 100, "--html", page)
        done = call(main, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        limit = load(runs / run).model.config.max_length
        read = ["[CLS]", *(["a", "film"] * 100)[: limit - 2], "[SEP]"]
        assert json.dumps(read) in page.read_text()


def test_the_page_of_a_long_text_shows_the_window_that_holds_the_answer(runs, tmp_path):
    question, text = "how is it?", " ".join(f"the film number {n} is good" for n in range(100, 140))
    page = tmp_path / "a.html"
    flags = ("--run-dir", runs / "answer", "--text", f"{question}\t{text}", "--html", page, "--json")
    found = Answer(**json.loads(call(answer.main, *flags).stdout))
    run = load(runs / "answer")
    ((again, window),) = run.answers_in_windows([(question, text)])
    assert again.answer == found.answer
    (first, *_), (*_, last) = window.offsets[window.sequences == 1].T
    assert last - first < len(text) / 2
    assert first <= found.start
    assert found.start + len(found.answer) <= last
    shown = [
        f"{t} ²" if n == 1 else t
        for t, n in zip(run.processor.tokens(window.ids), window.sequences, strict=True)
    ]
    assert json.dumps(shown, ensure_ascii=False) in page.read_text()


def test_words_are_parted_by_spaces_alone(runs, tmp_path):
    line = "the film number 7\u00a0000  is\tgood"
    (found,) = objects(call(tag.main, "--run-dir", runs / "tag", "--text", line, "--json"))
    assert found["tokens"] == ["the", "film", "number", "7\u00a0000", "is", "good"]
    assert load(runs / "tag").tag([line]) == [list(zip(found["tokens"], found["tags"], strict=True))]
    page = ("--html", tmp_path / "a.html")
    done = call(tag.main, "--run-dir", runs / "tag", "--text", "good \u00a0 film", *page)
    assert done.returncode == 0, done.stderr


def test_a_run_starts_from_another_and_keeps_its_name(runs, data, tmp_path):
    flags = ("--start-from", runs / "pretrain", "--model", "bert", "--train", data / "pair.tsv", "--steps", 2)
    done = call(classify.main, *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (found,) = objects(
        call(classify.main, "--run-dir", tmp_path / "run", "--stdin", "--json", stdin="a film\tthe film\n")
    )
    assert (found["text1"], found["text2"]) == ("a film", "the film")
    for line, message in (
        ("one text\n", r"1 column(s): give text1 and text2 with a tab between them"),
        ("a\tb\tc\n", "3 column(s)"),
    ):
        done = call(classify.main, "--run-dir", tmp_path / "run", "--stdin", stdin=line)
        assert done.returncode == 2
        assert message in done.stderr
    done = call(classify.main, *flags[:3], "electra", *flags[4:], "--run-dir", tmp_path / "other")
    assert done.returncode == 2
    assert "holds a bert, not a electra" in done.stderr
    assert not (tmp_path / "other").exists()


def refused(command, *flags, stdin=""):
    """The one line that a command ends with."""
    done = call(command.main, *flags, stdin=stdin)
    assert done.returncode == 2, done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    return errors[0]


def test_bad_data(data, tmp_path):
    good = [("a film", "0"), ("a dog", "1"), ("a tree", "0")]

    def with_rows(rows, header=("sentence", "label"), command=classify, **others):
        files = {"train": table(tmp_path, "train", header, rows)}
        files |= {n: table(tmp_path, n, header, r) for n, r in others.items()}
        flags = [word for n, path in files.items() for word in (f"--{n}", path)]
        return refused(command, *flags, *TINY, "--run-dir", tmp_path / "run")

    assert "every label is '0': classes need two" in with_rows([("a", "0"), ("b", "0")])
    assert "train.tsv, line 3: no label" in with_rows([("a", "0"), ("b", " "), ("c", "1")], valid=good)
    assert "valid.tsv, line 2: no label" in with_rows(good, valid=[("b", " "), ("c", "1")])
    assert "no row has a label" in with_rows([("a", " "), ("b", "")])
    same = [("a", "2.5"), ("b", "2.5")]
    assert "every score is '2.5'" in with_rows(same, header=("sentence", "score"))
    assert "the column labels has 'x' alone, and several labels" in with_rows(
        [("a", "x"), ("b", "")], header=("sentence", "labels")
    )
    assert "the column labels is empty" in with_rows([("a", ""), ("b", "")], header=("sentence", "labels"))
    assert "valid.tsv, line 2: the label '2' was not in training, which has 0, 1" in with_rows(
        good, valid=[("x", "2")]
    )
    assert "test.tsv, line 3: the label 'x' was not in training" in with_rows(
        good, valid=good, test=[good[0], ("a", "x")]
    )
    assert "line 3: a text of no tokens" in with_rows([good[0], (" ", "1")])
    assert "line 3: a text of no tokens" in with_rows([good[0], ("\u200b", "1")])
    message = "no column sentence alone, nor sentence1 and sentence2; it has"
    assert f"{message} sentence1, label" in with_rows(good, header=("sentence1", "label"))
    rows = [("a", "b", n) for n in (0, 1)]
    assert f"{message} sentence, sentence2, label" in with_rows(rows, header=("sentence", "sentence2", "label"))
    assert "no header in the first line" in with_rows(good[1:], header=good[0])
    assert "line 3: 1 column(s) where the header has 2" in with_rows([good[0], ("b",)])
    assert "two columns are called label" in with_rows([("a", "0", "1")], header=("sentence", "label", "label"))
    assert "the score 'high' is not a number" in with_rows(
        [("a", "b", "1"), ("a", "b", "high")], header=("sentence1", "sentence2", "score")
    )
    assert "no column label or labels or score to predict" in with_rows([("a",), ("b",)], header=("sentence",))
    unlabelled = table(tmp_path, "unlabelled", ("sentence",), [("a",)])
    assert "unlabelled.tsv: no column label, which the training set has" in refused(
        classify, "--train", data / "label.tsv", "--test", unlabelled, *TINY, "--run-dir", tmp_path / "run"
    )
    assert "the score 'nan' is not a number" in with_rows(
        [("a", "b", "1"), ("c", "d", "nan")], header=("sentence1", "sentence2", "score"), command=embed
    )
    assert "line 3: a text of no tokens" in with_rows(
        [("a b", "N V"), ("\u200b", "N")], header=("tokens", "tags"), command=tag, valid=[("a", "N")]
    )
    assert "a training set of one example" in with_rows([("a", "1.5")], header=("sentence", "score"))
    assert "line 2: 2 word(s) and 1 tag(s)" in with_rows([("a b", "N")], header=("tokens", "tags"), command=tag)
    assert "every tag is 'N': classes need two" in with_rows(
        [("a b", "N N")] * 3, header=("tokens", "tags"), command=tag
    )
    assert "the tag 'Z' was not in training" in with_rows(
        [("a b", "N V")] * 3, header=("tokens", "tags"), command=tag, valid=[("a", "Z")]
    )
    assert "BERT's classes are read from its pooler" in refused(
        classify, "--train", data / "label.tsv", "--no-pooler", *TINY, "--run-dir", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()
    assert "name the examples to train on with --train" in refused(classify, "--run-dir", tmp_path / "run")
    wrong = {"data": [{"paragraphs": [{"context": "a", "qas": [
        {"id": 1, "question": "q", "answers": [{"text": "b", "answer_start": 0}]}]}]}]}  # fmt: skip
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    assert "the answer 'b' is not at character 0 of its text" in refused(
        answer, "--train", tmp_path / "wrong.json", *TINY
    )
    pairs = data / "pair.tsv"
    assert "pairs, where the training set has single texts" in refused(
        classify, "--train", data / "label.tsv", "--valid", pairs, *TINY, "--run-dir", tmp_path / "run"
    )
    (tmp_path / "blank.txt").write_text(" \n")
    assert "no text in it" in refused(pretrain, "--text", tmp_path / "blank.txt", *TINY)
    assert not (tmp_path / "run").exists()


def test_what_is_held_out_and_left_out(data, tmp_path, monkeypatch):
    """And where a run is kept that names no folder: beside the others, by its data, command and model."""
    monkeypatch.chdir(tmp_path)
    rows = [(f"a film {n}", f"film {n}", n % 5) for n in range(80)]
    (tmp_path / "pairs").mkdir()
    path = table(tmp_path / "pairs", "scored", ("sentence1", "sentence2", "score"), rows)
    flags = ("--train", path, *TINY, "--held-out", 0.25, "--least-score", 3, "--max-length", 16)
    done = call(embed.main, *flags)
    assert done.returncode == 0, done.stderr
    held = 20
    kept = sum(float(row[2]) >= 3 for row in rows)
    assert f"{held} for valid" in done.stderr
    count = int(re.search(r"(\d+) for training", done.stderr)[1])
    assert kept - held <= count < kept
    assert "run folder   runs/pairs-embed-bert" in done.stdout
    assert load("runs/pairs-embed-bert").processor.settings["max_length"] == 16
    few = call(embed.main, *flags, "--examples", 10, "--run-dir", "runs/few")
    assert "10 for training" in few.stderr
    shutil.rmtree("runs/few")
    few = ("--max-length", 48, "--stride", 4)
    for command, flags in ((classify, ("label.tsv",)), (tag, ("tags.tsv",)), (answer, ("squad.json", *few))):
        assert call(command.main, "--train", data / flags[0], *flags[1:], *TINY).returncode == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {
        "pairs-embed-bert", f"{data.name}-classify-bert", f"{data.name}-tag-bert", f"{data.name}-answer-bert"
    }  # fmt: skip


@pytest.mark.filterwarnings("default:.* were cut")  # the command shows it as a line
def test_bad_use(data, runs, tmp_path):
    folder = runs / "classify"
    assert "holds a BertTagger, which does not classify" in refused(
        classify, "--run-dir", runs / "tag", "--text", "a"
    )
    assert "--text is empty" in refused(classify, "--run-dir", folder, "--text", " ")
    # Lines are answered 512 together, and counted from the first one on.
    lines = "a film\n" * 512 + "\n"
    assert "standard input, line 513 is empty" in refused(classify, "--run-dir", folder, "--stdin", stdin=lines)
    assert "--text and --stdin contradict" in refused(classify, "--run-dir", folder, "--text", "a", "--stdin")
    assert "name the trained run with --run-dir" in refused(classify, "--text", "a")
    assert "name the model with --weights" in refused(embed, "--stdin", stdin="a\n")
    assert "trained on single texts: give one text" in refused(
        classify, "--run-dir", folder, "--stdin", stdin="a film\ta dog\n"
    )
    lines = "a\n" * 513 + "\u200b\n"
    assert "standard input, lines 513 to 514: text 2: a text of no tokens" in refused(
        embed, "--weights", folder, "--stdin", stdin=lines
    )
    assert "--fill and --stdin contradict" in refused(
        pretrain, "--run-dir", runs / "pretrain", "--fill", "a [MASK]", "--stdin"
    )
    assert "a start brings its own" in refused(
        pretrain, "--start-from", runs / "pretrain", "--tokenizer", "bpe", "--text", data / "text.txt", *TINY,
        "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert "--lowercase is for a vocabulary that is trained, and vocab.txt brings its own" in refused(
        pretrain, "--tokenizer", "vocab.txt", "--no-lowercase", "--text", data / "text.txt"
    )
    assert "1 column(s): give " in refused(answer, "--run-dir", runs / "answer", "--stdin", stdin="a\n")
    assert "question 1: a text of no tokens" in refused(
        answer, "--run-dir", runs / "answer", "--stdin", stdin="where is it\t\u200b\n"
    )
    assert "--normalise is for the vectors of --text or --stdin" in refused(
        embed, "--train", data / "pair.tsv", "--normalise", "True"
    )
    assert "no column score, of which --least-score 3.0 is" in refused(
        embed, "--train", data / "pair.tsv", "--least-score", 3
    )
    assert "--valid and --held-out contradict each other" in refused(
        tag, "--train", data / "tags.tsv", "--valid", data / "tags.tsv", "--held-out", 0.3
    )
    assert "--json is for a --dry-run with a --topology, or for what a trained run answers" in refused(
        tag, "--train", data / "tags.tsv", "--json"
    )
    assert "--data-dir and --splits are for a corpus tfds:NAME" in refused(
        classify, "--train", data / "label.tsv", "--splits", "a", "b"
    )
    assert "holds a BertClassifier, which continues no text" in refused(
        generate, "--run-dir", folder, "--prompt", "a"
    )
    assert "--unanswerable goes with --text or --stdin" in refused(
        answer, "--train", data / "squad.json", "--unanswerable", "True", *TINY, "--run-dir", tmp_path / "run"
    )
    assert "no [MASK] in the text" in refused(pretrain, "--run-dir", runs / "pretrain", "--fill", "a film")
    assert "which does not fill anything in" in refused(pretrain, "--run-dir", folder, "--fill", "a [MASK]")
    assert "config.json: no such file" in refused(embed, "--weights", tmp_path, "--stdin", stdin="a\n")
    assert "unknown model 't5'" in refused(classify, "--model", "t5", "--train", data / "label.tsv")
    done = call(classify.main, "--run-dir", folder, "--stdin", stdin="the film " * 200 + "\n")
    assert done.returncode == 0
    assert "note: 1 of 1 text(s) are longer than 128 tokens and were cut" in done.stderr


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (classify, ("--text", "a film", "--max-length", 9), "--max-length is for training"),
        (tag, ("--stdin", "--learning-rate=1e-3"), "--learning-rate is for training"),
        (answer, ("--text", "how is it?\ta film", "--no-lowercase"), "--lowercase is for training"),
        (pretrain, ("--fill", "a [MASK]", "--context", 9), "--context is for training"),
        (embed, ("--text", "a film", "--seed", 1), "--seed is for training"),
        (answer, ("--text", "how is it?\ta film", "--longest", 1, "--stride", 40), "from 0 to 24"),
        (tag, ("--text", "a film", "--mesh", "data=2"), "--mesh is for training"),
        (classify, ("--text", "a film", "--model", "roberta"), "which is no --model of that name"),
        (classify, ("--text", "a film", "--dry-run"), "--dry-run plans a training, and --text or --stdin is"),
        (pretrain, ("--fill", "a [MASK]", "--top", 0), "--top 0 must be at least 1"),
        (embed, ("--text", "a film", "--weights", "b"), "--weights and --run-dir both name the model"),
    ],
)
def test_flags_without_effect_are_refused(runs, command, flags, message):
    name = command.__name__.rpartition(".")[2]
    assert message in refused(command, "--run-dir", runs / name, *flags, stdin="a film\n")


def test_the_length_of_an_answer_and_the_stride_are_chosen(runs):
    text = "how is it?\t" + "the film number 7 is good and fine " * 9
    lengths = []
    for longest in (1, 30):
        flags = ("--longest", longest, "--stride", 8, "--unanswerable", "False", "--json")
        done = call(answer.main, "--run-dir", runs / "answer", "--text", text, *flags)
        lengths.append(len(json.loads(done.stdout)["answer"].split()))
    assert lengths[0] == 1 < lengths[1]


def test_classes_are_read_from_the_mean_of_the_states(runs, data, tmp_path):
    train = ("--start-from", runs / "pretrain", "--train", data / "label.tsv", "--no-pooler", "--steps", 2)
    mean = (*train, "--classifier-pooling", "mean", "--run-dir", tmp_path / "run")
    done = call(classify.main, *mean)
    assert done.returncode == 0, done.stderr
    run = load(tmp_path / "run")
    assert (run.model.config.classifier_pooling, run.model.encoder.pooler) == ("mean", None)
    alone, *_, beside = run.classify(["a film", "the film number 7 is good " * 3, "a film"])
    assert alone.probabilities == pytest.approx(beside.probabilities, abs=1e-6)
    with pytest.raises(UserError, match="a classifier with mean pooling has no published format"):
        pretrained.save(tmp_path / "folder", run.model, run.processor)
    assert "--pooler off, or choose another --classifier-pooling" in refused(classify, *train)
    # A start goes on as it was, and so does its head for the same classes alone.
    again = ("--start-from", tmp_path / "run", "--learning-rate", 0, "--steps", 1)
    done = call(classify.main, *again, "--train", data / "label.tsv", "--run-dir", tmp_path / "same")
    assert "fresh" not in done.stderr
    same = load(tmp_path / "same")
    assert (same.model.config.classifier_pooling, same.model.encoder.pooler) == ("mean", None)
    np.testing.assert_array_equal(same.model.head.kernel[...], run.model.head.kernel[...])
    rows = [line.split("\t") for line in (data / "label.tsv").read_text().splitlines()[1:]]
    named = table(tmp_path, "named", ("sentence", "label"), [(t, ("pos", "neg")[int(k)]) for t, k in rows])
    done = call(classify.main, *again, "--seed", 1, "--train", named, "--run-dir", tmp_path / "other")
    assert "its head begins fresh, for other classes" in done.stderr
    head = load(tmp_path / "other").model.head.kernel[...]
    assert np.abs(head - run.model.head.kernel[...]).max() > 1e-3
    # A tagger has no classes of texts.
    done = call(tag.main, *again, "--train", data / "tags.tsv", "--run-dir", tmp_path / "tags")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "tags").model.config.classifier_pooling == "first"
    pooling = ("--classifier-pooling", "max", "--run-dir", tmp_path / "none")
    assert "this task has none of" in refused(tag, "--train", data / "tags.tsv", *TINY, *pooling)
    assert "this task has none of" in refused(pretrain, "--text", data / "text.txt", *pooling)


def test_texts_longer_than_the_positions_of_a_start_are_refused(runs, data, tmp_path):
    train = ("--start-from", runs / "pretrain", "--train", data / "label.tsv", "--max-length", 384)
    message = refused(classify, *train, "--run-dir", tmp_path / "run")
    assert "has positions for 128 tokens: --max-length 384 is above them" in message


def test_sizes_and_case_beside_a_start_are_refused(runs, data):
    train = ("--start-from", runs / "pretrain", "--train", data / "label.tsv")
    assert "a start brings its own: leave it out" in refused(classify, *train, "--preset", "tiny")
    assert "--lowercase is for a vocabulary that is trained" in refused(classify, *train, "--no-lowercase")


def test_pretraining_goes_on_with_the_model_of_its_start(runs, data, tmp_path):
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--learning-rate", 0, "--steps", 1)
    start = ("--start-from", runs / "pretrain")
    done = call(pretrain.main, *start, *text, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    old, new = (named_leaves(load(folder).model) for folder in (runs / "pretrain", tmp_path / "run"))
    assert old.keys() == new.keys()
    for name, leaf in new.items():
        np.testing.assert_array_equal(leaf, old[name], err_msg=name)
    assert "do not belong together" in refused(
        pretrain, *start, *text, "--vocab-size", 60, "--run-dir", tmp_path / "other"
    )
    assert "does not fit: " in refused(
        pretrain, *start, *text, "--vocab-size", 900, "--run-dir", tmp_path / "other"
    )
    for flags, message in (
        (("--preset", "tiny"), "a start brings its own: leave it out"),
        (("--no-lowercase",), "--lowercase is for a vocabulary that is trained"),
        (("--splits", "a", "b"), "--data-dir and --splits are for a corpus tfds:NAME"),
        (("--context", 10), "--context 10 is too short for next sentences: two texts need 11 tokens"),
        (("--token-types", 1), "--next-sentence needs two --token-types"),
        (("--model", "roberta"), "holds a bert, not a roberta: leave --model out"),
        (("--model", "electra"), "holds a model of BertConfig: this task takes electra"),
    ):
        assert message in refused(pretrain, *start, *text, *flags, "--run-dir", tmp_path / "other")


def test_pretraining_goes_on_from_a_masked_lm_without_a_pooler(runs, data, tmp_path):
    run = load(runs / "classify")
    config = dataclasses.replace(run.model.config, pooler=False, classes=0)
    model = BertMaskedLM(config, rngs=nnx.Rngs(0))
    pretrained.save(tmp_path / "published", model, run.processor)
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--steps", 1)
    flags = ("--start-from", tmp_path / "published", *text)
    done = call(pretrain.main, *flags, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "encoder/pooler/kernel" not in named_leaves(load(tmp_path / "run").model)
    done = call(pretrain.main, *flags, "--pooler", "--next-sentence", "--run-dir", tmp_path / "pairs")
    assert done.returncode == 0, done.stderr
    assert "encoder/pooler/kernel" in named_leaves(load(tmp_path / "pairs").model)


def test_pretraining_keeps_no_labels(runs, data, tmp_path):
    """Nor how a classifier's texts were read."""
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--steps", 1)
    done = call(pretrain.main, "--start-from", runs / "classify", *text, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    old, new = (load(folder).processor for folder in (runs / "classify", tmp_path / "run"))
    assert old.labels
    assert old.settings
    assert (new.labels, new.settings) == ((), {})


def test_a_head_of_more_classes_begins_fresh(runs, data, tmp_path):
    """Of classes, whose names may be numbers; a tagger keeps the tags that new data happen to lack."""
    rows = [(f"a film {n}", n % 3) for n in range(30)]
    three = table(tmp_path, "three", ("sentence", "label"), rows)
    done = call(classify.main, "--train", three, *TINY, "--run-dir", tmp_path / "three")
    assert done.returncode == 0, done.stderr
    flags = ("--start-from", tmp_path / "three", "--train", data / "label.tsv", "--steps", 1)
    done = call(classify.main, *flags, "--run-dir", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "two").processor.labels == ("0", "1")
    few = table(tmp_path, "few", ("tokens", "tags"), [("the film", "D N")] * 30)
    flags = ("--start-from", runs / "tag", "--train", few, "--steps", 1)
    done = call(tag.main, *flags, "--run-dir", tmp_path / "tags")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "tags").processor.labels == load(runs / "tag").processor.labels


def test_flags_without_effect_on_a_pretraining_are_refused(data, tmp_path):
    text = ("--text", data / "text.txt", *SIZES)
    for flags, message in (
        (("--top", 3), "--top is how many words --fill or --stdin print"),
        (("--classes", 5), "--classes 5: pretraining has none"),
        (("--model", "distilbert", "--next-sentence"), "--next-sentence needs a model with a pooler"),
    ):
        assert message in refused(pretrain, *text, *flags, "--run-dir", tmp_path / "run")
    (tmp_path / "chinese.txt").write_text("\u4f60\u597d\n")
    flags = ("--valid", tmp_path / "chinese.txt", "--model", "roberta", "--run-dir", tmp_path / "run")
    assert "the validation text has no token that could be predicted" in refused(pretrain, *text, *flags)


def test_pretraining_knows_an_electra_by_its_folder(data, tmp_path):
    text = ("--text", data / "text.txt", "--context", 32, "--batch-size", 8, "--learning-rate", 0)
    # Of one network alone the other begins fresh, with a quarter of the heads at least.
    sizes = ("--model", "electra", *SIZES, "--generator-size", 1)
    first = (*sizes, *text, "--steps", 2, "--run-dir", tmp_path / "first")
    done = call(pretrain.main, *first)
    assert done.returncode == 0, done.stderr
    model = load(tmp_path / "first")
    pretrained.save(tmp_path / "published", model.model, model.processor)
    for start, share in (("first", 1), ("published", 0.5), ("published,into=discriminator", 0.5)):
        run = tmp_path / f"from {start}"
        done = call(pretrain.main, "--start-from", f"{tmp_path}/{start}", *text, "--steps", 1, "--run-dir", run)
        assert done.returncode == 0, done.stderr
        assert read_config(run)["task"] == "replaced_token_detection"
        assert read_config(run)["model_config"]["generator_size"] == share
        new, old = (named_leaves(one.model) for one in (load(run), model))
        assert new.keys() == old.keys()
        for name, leaf in new.items():
            np.testing.assert_array_equal(leaf, old[name], err_msg=name)
    pretrained.save(tmp_path / "generator", model.generator, model.processor)
    flags = ("--start-from", tmp_path / "generator", "--steps", 1, "--run-dir")
    message = refused(pretrain, *text, *flags, tmp_path / "run")
    assert "holds a generator, and a pretraining goes on from a discriminator" in message
    done = call(classify.main, "--train", data / "label.tsv", *flags, tmp_path / "classes")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("command", "file"), [(classify, "label.tsv"), (embed, "pair.tsv")])
def test_a_run_goes_on_whose_start_is_gone(runs, data, tmp_path, command, file):
    start = tmp_path / "start"
    shutil.copytree(runs / "pretrain", start)
    again = ("--start-from", start, "--train", data / file, "--batch-size", 8, "--steps", 4)
    done = call(command.main, *again, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "run/results.json").read_text())
    start.rename(tmp_path / "elsewhere")
    done = call(command.main, *again, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    second = json.loads((tmp_path / "run/results.json").read_text())
    assert {n for n in first if first[n] != second[n]} <= {"seconds"}
    assert "no such file" in refused(command, *again, "--preset", "large", "--run-dir", tmp_path / "run")
    # Another run needs the folder.
    assert "no such file" in refused(command, *again, "--run-dir", tmp_path / "new")
    assert "no such file" in refused(command, *again, "--model", "electra", "--run-dir", tmp_path / "run")
    assert "--learning-rate is 5e-05 there" in refused(
        command, *again, "--learning-rate", 1, "--run-dir", tmp_path / "run"
    )


def test_a_vocabulary_of_another_model(runs, data, tmp_path):
    """A published folder whose tokenizer has more tokens than its table has rows."""
    from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
    from transformer_jax.pretrained import save

    run = load(runs / "pretrain")
    texts = [f"some{n}thing quite{n} other" for n in range(90)]
    save(tmp_path / "odd", run.model, EncoderTokenizer.wordpiece(texts, 200))
    message = refused(
        classify, "--start-from", tmp_path / "odd", "--train", data / "label.tsv", "--run-dir", tmp_path / "run"
    )
    assert "do not belong together" in message
    assert not (tmp_path / "run").exists()


def test_texts_that_are_cut_are_counted(data, tmp_path):
    rows = [(f"the film {n} " * 30 + WORDS[n % 2], n % 2) for n in range(12)]
    path = table(tmp_path, "long", ("sentence", "label"), rows)
    done = call(classify.main, "--train", path, *TINY, "--max-length", 16, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "11 of 11 training texts are longer than 16 tokens and were cut" in done.stdout + done.stderr
    assert "1 of 1 valid texts are longer" in done.stdout + done.stderr


@pytest.mark.parametrize("command", others_long([pretrain, classify, tag, answer, embed], answer))
def test_it_is_planned_without_data(command, tmp_path):
    done = call(command.main, *TINY, "--dry-run", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
    assert not (tmp_path / "run").exists()
    assert "--learning-rate" in call(command.main, "--help").stdout
