"""Graphs from SMILES and edge lists, their shortest paths, drawn graphs, and one-line errors."""

import gzip
import itertools
import json

import numpy as np
import pytest

from transformer_jax.data.batches.graph_batches import GraphRows, padded
from transformer_jax.data.corpora import molecules
from transformer_jax.data.corpora.drawn_graphs import adjacency, drawn_graphs
from transformer_jax.data.corpora.graphs import open_graphs, parse_graph
from transformer_jax.data.corpora.held_out import held_out
from transformer_jax.data.tokenizers.graph_processor import GraphProcessor, shortest_paths
from transformer_jax.errors import UserError

RING = {"nodes": [[0, 1], [1, 0], [2, 0], [0, 0]], "edges": [[0, 1, 5], [1, 2, 6], [2, 3, 7], [3, 0, 8]]}


def write_lines(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_edge_lists_are_read(tmp_path):
    lines = [RING | {"score": 1.5}, {"nodes": [[0, 0]], "edges": [], "score": -2}]
    graphs = open_graphs(write_lines(tmp_path / "a.jsonl", lines))
    assert [len(graph) for graph in graphs.graphs] == [4, 1]
    np.testing.assert_array_equal(graphs.graphs[0].edge_features, [[5], [6], [7], [8]])
    assert (graphs.is_molecules, graphs.table.columns) == (False, {"score": ["1.5", "-2.0"]})
    processor = GraphProcessor.of(graphs)
    assert (processor.settings.node_values, processor.settings.edge_values) == ((3, 2), (9,))
    np.testing.assert_allclose(processor.to_scores(processor.targets(graphs)), [1.5, -2])
    again = GraphProcessor.from_files(processor.files())
    assert again == processor
    arrays = processor.arrays(graphs.graphs[1], 2)
    assert arrays["paths"].shape == (1, 1, 2, 1)
    assert arrays["degrees"].tolist() == [0]


def test_digests_differ_with_the_shape_of_features(tmp_path):
    pair, single = ({"nodes": nodes, "edges": [], "score": 1} for nodes in ([[1, 2], [3, 4]], [1, 2, 3, 4]))
    digests = {open_graphs(write_lines(tmp_path / "a.jsonl", [line])).fingerprint() for line in (pair, single)}
    assert len(digests) == 2


def test_graphs_without_features_and_classes(tmp_path):
    lines = [{"nodes": 3, "edges": [[0, 1]], "label": "odd"}, {"nodes": 2, "edges": [[1, 0]], "label": "even"}]
    graphs = open_graphs(write_lines(tmp_path / "a.jsonl", lines))
    processor = GraphProcessor.of(graphs)
    assert (processor.labels, processor.target) == (("even", "odd"), "label")
    np.testing.assert_array_equal(processor.targets(graphs), [1, 0])
    np.testing.assert_array_equal(processor.arrays(graphs.graphs[0], 1)["degrees"], [1, 1, 0])


def test_shortest_paths_and_their_edges():
    graph = parse_graph(RING | {"nodes": [*RING["nodes"], [0, 0]]}, "ring")
    distances, paths = shortest_paths(graph, 2)
    np.testing.assert_array_equal(distances[0], [0, 1, 2, 1, -1])
    np.testing.assert_array_equal(distances, distances.T)
    np.testing.assert_array_equal(paths[0, 1, :, 0], [5, -1])
    assert paths[0, 2, :, 0].tolist() in ([5, 6], [8, 7])
    assert (paths[:, 4] == -1).all()
    # Only the first edge of a path is kept.
    np.testing.assert_array_equal(shortest_paths(graph, 1)[1], paths[:, :, :1])


def test_padding_has_no_edges_and_no_nodes():
    graph = parse_graph(RING | {"edges": [[0, 1]]}, "pair")
    processor = GraphProcessor.of(drawn_graphs("triangles", 20))
    arrays = processor.arrays(graph, 2)
    row = padded(arrays, 8)
    assert row["nodes"].shape == (8, 2)
    np.testing.assert_array_equal(row["is_node"], [1] * 4 + [0] * 4)
    assert (row["distances"][4:] == -1).all()
    assert (row["paths"][:, 4:] == -1).all()
    rows = GraphRows([arrays] * 3, np.arange(3, dtype=np.float32), 8)
    first, second = rows.batches(2)
    np.testing.assert_array_equal(np.concatenate([first["target"], second["target"]]), [0, 1, 2, 2])
    np.testing.assert_array_equal(second["weight"], [1, 0])


def test_drawn_graphs_have_their_targets():
    """Triangles and diameters are counted by trying all triples and by powers of the adjacency matrix."""
    sets = {target: drawn_graphs(target, 40, seed=2) for target in ("triangles", "diameter")}
    for row, graph in enumerate(sets["triangles"].graphs):
        matrix = adjacency(graph)
        count = sum(
            matrix[a, b] and matrix[b, c] and matrix[a, c]
            for a, b, c in itertools.combinations(range(len(graph)), 3)
        )
        assert count == int(sets["triangles"].table.columns["score"][row])
        reached, steps = np.eye(len(graph), dtype=np.int64), 0
        while not reached.all():
            reached, steps = np.minimum(reached + reached @ matrix, 1), steps + 1
        assert steps == int(sets["diameter"].table.columns["score"][row])
    numbers = {target: len(set(graphs.table.columns["score"])) for target, graphs in sets.items()}
    assert min(numbers.values()) > 5


def test_molecules_are_read(tmp_path):
    pytest.importorskip("rdkit", reason="molecules need the extra graphs")
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"smiles\tscore\nCC(=O)O\t-0.2\nc1ccccc1[NH3+]\t1\nC/C=C/C\t2\n"))
    graphs = open_graphs(str(path))
    acid, aniline, butene = graphs.graphs
    assert (len(acid), acid.edges.tolist()) == (4, [[0, 1], [1, 2], [1, 3]])
    # Element, charge, hydrogens, hybridization, chirality, aromatic, ring.
    np.testing.assert_array_equal(acid.nodes[2], [8, 5, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(aniline.nodes[6], [7, 6, 3, 2, 0, 0, 0])
    np.testing.assert_array_equal(aniline.nodes[0], [6, 5, 1, 1, 0, 1, 1])
    # Type, stereochemistry, conjugated, ring.
    np.testing.assert_array_equal(acid.edge_features[:2, 0], [0, 1])
    np.testing.assert_array_equal(aniline.edge_features[0], [3, 0, 1, 1])
    assert butene.edge_features[1].tolist() == [1, 2, 0, 0]
    for graph in graphs.graphs:
        assert (graph.nodes < molecules.ATOM_VALUES).all()
        assert (graph.edge_features < molecules.BOND_VALUES).all()
    assert GraphProcessor.of(graphs).settings.node_values == molecules.ATOM_VALUES
    positions, symbols = molecules.layout("CC(=O)O")
    assert (positions.shape, symbols) == ((4, 2), ["C", "C", "O", "O"])


def test_molecules_of_a_scaffold_stay_together(tmp_path):
    pytest.importorskip("rdkit", reason="molecules need the extra graphs")
    chains = ["C" * n for n in range(1, 20)]
    lines = [f"{ring}{chain}" for ring in ("c1ccccc1", "C1CCCC1", "c1ccncc1") for chain in chains]
    (tmp_path / "a.csv").write_text(
        "smiles,score\n" + "\n".join(f"{s},{n}" for n, s in enumerate(lines)) + "\n"
    )
    scaffolds = open_graphs(str(tmp_path / "a.csv")).scaffolds()
    assert len(set(scaffolds)) == 3
    train, held = held_out(scaffolds, 0.33)
    assert not set(scaffolds[train]) & set(scaffolds[held])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "a graph without nodes"),
        ({"nodes": []}, "a graph without nodes"),
        ({"edges": [[0, 4]]}, r"the edge \[0, 4\] names the node 4, but the nodes are 0 to 3"),
        ({"edges": [[0, -1]]}, r"the edge \[0, -1\] names the node -1"),
        ({"edges": [[1]]}, r"the edge \[1\] does not name two nodes"),
        ({"edges": [[1, 1, 0]]}, r"the edge \[1, 1, 0\] joins a node to itself"),
        ({"edges": [[0, 1], [1, 0]]}, "two edges join the nodes 0 and 1"),
        ({"edges": [[0, 1, 2], [1, 2]]}, None),
        ({"edges": [[0, 1, 2], [1, 2, 0, 1]]}, "edges have 1 and 2 features"),
        ({"nodes": [[0], [0, 1], [0], [0]]}, "nodes have 1 and 2 features"),
        ({"nodes": [-1, 0, 0, 0]}, "nodes have the feature -1; features are numbered from 0"),
        ({"edges": "none"}, "edges"),
        ({"nodes": 10**20}, "nodes"),
        ({"nodes": 5_000}, "the number of nodes 5,000 is above the limit"),
        ({"edges": [[0, 1, 5_000]]}, "edges have the feature 5,000 is above the limit"),
        ({"nodes": [0.5, 1, 1, 1]}, "expected int"),
        ({"target": 1}, "target"),
        ({"smiles": "CCO"}, "smiles"),
    ],
)
def test_edge_lists_that_are_refused(tmp_path, change, message):
    path = write_lines(tmp_path / "a.jsonl", [RING | {"score": 0}, RING | change | {"score": 1}])
    if message is None:  # an edge without a feature has the feature 0
        assert open_graphs(path).graphs[1].edge_features.tolist() == [[2], [0]]
        return
    with pytest.raises(UserError, match=f"a.jsonl, line 2.*{message}"):
        open_graphs(path)


