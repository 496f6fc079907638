"""Graphormer: a NumPy form of the complete model, every field, symmetries, shardings, and its bounds."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.traces import trace_of, unread_fields
from transformer_jax.data.batches.graph_batches import padded
from transformer_jax.data.corpora.graphs import parse_graph
from transformer_jax.data.tokenizers.graph_processor import GraphProcessor, GraphSettings
from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.sharding import model_shardings, rule_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.graphs.graphormer import Graphormer, GraphormerConfig
from transformer_jax.parameter_names import named_leaves, with_leaves

CONFIG = GraphormerConfig(
    width=16, layers=2, heads=2, feed_forward=20, node_values=(3, 2), edge_values=(4, 2), classes=3,
    max_degree=3, max_distance=4, edge_hops=3, dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
CHANGES = {
    "width": 24, "layers": 3, "heads": 4, "feed_forward": 28, "node_values": (4, 2), "edge_values": (4, 3),
    "classes": 2, "max_degree": 5, "max_distance": 6, "edge_hops": 2, "degree_encoding": False,
    "distance_bias": False, "edge_bias": False, "distance_std": 1.0, "readout": "sum", "dropout": 0.5,
    "attention_dropout": 0.5, "activation": "relu", "norm_epsilon": 0.1, "dtype": "bfloat16",
}  # fmt: skip
# A ring with a tail that is longer than `max_distance`, a star, a pair without an edge, and a single node.
EDGES = (
    [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)],
    [(0, n) for n in range(1, 6)],
    [(0, 1), (2, 3)],
    [],
)
NODES = (8, 6, 5, 1)
PROCESSOR = GraphProcessor(GraphSettings("edges", (3, 2), (4, 2), ("a", "b", "c")))


def graph(number, order=None):
    """Return a graph with random features, whose nodes may be renumbered."""
    rng = np.random.default_rng(number)
    order = np.arange(NODES[number]) if order is None else order
    features = np.stack([rng.integers(0, 3, NODES[number]), rng.integers(0, 2, NODES[number])], axis=1)
    edges = [(a, b, int(rng.integers(4)), int(rng.integers(2))) for a, b in EDGES[number]]
    number_of = np.argsort(order)
    edges = [[int(number_of[a]), int(number_of[b]), *rest] for a, b, *rest in edges]
    return parse_graph({"nodes": features[order].tolist(), "edges": edges}, "graph")


def inputs(graphs=None, size=8, hops=3):
    graphs = [graph(n) for n in range(4)] if graphs is None else graphs
    rows = [padded(PROCESSOR.arrays(g, hops), size) for g in graphs]
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


@functools.cache
def model_of(compute=ComputeOptions(), **changes):
    config = dataclasses.replace(CONFIG, **changes)

    def init():
        model = Graphormer(config, rngs=nnx.Rngs(0), compute=compute)
        # Initial biases of 0.02 would hide an error in them.
        leaves = named_leaves(model).items()
        return with_leaves(model, {name: leaf if "norm" in name else 10 * leaf for name, leaf in leaves})

    return jax.jit(init)()


forward = jax.jit(
    lambda model, batch, return_weights: model(**batch, return_weights=return_weights),
    static_argnums=2,
)


def steps_between(edges, nodes):
    """Return the shortest path of each pair as a list of nodes, found by extending paths step by step."""
    neighbors = {
        n: sorted({b for pair in edges for a, b in (pair, pair[::-1]) if a == n}) for n in range(nodes)
    }
    paths = {(n, n): [n] for n in range(nodes)}
    for _ in range(nodes):
        for (start, end), path in list(paths.items()):
            for following in neighbors[end]:
                if len(paths.get((start, following), range(99))) > len(path) + 1:
                    paths[start, following] = [*path, following]
    return paths


def normalized(x, norm):
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + CONFIG.norm_epsilon) * norm["scale"] + norm["bias"]


def reference(model, number):
    """Return (prediction, weights) of a graph by the equations of the paper, in float64 and node by node."""
    leaves = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(model).items()}
    g, H = graph(number), CONFIG.heads
    n = len(g)
    paths = steps_between(EDGES[number], n)
    edge_of = {frozenset(pair): row for row, pair in enumerate(g.edges.tolist())}
    node_table, edge_table = leaves["node_table"], leaves["edge_table"]
    x = [leaves["virtual_node"][0]]
    for node in range(n):
        degree = sum(node in pair for pair in g.edges.tolist())
        features = node_table[g.nodes[node, 0]] + node_table[3 + g.nodes[node, 1]]
        x.append(features + leaves["degree_table"][min(degree, 3)])
    x = np.stack(x)
    bias = np.zeros((H, n + 1, n + 1))
    bias[:, 0, :] = bias[:, :, 0] = leaves["virtual_bias"][0][:, None]
    for i in range(n):
        for j in range(n):
            path = paths.get((i, j))
            row = 5 if path is None else min(len(path) - 1, 4)
            bias[:, 1 + i, 1 + j] = leaves["distance_table"][row]
            hops = [] if path is None else list(itertools.pairwise(path))[:3]
            for hop, pair in enumerate(hops):
                features = g.edge_features[edge_of[frozenset(pair)]]
                edge = edge_table[features[0]] + edge_table[4 + features[1]]
                bias[:, 1 + i, 1 + j] += edge @ leaves["hop_table"][hop] / len(hops)
    all_weights = []
    for layer in range(CONFIG.layers):
        block = {k.removeprefix("blocks/"): v[layer] for k, v in leaves.items() if k.startswith("blocks/")}

        def part(prefix, block=block):
            return {k.removeprefix(prefix): v for k, v in block.items() if k.startswith(prefix)}

        def projected(h, name, block=block):
            attention = part("self_attention/", block)
            return np.einsum("nd,dhk->hnk", h, attention[f"{name}/kernel"]) + attention[f"{name}/bias"][:, None]

        h = normalized(x, part("self_attention_norm/"))
        query, key, value = (projected(h, name) for name in ("query", "key", "value"))
        logits = query @ key.swapaxes(1, 2) / np.sqrt(CONFIG.width / H) + bias
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        all_weights.append(weights)
        mixed = np.einsum("hnm,hmk->nhk", weights, value)
        output = part("self_attention/output/")
        x = x + np.einsum("nhk,hkd->nd", mixed, output["kernel"]) + output["bias"]
        h = normalized(x, part("feed_forward_norm/"))
        expand, contract = part("feed_forward/expand/"), part("feed_forward/contract/")
        hidden = np.asarray(jax.nn.gelu(h @ expand["kernel"] + expand["bias"], approximate=False))
        x = x + hidden @ contract["kernel"] + contract["bias"]
    x = normalized(x, {name: leaves[f"norm/{name}"] for name in ("scale", "bias")})
    state = {"virtual": x[0], "sum": x[1:].sum(axis=0), "mean": x[1:].mean(axis=0)}[model.config.readout]
    return state @ leaves["head/kernel"] + leaves["head/bias"], np.stack(all_weights)


@pytest.mark.parametrize("readout", ["virtual", "sum", "mean"])
def test_it_equals_the_equations_node_by_node(readout):
    model = model_of(readout=readout)
    predictions, weights = forward(model, inputs(size=12), True)
    assert weights.shape == (4, 2, 2, 13, 13)
    for number in range(4):
        expected, expected_weights = reference(model, number)
        np.testing.assert_allclose(predictions[number], expected, rtol=1e-4, atol=1e-4)
        n = 1 + NODES[number]
        np.testing.assert_allclose(weights[number, :, :, :n, :n], expected_weights, atol=1e-5)
        assert not weights[number, :, :, :, n:].any(), "padding is attended to"


def test_the_numbers_of_nodes_do_not_matter():
    """The graphs have one shortest path between two nodes, which is therefore the same in any order."""
    orders = [np.random.default_rng(9).permutation(count) for count in NODES]
    renumbered = [graph(n, order) for n, order in enumerate(orders)]
    before, after = (forward(model_of(), inputs(graphs), False) for graphs in (None, renumbered))
    np.testing.assert_allclose(before, after, atol=1e-5)


@pytest.mark.parametrize("change", ["distances", "paths", "degrees", "nodes"])
def test_structure_is_seen_unless_it_is_switched_off(change):
    off = {"distances": {"distance_bias": False, "edge_bias": False}, "paths": {"edge_bias": False},
           "degrees": {"degree_encoding": False}}  # fmt: skip
    batch = inputs()
    values = batch[change]
    changed = batch | {change: jnp.where(values > 0, values - 1, values)}
    assert (forward(model_of(), batch, False)[:3] != forward(model_of(), changed, False)[:3]).any(axis=1).all()
    if change in off:
        model = model_of(**off[change])
        np.testing.assert_array_equal(forward(model, batch, False), forward(model, changed, False))


def test_every_field_matters():
    def trace(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        batch = inputs(hops=config.edge_hops)

        def init_and_apply(key):
            return Graphormer(config, rngs=nnx.Rngs(key))(**batch, dropout_key=key)

        return trace_of(init_and_apply)

    assert unread_fields(trace, CHANGES) == []
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(GraphormerConfig)}


def test_scan_and_unrolled_forms_have_the_same_gradients():
    batch = inputs()

    def loss(model):
        return jnp.square(model(**batch, dropout_key=jax.random.key(2))).mean()

    expected, unrolled = (
        named_leaves(jax.jit(jax.grad(loss))(model_of(compute, dropout=0.3, attention_dropout=0.2)))
        for compute in (ComputeOptions(unroll=1), ComputeOptions(unroll=8, remat="blocks"))
    )
    for name, leaf in expected.items():
        np.testing.assert_allclose(unrolled[name], leaf, rtol=1e-4, atol=2e-5, err_msg=name)


def test_parameters_match_one_rule_and_are_sharded():
    model = model_of()
    for name, leaf in named_leaves(model).items():
        assert len(rule_of(name, model).axes) == leaf.ndim, name
    mesh, batch = make_mesh("data=2,fsdp=2,tensor=2"), inputs()
    with on_mesh(mesh):
        sharded = forward(jax.device_put(model, model_shardings(model, mesh)), batch, False)
    np.testing.assert_allclose(sharded, forward(model, batch, False), atol=2e-5)


def test_graphs_that_do_not_fit():
    batch = inputs()
    with pytest.raises(
        ValueError, match="nodes of 2 features and paths of 3 hops of 2 features: the model's have"
    ):
        model_of(edge_hops=2)(**batch)
    with pytest.raises(ValueError, match="graphs without nodes"):
        model_of()(**{name: array[:, :0] for name, array in batch.items()})
    for field, value, message in (
        ("heads", 3, "width 16 must be a multiple of heads 3"),
        ("readout", "first", "readout='first' is not one of virtual, mean, sum"),
        ("edge_hops", 0, "edge_hops=0 must be at least 1"),
        ("node_values", (0,), r"node_values=\(0,\) must each be at least 1"),
        ("attention_dropout", 1.0, "attention_dropout=1.0 must be at least 0 and below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **{field: value})
