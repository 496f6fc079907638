"""Language models as users train them: resume, extend, refuse, score, generate."""

import json

import numpy as np
import pytest

from tests.cases import others_soak
from tests.commands.in_process import call, json_lines, start, succeed
from tests.data.corpora.tfds_sets import SENTENCES, write_sets
from tests.runs import train
from transformer_jax import configure, load
from transformer_jax.commands import generate, language_model
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import named_leaves

TEXT = "the dog sees a red cat. a cat sees the big dog. "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT * 60)
    return path


def config(path, /, **changes):
    options = dict(
        text=(str(path),) if path else (), tokenizer="char", context=16, batch_size=4, steps=12,
        warmup=2, schedule="constant", save_every=4, evaluate_every=6, average=2, sample_tokens=8, dropout=0.1,
    )  # fmt: skip
    return configure("language_modeling", "text", **(options | changes))


def leaves(folder):
    return named_leaves(load(folder, weights="averaged").model)


@pytest.fixture(scope="module")
def complete_run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "complete"
    notes = []
    return folder, train(config(text), folder, note=notes.append), notes


def test_files_and_results_of_a_run(complete_run):
    folder, _, notes = complete_run
    stored = json.loads((folder / "results.json").read_text())
    assert {
        "validation_loss",
        "perplexity",
        "bits_per_byte",
        "tokens_per_second",
        "parameters",
        "steps",
    } <= set(stored)
    assert stored["perplexity"] == pytest.approx(np.exp(stored["validation_loss"]))
    # Each token is a character of one byte, and all except the first are predicted.
    held_out = len(TEXT * 60) - int(len(TEXT * 60) * 0.9)
    bits = stored["validation_loss"] / np.log(2) * (held_out - 1) / held_out
    assert stored["bits_per_byte"] == pytest.approx(bits)
    assert stored["validation_loss"] < np.log(17)
    assert (folder / "loss.png").stat().st_size > 1000
    assert sum(line.startswith("sample: ") for line in notes) == 2
    assert any(len(line) > len("sample: ") + 8 for line in notes)


@pytest.mark.long
def test_an_extended_run_is_equal_bit_for_bit(text, complete_run, tmp_path):
    train(config(text, steps=7), tmp_path)
    train(config(text), tmp_path)
    for name, leaf in leaves(complete_run[0]).items():
        np.testing.assert_array_equal(leaf, leaves(tmp_path)[name], err_msg=name)


@pytest.mark.soak
def test_compute_options_change_no_score(text, complete_run, tmp_path):
    results = train(config(text), tmp_path, compute=ComputeOptions(unroll=1, remat="blocks"))
    assert results["validation_loss"] == pytest.approx(complete_run[1]["validation_loss"], rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *others_soak(
            [
                dict(model="modern_gpt", schedule="cosine", ema=0.9, tokenizer="bpe", vocab_size=280),
                dict(model="gpt", positions="alibi", max_length=40),
                dict(model="gru"),
            ]
        ),
        dict(model="llama", packing="documents", tokenizer="bpe", vocab_size=280, accumulation=2),
        dict(model="lstm", packing="documents", tokenizer="bpe", vocab_size=280),
    ],
)
def test_every_model_trains_and_generates(text, tmp_path, changes):
    results = train(config(text, steps=6, **changes), tmp_path)
    assert np.isfinite(results["validation_loss"])
    run = load(tmp_path)
    ((output,),) = run.generate(["the dog"], max_new_tokens=5, temperature=0)
    assert output.text.startswith("the dog")
    assert 1 <= output.new_tokens <= 5


def test_a_run_of_another_config_is_refused(text, complete_run):
    folder = complete_run[0]
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
    for changes, message in (
        (dict(context=8), "`context` is 16 there, not 8"),
        (dict(model="llama"), "holds a run of gpt, not of llama"),
        (dict(steps=11), "is a run of 12 steps"),
    ):
        with pytest.raises(UserError, match=message):
            train(config(text, **changes), folder)
    assert sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) == before
    text.write_text(TEXT * 60 + "a")
    try:
        with pytest.raises(UserError, match="holds a run on other data"):
            train(config(text), folder)
    finally:
        text.write_text(TEXT * 60)