def test_files_that_are_refused(tmp_path):
    for name, content, message in (
        ("a.txt", "CCO\n", "graphs are a .tsv, .csv or .jsonl file"),
        ("a.tsv", "text\tscore\nCCO\t1\n", "no column smiles"),
        ("b.tsv", "smiles\tname\nCCO\t1\n", "no label or score to predict"),
        ("b.jsonl", "\n", "no graphs"),
        ("d.jsonl", json.dumps(RING | {"smiles": "CCO"}) + "\n", "line 1: both smiles and nodes"),
        ("c.jsonl", json.dumps(RING) + "\n", "no label or score to predict"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            open_graphs(str(tmp_path / name))
    pytest.importorskip("rdkit", reason="molecules need the extra graphs")
    (tmp_path / "c.tsv").write_text("smiles\tscore\nCCO\t1\nC1CC\t2\n")
    with pytest.raises(UserError, match=r"c.tsv, line 3: 'C1CC' is not a valid SMILES"):
        open_graphs(str(tmp_path / "c.tsv"))
    (tmp_path / "c.tsv").write_text("smiles\tscore\nCCO\t1\nCCO ethanol\t2\n")
    with pytest.raises(UserError, match=r"c.tsv, line 3: white space in 'CCO ethanol'"):
        open_graphs(str(tmp_path / "c.tsv"))
    (tmp_path / "c.tsv").write_text("smiles\tscore\nCCO\t1\n\t2\n")
    with pytest.raises(UserError, match=r"c.tsv, line 3: a molecule without atoms"):
        open_graphs(str(tmp_path / "c.tsv"))


def test_features_that_training_did_not_have():
    graphs = drawn_graphs("triangles", 20)
    processor = GraphProcessor.of(graphs)
    for graph, message in (
        ({"nodes": [0, 1], "edges": []}, "g: feature 1 of nodes is 1, but the model takes 0 to 0"),
        ({"nodes": [[0, 0]], "edges": []}, "g: nodes have 2 features, but the model's have 1"),
        ({"nodes": 2, "edges": [[0, 1, 3]]}, "g: feature 1 of edges is 3"),
    ):
        with pytest.raises(UserError, match=message):
            processor.check(parse_graph(graph, "g"), "g")
