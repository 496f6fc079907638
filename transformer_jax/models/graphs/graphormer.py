"""Graphormer ("Do Transformers Really Perform Bad for Graph Representation?", Ying et al. 2021).

A graph is a set of tokens, one for each node, and a virtual node that is connected to all. Attention sees the
structure through biases of its logits: one for the length of the shortest path between two nodes, and one for
the edges on it. The degree of a node is added to its embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention
from transformer_jax.layers.attention.visibility import real
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.models.config_checks import check_choices, check_heads, check_minimum, check_rates
from transformer_jax.models.presets import Presets
from transformer_jax.parameter_names import named_leaves

# Standard deviation of the initial values of matrices and embeddings, as in the authors' code.
INITIAL_STD = 0.02


@dataclasses.dataclass(frozen=True)
class GraphormerConfig(Presets):
    """The config of a Graphormer. Sizes have no defaults: use a preset, or set them.

    Attributes:
      width: Model width D.
      layers: Number of layers L.
      heads: Number of attention heads H.
      feed_forward: Width F of the feed-forward layers.
      node_values: Number of values of each feature of a node; () means those in the data.
      edge_values: Number of values of each feature of an edge; () means those in the data.
      classes: Number of predicted values C: classes, or 1 for a number; 0 means those in the data.
      max_degree: Largest degree with its own embedding; larger ones share it.
      max_distance: Largest distance with its own bias; larger distances share it, and unconnected pairs have a
        separate bias.
      edge_hops: Number of edges, from the start of a shortest path, that the edge bias reads.
      degree_encoding: Add embeddings of degrees to the nodes (equation 5).
      distance_bias: Add biases of distances to the logits (equation 6).
      edge_bias: Add biases of the edges on shortest paths to the logits (equation 7).
      distance_std: Standard deviation of the initial biases of distances. With a small value, as in
        the authors' code, attention starts nearly uniform; with a large one, heads start with preferences for
        different distances.
      readout: State that the prediction is read from: that of the "virtual" node as in the paper, or the "mean"
        or the "sum" of the nodes' states.
      dropout: Dropout rate of the embeddings and of the output of each sub-layer.
      attention_dropout: Dropout rate of the attention weights.
      activation: Activation of the feed-forward layers; any name in `ACTIVATIONS`.
      norm_epsilon: Epsilon of the layer normalizations.
      dtype: Compute dtype; parameters, softmax and predictions are float32.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    width: int
    layers: int
    heads: int
    feed_forward: int
    node_values: tuple[int, ...] = ()
    edge_values: tuple[int, ...] = ()
    classes: int = 0
    max_degree: int = 16
    max_distance: int = 20
    edge_hops: int = 5
    degree_encoding: bool = True
    distance_bias: bool = True
    edge_bias: bool = True
    distance_std: float = INITIAL_STD
    readout: Literal["virtual", "mean", "sum"] = "virtual"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation: str = "gelu"
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    # "slim", "small" and "base" are the sizes of the paper's appendix B, "mini" is for two CPU cores.
    preset_fields: ClassVar = {
        "mini": dict(
            width=64, layers=4, heads=8, feed_forward=128, readout="sum", dropout=0.0, attention_dropout=0.0
        ),
        "slim": dict(width=80, layers=12, heads=8, feed_forward=80),
        "small": dict(width=512, layers=6, heads=32, feed_forward=512),
        "base": dict(width=768, layers=12, heads=32, feed_forward=768),
    }

    def __post_init__(self):
        # JSON files hold lists.
        for field in ("node_values", "edge_values"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        check_choices(self, activation=tuple(ACTIVATIONS), readout=("virtual", "mean", "sum"))
        check_heads(self)
        check_minimum(self, 0, "classes", "max_degree", "distance_std")
        check_minimum(self, 1, "max_distance", "edge_hops")
        check_rates(self, "dropout", "attention_dropout")
        for field in ("node_values", "edge_values"):
            if any(count < 1 for count in getattr(self, field)):
                raise ValueError(f"{field}={getattr(self, field)} must each be at least 1")


def multi_hot(features: jax.Array, counts: Sequence[int], dtype: Any) -> jax.Array:
    """Return the one-hot vectors of several features, concatenated.

    Multiplying these vectors by a table sums the selected rows; the gradient is also a matrix product, while
    that of a lookup is a scatter.

    Args:
      features: (..., features) integers; a value out of range, such as -1, has a vector of zeros.
      counts: Number of values of each feature.
      dtype: Dtype of the result.

    Returns:
      (..., sum(counts)).
    """
    parts = [jax.nn.one_hot(features[..., n], count, dtype=dtype) for n, count in enumerate(counts)]
    return jnp.concatenate(parts, axis=-1)


class Graphormer(nnx.Module):
    """An encoder of the nodes of graphs, with a head that predicts values of the complete graph.

    Matrices and embeddings are initially normal with standard deviation 0.02, biases are 0 and normalization
    scales 1. The authors' first code for molecules differs in three points: linear layers start with
    0.02 / sqrt(L), embeddings of an edge's features are averaged instead of added, and nodes have an embedding
    for each direction of their degree.

    Args:
      config: Sizes and variants.
      rngs: Source of the initial values.
      compute: Options for computing the model.
    """

    def __init__(self, config: GraphormerConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        normal = nnx.initializers.normal(INITIAL_STD)
        options: dict[str, Any] = dict(kernel_init=normal, dtype=config.dtype)

        def block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            attention = SelfAttention(
                config.width, config.heads, config.heads, use_bias=True,
                weight_dropout=config.attention_dropout, implementation=compute.attention, rngs=rngs, **options,
            )  # fmt: skip
            return EncoderBlock(
                self_attention=attention,
                self_attention_norm=layer_norm(config, rngs),
                feed_forward=FeedForward(
                    config.width, config.feed_forward, activation=config.activation, use_bias=True, rngs=rngs,
                    **options,
                ),
                feed_forward_norm=layer_norm(config, rngs),
                norm="pre",
                dropout=config.dropout,
            )  # fmt: skip

        def table(*shape: int, std: float = INITIAL_STD) -> nnx.Param:
            return nnx.Param(nnx.initializers.normal(std)(rngs.params(), shape, jnp.float32))

        # Sizes that the data determines are 1 in a plan without data.
        self.node_values, self.edge_values = config.node_values or (1,), config.edge_values or (1,)
        H = config.heads
        self.node_table = table(sum(self.node_values), config.width)
        self.virtual_node = table(1, config.width)
        self.degree_table = table(config.max_degree + 1, config.width) if config.degree_encoding else None
        self.distance_table = (
            table(config.max_distance + 2, H, std=config.distance_std) if config.distance_bias else None
        )
        self.virtual_bias = table(1, H) if config.distance_bias else None
        self.edge_table = table(sum(self.edge_values), H) if config.edge_bias else None
        self.hop_table = table(config.edge_hops, H, H) if config.edge_bias else None
        self.blocks = make_stack(block, rngs.params(), config.layers)
        self.norm = layer_norm(config, rngs)
        # The head computes in float32, so that predictions are not rounded to the compute dtype.
        self.head = nnx.Linear(
            config.width, max(1, config.classes), kernel_init=normal, dtype=jnp.float32,
            dot_general=dense_dot_general, rngs=rngs,
        )  # fmt: skip

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in named_leaves(self).values())

    def _embed(self, nodes: jax.Array, degrees: jax.Array) -> jax.Array:
        """Return the tokens (B, 1 + N, D): the virtual node and the nodes."""
        dtype = jnp.dtype(self.config.dtype)
        x = multi_hot(nodes, self.node_values, dtype) @ self.node_table[...].astype(dtype)
        if self.degree_table is not None:
            table = self.degree_table[...].astype(dtype)
            x = x + jax.nn.one_hot(jnp.minimum(degrees, len(table) - 1), len(table), dtype=dtype) @ table
        virtual = jnp.broadcast_to(self.virtual_node[...].astype(dtype), (len(x), 1, x.shape[-1]))
        return jnp.concatenate([virtual, x], axis=1)

    def attention_bias(self, distances: jax.Array, paths: jax.Array) -> jax.Array | None:
        """Compute the bias of the logits, which all layers share (equations 6 and 7).

        Args:
          distances: See `__call__`.
          paths: See `__call__`.

        Returns:
          (B, H, 1 + N, 1 + N) float32, or None if the config has no bias.
        """
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        bias: Any = None
        if self.distance_table is not None:
            unreachable = config.max_distance + 1
            indices = jnp.where(distances < 0, unreachable, jnp.minimum(distances, config.max_distance))
            one_hot = jax.nn.one_hot(indices, unreachable + 1, dtype=dtype)
            bias = jnp.einsum("bijd,dh->bhij", one_hot, self.distance_table[...].astype(dtype))
        if self.edge_table is not None and self.hop_table is not None:
            # Multiplying the edge embeddings by each hop's matrix first gives one small table per hop.
            tables = jnp.einsum("vw,kwh->kvh", self.edge_table[...], self.hop_table[...]).astype(dtype)
            edges = multi_hot(paths, self.edge_values, dtype)
            total = jnp.einsum("bijkv,kvh->bhij", edges, tables)
            edge_bias = total / jnp.clip(distances, 1, config.edge_hops)[:, None].astype(dtype)
            bias = edge_bias if bias is None else bias + edge_bias
        if bias is None:
            return None
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, 0), (1, 0), (1, 0)))
        if self.virtual_bias is not None:
            length = bias.shape[-1]
            is_first = jnp.arange(length) == 0
            has_virtual = (is_first[:, None] | is_first).astype(jnp.float32)
            bias = bias + self.virtual_bias[0][:, None, None] * has_virtual
        return bias

    def __call__(
        self,
        nodes: jax.Array,
        degrees: jax.Array,
        distances: jax.Array,
        paths: jax.Array,
        is_node: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Predict values of graphs.

        Args:
          nodes: (B, N, features) integers, the features of each node.
          degrees: (B, N) number of edges of each node.
          distances: (B, N, N) number of edges on the shortest path between two nodes, 0 from a node to itself,
            and -1 if there is no path.
          paths: (B, N, N, edge_hops, features) features of the first edges on each of these paths, and -1 after
            its end.
          is_node: (B, N) True at nodes, and False at padding, which no node attends to.
          dropout_key: Random key of dropout; None disables it.
          return_weights: Also return the attention weights.

        Returns:
          predictions (B, C) float32; with weights (predictions, weights (B, L, H, 1 + N, 1 + N) float32), in
          which the virtual node is the first.

        Raises:
          ValueError: There are no nodes, or the numbers of features or of hops differ from the config's.
        """
        config, (B, N) = self.config, degrees.shape
        if not N:
            raise ValueError("graphs without nodes")
        expected = (len(self.node_values), config.edge_hops, len(self.edge_values))
        if (nodes.shape[-1], *paths.shape[-2:]) != expected:
            raise ValueError(
                f"nodes of {nodes.shape[-1]} features and paths of {paths.shape[-2]} hops of "
                f"{paths.shape[-1]} features: the model's have {expected[0]}, {expected[1]} and {expected[2]}"
            )
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        is_token = jnp.concatenate([jnp.ones((B, 1), bool), is_node.astype(bool)], axis=1)
        mask = prepare_mask(real(is_token), self.compute.attention, N + 1, N + 1, config.dtype)

        def run_block(block, x, key):
            return block(x, context, dropout_key=key, return_weights=return_weights)

        with jax.named_scope("encoder"):
            context = AttentionContext(mask, bias=self.attention_bias(distances, paths))
            x = dropout(self._embed(nodes, degrees), config.dropout, embed_key)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
        predictions = self.head(self._read(self.norm(x), is_node)).astype(jnp.float32)
        return (predictions, weights.swapaxes(0, 1)) if return_weights else predictions

    def _read(self, states: jax.Array, is_node: jax.Array) -> jax.Array:
        """Return the state (B, D) that the prediction is read from."""
        if self.config.readout == "virtual":
            return states[:, 0]
        counted = is_node.astype(states.dtype)[..., None]
        total = (states[:, 1:] * counted).sum(axis=1)
        return total if self.config.readout == "sum" else total / jnp.maximum(counted.sum(axis=1), 1)