@pytest.mark.long
def test_tfds_texts(tmp_path):
    folder = write_sets(tmp_path / "sets")
    options = dict(data_dir=str(folder), steps=2, evaluate_every=2, save_every=2, sample_tokens=0)
    notes = []
    labels_config = config("", corpus="tfds:toy_labels", **options)
    train(labels_config, tmp_path / "run", note=notes.append)
    characters = sum(len(SENTENCES[n % 4]) + 1 + len(str(n)) for n in range(300))
    assert notes[0].startswith(f"{characters:,} tokens of 300 document(s) for training, ")
    assert " of 12 for validation" in notes[0]
    with pytest.raises(UserError, match=r"toy_pairs/1\.0\.0 needs one text feature, but has several"):
        train(config("", corpus="tfds:toy_pairs", **options), tmp_path / "pairs")
    assert not (tmp_path / "pairs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(model="gtp"),
            "unknown model 'gtp': choose one of gpt, llama, modern_gpt, lstm, gru; did you mean gpt",
        ),
        (dict(preset="125M"), "unknown preset '125M'.*did you mean 124M"),
        (dict(model="llama", positions="alibi"), "`positions` is not a field of this run"),
        (dict(positions="rotory"), "'rotory'"),
        (dict(steps=0), "`steps` 0 is below 1"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(width=30), "width 30 must be a multiple of heads 4"),
        (dict(text=(), valid=("a",)), "`valid` needs `text`"),
        (dict(text=(), corpus="books"), "unknown corpus 'books': write python or tfds:NAME"),
        (dict(data_dir="x"), "`data_dir` and `splits` are for a corpus tfds:NAME"),
    ],
)
def test_invalid_values_are_refused(text, changes, message):
    with pytest.raises(UserError, match=message):
        config(text, **changes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "llama", "--positions", "alibi"), "--positions is a flag of gpt, not of llama"),
        (("--steps", "many"), "--steps: invalid int value: 'many'"),
        (("--recipe", "book"), "unknown recipe 'book': choose one of text"),
        (("--max-length", "8", "--context", "16"), "--max-length 8 is below --context 16"),
    ],
)
def test_bad_flags_are_one_line(text, tmp_path, flags, message):
    completed = call(language_model.main, "--text", text, "--run-dir", tmp_path / "run", *flags)
    assert completed.returncode == 2
    assert completed.stderr.startswith("error: ")
    assert message in completed.stderr
    assert completed.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(text=("none.txt",)), r"none\.txt: no such file"),
        (dict(context=4_000), "is shorter than one window of 4000"),
        (dict(tokenizer="none.json"), "no such tokenizer file"),
        (dict(max_length=8), "`max_length` 8 is below `context` 16"),
        (dict(accumulation=3), "`batch_size` 4 is not a multiple of `accumulation` 3"),
        (dict(sample="Zürich"), "`sample`: the vocabulary of characters lacks 'Z'"),
    ],
)
def test_bad_input_leaves_no_folder(text, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(config(text, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_the_commands(text, tmp_path):
    folder = tmp_path / "run"
    completed = succeed(
        language_model, "--text", text, "--tokenizer", "char", "--context", 16, "--batch-size", 4, "--steps",
        20, "--warmup", 2, "--run-dir", folder,
    )  # fmt: skip
    assert "validation loss" in completed.stdout
    assert "sample: " in completed.stderr
    flags = ("--run-dir", folder, "--prompt", "a dog", "--max-new-tokens", 9, "--seed", 4)
    (output,) = json_lines(generate, *flags)
    assert set(output) == {"text", "token_ids"}
    assert len(output["token_ids"]) == 5 + 9
    ((python_output,),) = load(folder).generate(["a dog"], max_new_tokens=9, seed=4)
    assert (python_output.text, python_output.token_ids) == (output["text"], output["token_ids"])
    assert start("generate", *flags).communicate(timeout=300)[0] == output["text"] + "\n"
    samples = ("--prompt", "a", "the", "--samples", 2, "--max-new-tokens", 3, "--draft-run-dir", folder)
    assert succeed(generate, "--run-dir", folder, *samples).stdout.count("---") == 4
    page = folder.parent / "page.html"
    assert succeed(generate, *flags, "--html", page).stdout == output["text"] + "\n"
    tokens = len(output["token_ids"])
    assert f'"name": "decoder/self_attention", "shape": [4, 4, {tokens}, {tokens}]' in page.read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name the model: either --weights FOLDER or --run-dir DIR"),
        (("--run-dir", "nowhere"), "no such file; is nowhere the folder of a run, or of weights?"),
        (("--weights", "nowhere"), "nowhere: no such folder of weights"),
        (("--run-dir", "x", "--prompt", ""), "the prompt is empty"),
        (
            ("--run-dir", "x", "--temperature", "0", "--top-p", "0.5"),
            "--top-p has no effect at --temperature 0, the most probable token",
        ),
        (("--run-dir", "x", "--max-new-tokens", "0"), "--max-new-tokens 0 is below 1"),
        (("--run-dir", "x", "--samples", "0"), "--samples 0 is below 1"),
        (("--run-dir", "x", "--samples", "2", "--html", "x.html"), "--html shows one text: use one --prompt"),
    ],
)
def test_bad_commands_are_one_line(flags, message):
    flags = flags if "--prompt" in flags else (*flags, "--prompt", "a")
    completed = call(generate.main, *flags)
    assert completed.returncode == 2
    assert completed.stderr.count("\n") == 1
    assert completed.stderr.startswith("error: ")
    assert message in completed.stderr


@pytest.mark.long
def test_the_command_generates_from_published_weights(shared):
    folder = shared / "weights/stories260K"
    expected = json.loads((folder / "expected_greedy.json").read_text())
    flags = ("--prompt", expected["prompt"], "--max-new-tokens", 200, "--temperature", 0)
    (output,) = json_lines(generate, "--weights", folder, *flags)
    assert (output["token_ids"], output["text"]) == (expected["token_ids"], expected["text"])
    completed = call(generate.main, "--weights", folder, "--prompt", "a", "--max-new-tokens", 600)
    assert completed.stderr.startswith(
        "error: a prompt of 2 tokens and 600 new ones exceed the model's context of 512"
    )
