"""Encoders compared on tiny data: one row per run, no run trained twice, a refit at the best learning rate."""

import json

import pytest

from experiments import compare_encoders
from tests.runs import train
from transformer_jax import tasks
from transformer_jax.errors import UserError

WORDS = {"1": ["good", "great", "fine"], "0": ["bad", "awful", "poor"]}


@pytest.mark.soak
def test_rows_are_saved_and_a_refit_uses_the_best_rate(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("\n\n".join(f"the film is {w}" for w in [*WORDS["1"], *WORDS["0"]] * 9))
    tiny = dict(width=8, layers=1, heads=1, feed_forward=8, vocab_size=140, batch_size=4, context=16,
                pooler=False, next_sentence=False)  # fmt: skip
    config = tasks.configure(
        "masked_language_modeling", "text", model="bert", text=(str(tmp_path / "text.txt"),), steps=1, **tiny
    )
    train(config, tmp_path / "encoder")
    (tmp_path / "sst2").mkdir()
    rows = [f"the film is {word} {n}\t{label}" for n in range(5) for label in WORDS for word in WORDS[label]]
    for name in ("train", "dev"):
        (tmp_path / "sst2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    config_of, poolings = compare_encoders.config_of, []

    def with_plain_files(job, data, *rest, **options):
        config = config_of(job, data, *rest, **options)
        poolings.append((config.model.classifier_pooling, config.model.pooler))
        plain = {
            name: tuple(p.removesuffix(".gz") for p in getattr(config.task, name)) for name in ("train", "test")
        }
        return config.with_values(**plain, batch_size=4)

    monkeypatch.setattr(compare_encoders, "config_of", with_plain_files)
    job = compare_encoders.WORK["sst2"]._replace(steps=2, changes={"max_length": 16})
    monkeypatch.setitem(compare_encoders.WORK, "sst2", job)
    command = [
        "--data", str(tmp_path), "--starts", f"tiny={tmp_path / 'encoder'}", "--only", "sst2",
        "--rates", "1e-3", "2e-3", "--seeds", "2", "--runs-dir", str(tmp_path / "runs"),
    ]  # fmt: skip

    def saved_rows():
        return [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]

    compare_encoders.main(command)
    first = saved_rows()
    best = max(first[:2], key=lambda row: row["validation_accuracy"])["rate"]
    assert [(row["rate"], row["seed"]) for row in first] == [(1e-3, 0), (2e-3, 0), (best, 1)]
    assert "tiny" in capsys.readouterr().out
    compare_encoders.main([*command, "--refit"])
    rows_with_refit = saved_rows()
    assert rows_with_refit[:3] == first, "saved rows are not trained again"
    assert [(row["rate"], row["seed"], row["refit"]) for row in rows_with_refit[3:]] == [
        (best, 0, True),
        (best, 1, True),
    ]
    compare_encoders.main([*command, "--pooling", "mean", "--seeds", "1"])
    assert [row.get("pooling") for row in saved_rows()[5:]] == ["mean", "mean"]
    assert poolings == [("first", True)] * 5 + [("mean", False)] * 2
    assert not list((tmp_path / "runs").glob("tiny*")), "runs are removed"


@pytest.mark.parametrize(
    ("start", "known", "message"),
    [
        ("tiny=tiny", "squad_small", "trains no questions"),
        ("tiny=tiny,leave_out=.*", "mrpc", "starts from a published folder"),
        ("tiny=tiny", "mrpc", "starts from a published folder"),
        ("tiny", "mrpc", "write NAME=FOLDER"),
        ("tiny=FOLDER", "mrpc", "reads classes from the first token"),
    ],
)
def test_runs_that_torch_cannot_train_are_refused_first(start, known, message, tmp_path):
    command = ["--data", str(tmp_path), "--starts", start, "--only", known, "--peer", "torch"]
    if start == "tiny=FOLDER":
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        command[3:4] = [f"tiny={tmp_path}", "--pooling", "max"]
    with pytest.raises(UserError, match=message):
        compare_encoders.main([*command, "--runs-dir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs" / "results.jsonl").exists()
