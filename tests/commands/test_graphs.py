"""The command graphs as users run it, and its one-line errors."""

import json

import pytest

from tests.commands.in_process import error_line, json_lines, succeed
from transformer_jax.commands import graphs

SIZES = (
    "--width", 16, "--layers", 1, "--heads", 2, "--feed-forward", 16, "--batch-size", 4, "--steps", 2,
    "--save-every", 2, "--evaluate-every", 2,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "triangles"
    return folder, succeed(graphs, *SIZES, "--graphs", 40, "--run-dir", folder)


@pytest.fixture(scope="module")
def molecules(tmp_path_factory):
    pytest.importorskip("rdkit", reason="molecules need the extra graphs")
    folder = tmp_path_factory.mktemp("molecules")
    rows = [f"{'C' * n}{end}\t{n}" for n in range(1, 8) for end in ("O", "N", "c1ccccc1", "C1CCCC1")]
    (folder / "a.tsv").write_text("smiles\tscore\n" + "\n".join(rows) + "\n")
    succeed(graphs, *SIZES, "--data", folder / "a.tsv", "--run-dir", folder / "run")
    return folder


def test_training_prints_scores(run):
    folder, completed = run
    assert {"rmse", "mae"} <= set(json.loads((folder / "results.json").read_text()))
    assert "32 graphs" in completed.stderr
    assert "rmse" in completed.stdout


def test_graphs_of_a_file_are_predicted_and_drawn(run, tmp_path):
    lines = [{"nodes": 3, "edges": [[0, 1], [1, 2], [2, 0]]}, {"nodes": 2, "edges": [[0, 1]]}]
    path, picture = tmp_path / "a.jsonl", tmp_path / "a.png"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    flags = ("--run-dir", run[0], "--predict", path)
    predictions = json_lines(graphs, *flags, "--plot-attention", picture)
    assert [line["graph"] for line in predictions] == [f"{path}, line 1", f"{path}, line 2"]
    assert all(isinstance(line["score"], float) for line in predictions)
    assert picture.stat().st_size > 5_000
    assert f"{predictions[1]['score']:.4f}  {path}, line 2" in succeed(graphs, *flags).stdout


def test_molecules_are_predicted_and_drawn(molecules, tmp_path):
    flags = ("--run-dir", molecules / "run", "--predict", "CCO", molecules / "a.tsv")
    lines = json_lines(graphs, *flags, "--plot-attention", tmp_path / "a.png")
    assert [line["graph"] for line in lines[:2]] == ["CCO", "CO"]
    assert (tmp_path / "a.png").stat().st_size > 5_000
    line = error_line(graphs, "--run-dir", molecules / "run", "--predict", "C1CC")
    assert "C1CC: 'C1CC' is not a valid SMILES" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--predict", "CCO"), "name the trained run with --run-dir"),
        (("--predict", "--run-dir", "x"), "--predict names no graph"),
        (("--plot-attention", "a.png"), "--plot-attention needs --predict"),
        (("--data", "nothing.tsv"), "nothing.tsv"),
        (("--drawn", "cycles"), "cycles"),
        (("--test", "a.tsv"), "--valid and --test need --data"),
        (("--start-from", "nothing"), "nothing"),
    ],
)
def test_bad_flags(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_line(graphs, *flags)


def test_bad_graphs(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"nodes": 3, "edges": [[0, 3]], "score": 1}\n')
    flags = ("--data", tmp_path / "a.jsonl", "--run-dir", tmp_path / "run")
    assert "the edge [0, 3] names the node 3, but the nodes are 0 to 2" in error_line(graphs, *SIZES, *flags)
    assert "a.jsonl, line 1: the edge [0, 3]" in error_line(
        graphs, "--run-dir", run[0], "--predict", tmp_path / "a.jsonl"
    )
