"""Training, resuming, sharding, loading and use of models of graphs."""

import json
import pathlib

import numpy as np
import pytest

from tests.tasks.resuming import check_devices_and_micro_batches, losses, resumed_results
from transformer_jax import tasks
from transformer_jax.data.corpora.drawn_graphs import drawn_graphs
from transformer_jax.data.corpora.held_out import held_out
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import probability_scores
from transformer_jax.parameter_names import named_leaves
from transformer_jax.plotting.graphs import plot_graph
from transformer_jax.tasks.graphs.graph_prediction import GraphPrediction
from transformer_jax.training import plan
from transformer_jax.training.execution import Execution

SIZES = dict(
    width=16, layers=1, heads=2, feed_forward=16, batch_size=8, steps=8, evaluate_every=4, save_every=2,
    learning_rate=3e-3, warmup=2,
)  # fmt: skip


def config_of(recipe="drawn", **changes):
    drawn = dict(graphs=80) if recipe == "drawn" else {}
    return tasks.configure("graph_prediction", recipe, **(SIZES | drawn | changes))


def train(config, folder, mesh=None):
    return tasks.train(config, folder, execution=Execution(mesh=mesh), note=lambda line: None)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, train(config_of(), folder)


def as_line(graph, **target):
    return json.dumps({"nodes": len(graph), "edges": graph.edges.tolist()} | target)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """Return a file of graphs with the label whether they have a triangle."""
    graphs = drawn_graphs("triangles", 60)
    labels = ["yes" if int(score) else "no" for score in graphs.table.columns["score"]]
    path = tmp_path_factory.mktemp("data") / "classes.jsonl"
    lines = [as_line(graph, label=label) for graph, label in zip(graphs.graphs, labels, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_it_is_trained(trained):
    folder, results = trained
    assert {"rmse", "mae", "mean_rmse", "mean_mae"} <= set(results)
    assert np.isfinite(losses(folder)).all()


@pytest.mark.long
def test_it_learns(tmp_path):
    """The diameter of a graph is in its distances, so a small model soon halves the error of the mean."""
    changes = dict(drawn="diameter", graphs=600, width=32, heads=4, feed_forward=64, batch_size=32)
    config = config_of(**changes, steps=150, evaluate_every=150, save_every=150)
    results = train(config, tmp_path / "run")
    assert results["mae"] < 0.5 * results["mean_mae"]


@pytest.mark.long
def test_it_is_resumed_bit_for_bit(trained, tmp_path, monkeypatch):
    complete, results = trained
    resumed = resumed_results(
        lambda folder: train(config_of(), folder), GraphPrediction, complete, tmp_path / "run", monkeypatch
    )
    assert resumed["rmse"] == results["rmse"]


@pytest.mark.long
def test_eight_devices_and_micro_batches_learn_the_same(trained, tmp_path):
    check_devices_and_micro_batches(train, config_of, trained[0], tmp_path)


def test_it_is_planned():
    for recipe in ("drawn", "graphs"):
        config = tasks.configure("graph_prediction", recipe)
        lines = dict(plan.describe(tasks.TASKS["graph_prediction"], config, "data=2,tensor=2"))
        assert lines["work"].endswith("in total")
    with pytest.raises(UserError, match="`sequence` of `mesh` shards the tokens of texts"):
        list(plan.describe(tasks.TASKS["graph_prediction"], config, "sequence=2"))


def test_predictions_are_those_that_are_scored(trained):
    folder, results = trained
    model = tasks.load(folder)
    graphs = drawn_graphs("triangles", 80)
    # The test graphs are a tenth of the drawn ones; a longer list has batches of several sizes.
    predictions = model.predict(graphs.graphs)
    single = [
        float(model.predict([{"nodes": len(g), "edges": g.edges.tolist()}])[0]) for g in graphs.graphs[:3]
    ]
    np.testing.assert_allclose(predictions[:3], single, rtol=1e-4, atol=1e-4)
    _, held = held_out(np.arange(80), 0.1)
    scores = np.array([float(graphs.table.columns["score"][n]) for n in held])
    rmse = np.sqrt(np.square(predictions[held] - scores).mean())
    np.testing.assert_allclose(rmse, results["rmse"], rtol=1e-4)
    assert len(model.predict([])) == 0
    for graph in ("CCO", {"nodes": 2, "edges": []}):
        with pytest.raises(UserError, match="graphs must be a list"):
            model.predict(graph)
    with pytest.raises(UserError, match="graph 1: a graph is a SMILES text, or an object"):
        model.predict([[1, 2]])


def test_attention_is_drawn(trained, tmp_path):
    model, graph = tasks.load(trained[0]), drawn_graphs("triangles", 1).graphs[0]
    weights = model.attention(graph)
    assert weights.shape == (1, 2, 1 + len(graph), 1 + len(graph))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    plot_graph(graph, weights, path=tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_classes_are_learned_and_predicted(classes, tmp_path):
    results = train(config_of("graphs", data=classes), tmp_path / "run")
    assert {"accuracy", "f1", "roc_auc"} <= set(results)
    assert 0 <= results["accuracy"] <= 100
    (prediction,) = tasks.load(tmp_path / "run").predict([{"nodes": 3, "edges": [[0, 1], [1, 2]]}])
    assert prediction.label in ("no", "yes")
    np.testing.assert_allclose(sum(prediction.probabilities.values()), 1)


def test_a_rare_label_may_be_held_out(classes, tmp_path):
    """Labels are those of all graphs in `data`, wherever the one with the rare label goes."""
    lines = pathlib.Path(classes).read_text().splitlines()
    for number in (0, 1, 2):
        lines[number] = lines[number].replace('"no"', f'"rare {number}"').replace('"yes"', f'"rare {number}"')
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = config_of("graphs", data=str(tmp_path / "a.jsonl"), held_out=0.4, steps=1, warmup=0)
    train(config, tmp_path / "run")
    assert len(tasks.load(tmp_path / "run").processor.labels) == 5


def test_roc_auc_counts_pairs():
    rng = np.random.default_rng(0)
    probabilities, expected = rng.dirichlet(np.ones(3), 40), rng.integers(0, 3, 40)
    areas = []
    for number in range(3):
        inside, outside = (probabilities[(expected == number) == x, number] for x in (True, False))
        areas.append(np.mean(inside[:, None] > outside))
    assert dict(probability_scores(probabilities, expected))["roc_auc"] == pytest.approx(100 * np.mean(areas))
    assert dict(probability_scores(probabilities[:, :2], np.zeros(40, int))) == {}


def test_a_model_is_fine_tuned_on_other_targets(trained, classes, tmp_path):
    """The encoder continues, and a head of other classes is new."""
    start, (folder, _) = (str(trained[0]),), trained
    changes = dict(steps=1, evaluate_every=1, save_every=1, warmup=0, learning_rate=0.0)
    train(config_of("fine_tune", start=start, data=classes, **changes), tmp_path / "run")
    before, after = (named_leaves(tasks.load(path).model) for path in (folder, tmp_path / "run"))
    np.testing.assert_array_equal(before["node_table"], after["node_table"])
    assert (before["head/kernel"].shape, after["head/kernel"].shape) == ((16, 1), (16, 2))


def test_data_that_do_not_fit(trained, classes, tmp_path):
    for changes, message in (
        (dict(data=classes, split="scaffold"), "`split` scaffold needs molecules"),
        (dict(data=classes, classes=7), "`classes` is 7, but the data needs 2"),
        (dict(data=classes, loss="absolute"), "`loss` absolute applies only to scores"),
        (dict(data=classes, max_nodes=8), "above `max_nodes` 8"),
        (dict(data=classes, target="score"), "no column score"),
        (dict(data=classes, node_values=(3,)), "`node_values` of the model are 3, but those of the data are 1"),
        (dict(valid=classes), "`valid` and `test` need `data`"),
        (dict(data=classes, held_out=0.5), "`held_out` 0.5 must be above 0 and below 0.5"),
    ):
        with pytest.raises(UserError, match=message):
            train(config_of("graphs", **changes), tmp_path / "run")
    pytest.importorskip("rdkit", reason="molecules need the extra graphs")
    (tmp_path / "a.tsv").write_text("smiles\tscore\n" + "".join(f"{'C' * n}\t{n}\n" for n in range(1, 30)))
    fine = config_of("fine_tune", start=(str(trained[0]),), data=str(tmp_path / "a.tsv"))
    with pytest.raises(UserError, match="the start was trained on lists of edges, but the data are SMILES"):
        train(fine, tmp_path / "run")
    mixed = config_of("graphs", data=str(tmp_path / "a.tsv"), test=classes)
    with pytest.raises(UserError, match="only one of them has a column smiles"):
        train(mixed, tmp_path / "run")
