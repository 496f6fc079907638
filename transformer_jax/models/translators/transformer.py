"""The Transformer ("Attention Is All You Need", Vaswani et al. 2017): an encoder-decoder translator."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.masks import padding_mask
from transformer_jax.layers.attention.multi_head import MultiHeadAttention
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention
from transformer_jax.layers.attention.visibility import causal, real, same_segment
from transformer_jax.layers.blocks import DecoderBlock, EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.fusion_barrier import materialize
from transformer_jax.layers.named_points import EMBEDDING, named
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.absolute import learned_positions, segment_positions, sinusoidal_positions
from transformer_jax.layers.stack import make_stack, run_stack, unstack
from transformer_jax.models.config_checks import check_choices, check_heads, check_rates
from transformer_jax.models.input_checks import check_length, check_masks_and_segments
from transformer_jax.models.presets import Presets
from transformer_jax.models.step import StepFunction, StepOutput
from transformer_jax.models.token_embedding import token_embedding
from transformer_jax.models.translators.transformer_cache import TransformerCache
from transformer_jax.models.translators.translator import Translator


def _size(layers: int, width: int, feed_forward: int, heads: int, dropout: float) -> dict[str, Any]:
    return dict(
        width=width,
        feed_forward=feed_forward,
        heads=heads,
        kv_heads=heads,
        encoder_layers=layers,
        decoder_layers=layers,
        dropout=dropout,
    )


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Presets):
    """The config of a Transformer. Sizes have no defaults: use a preset, or set them.

    Attributes:
      vocab_size: Vocabulary size V, shared by source and target.
      width: Model width D.
      feed_forward: Width F of the feed-forward layers.
      heads: Number of attention heads H.
      kv_heads: Number of key/value heads G, each shared by H / G query heads; the paper has G = H.
      encoder_layers: Number of encoder layers L.
      decoder_layers: Number of decoder layers L.
      max_length: Maximum length of a source or target in tokens.
      dropout: Dropout rate after each sub-layer and after the sum of embedding and position (section 5.4).
      norm: "post" normalizes after each sub-layer, as in the paper; "pre" before it, which trains deeper stacks
        stably.
      positions: "sinusoidal", as in the paper, or "learned".
      activation: Activation of the feed-forward layers, "relu", as in the paper, or "gelu".
      tie: "all" shares one matrix between both embeddings and the logits (section 3.4), "decoder" between
        target embedding and logits, "none" nothing.
      attention_bias: Add biases to the attention projections; the paper has none.
      embedding_scale: Multiply embeddings by sqrt(D) (section 3.4).
      norm_epsilon: Epsilon of the layer normalizations.
      dtype: Compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: The embedding tables are padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    vocab_size: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    encoder_layers: int
    decoder_layers: int
    dropout: float
    max_length: int = 512
    norm: Literal["post", "pre"] = "post"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    activation: Literal["relu", "gelu"] = "relu"
    tie: Literal["all", "decoder", "none"] = "all"
    attention_bias: bool = False
    embedding_scale: bool = True
    norm_epsilon: float = 1e-6
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    # base and big are from table 3 of the paper, tiny is the usual size for Multi30k (Wu et al. 2021), small
    # has twice its width, mini is for the included phrases and two CPU cores.
    preset_fields: ClassVar = {
        "mini": _size(2, 128, 512, 4, 0.1),
        "tiny": _size(4, 128, 256, 4, 0.3),
        "small": _size(4, 256, 1024, 4, 0.3),
        "base": _size(6, 512, 2048, 8, 0.1),
        "big": _size(6, 1024, 4096, 16, 0.3),
    }

    def __post_init__(self):
        check_choices(
            self,
            norm=("post", "pre"),
            positions=("sinusoidal", "learned"),
            activation=("relu", "gelu"),
            tie=("all", "decoder", "none"),
        )
        check_heads(self)
        check_rates(self, "dropout")


class Transformer(Translator):
    """An encoder-decoder Transformer.

    Calling it computes `logits(hidden_states(source, target))`: `hidden_states` runs encoder and decoder in
    training, while `start` and `step_function` decode token by token with a cache.

    Initial values: every matrix is Xavier-uniform (Glorot & Bengio 2010), as in the authors' Tensor2Tensor;
    embeddings are normal with standard deviation D^-0.5, so that they have unit size once scaled by sqrt(D);
    biases are 0 and normalization scales 1.
    """

    def __init__(
        self, config: TransformerConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()
    ):
        self.config, self.compute = config, compute
        dense: dict[str, Any] = dict(kernel_init=nnx.initializers.xavier_uniform(), dtype=config.dtype)
        attention: dict[str, Any] = dense | dict(
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            use_bias=config.attention_bias,
            implementation=compute.attention,
        )
        feed_forward: dict[str, Any] = dense | dict(
            width=config.width, hidden=config.feed_forward, activation=config.activation, use_bias=True
        )

        def encoder_block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            return EncoderBlock(
                self_attention=SelfAttention(**attention, rngs=rngs),
                self_attention_norm=layer_norm(config, rngs),
                feed_forward=FeedForward(**feed_forward, rngs=rngs),
                feed_forward_norm=layer_norm(config, rngs),
                norm=config.norm,
                dropout=config.dropout,
            )

        def decoder_block(key: jax.Array) -> DecoderBlock:
            rngs = nnx.Rngs(key)
            return DecoderBlock(
                self_attention=SelfAttention(**attention, rngs=rngs),
                self_attention_norm=layer_norm(config, rngs),
                cross_attention=MultiHeadAttention(**attention, rngs=rngs),
                cross_attention_norm=layer_norm(config, rngs),
                feed_forward=FeedForward(**feed_forward, rngs=rngs),
                feed_forward_norm=layer_norm(config, rngs),
                norm=config.norm,
                dropout=config.dropout,
            )

        std = config.width**-0.5

        def position_table():
            init = nnx.initializers.normal(std)
            return nnx.Embed(config.max_length, config.width, embedding_init=init, rngs=rngs)

        self.target_embedding = token_embedding(config, std=std, rngs=rngs)
        self.source_embedding = token_embedding(config, std=std, rngs=rngs) if config.tie != "all" else None
        self.unembedding = (
            nnx.Linear(
                config.width,
                self.target_embedding.table.num_embeddings,
                use_bias=False,
                kernel_init=nnx.initializers.normal(std),
                dtype=jnp.dtype(config.dtype),
                preferred_element_type=jnp.float32,
                dot_general=dense_dot_general,
                rngs=rngs,
            )
            if config.tie == "none"
            else None
        )
        learned = config.positions == "learned"
        self.source_positions = position_table() if learned else None
        self.target_positions = position_table() if learned else None
        self.encoder = make_stack(encoder_block, rngs.params(), config.encoder_layers)
        self.decoder = make_stack(decoder_block, rngs.params(), config.decoder_layers)
        # Pre-norm leaves the stream unnormalized, while post-norm ends each block with a norm.
        self.encoder_norm = layer_norm(config, rngs) if config.norm == "pre" else None
        self.decoder_norm = layer_norm(config, rngs) if config.norm == "pre" else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        padding = self.target_embedding.table.num_embeddings - self.config.vocab_size
        tables = sum(x is not None for x in (self.target_embedding, self.source_embedding, self.unembedding))
        return sum(x.size for x in jax.tree.leaves(self)) - tables * padding * self.config.width

    def _embed(self, embedding, position_table, tokens, positions, dropout_key):
        """Add scaled embeddings and positions and apply dropout: (B, N) -> (B, N, D).

        Positions are (N,), or (B, N) if they differ between rows.
        """
        config = self.config
        x = embedding(tokens)
        if config.embedding_scale:
            x = x * jnp.asarray(config.width**0.5, x.dtype)
        if position_table is None:
            encoding = sinusoidal_positions(positions, config.width)
        else:
            encoding = learned_positions(positions, position_table.embedding[...])
        return dropout(x + encoding.astype(x.dtype), config.dropout, dropout_key)

    def logits(self, x: jax.Array, table: jax.Array | None = None) -> jax.Array:
        """Compute the logits (B, T, V) float32 from the residual stream; see `Translator.logits`."""
        if self.decoder_norm is not None:
            x = self.decoder_norm(x)
        if self.unembedding is None:
            return self.target_embedding.logits(x, table)
        return self.unembedding(x)[..., : self.config.vocab_size].astype(jnp.float32)

    def encode(
        self,
        source: jax.Array,
        *,
        source_mask: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the encoder's output (B, S, D) in the compute dtype.

        Args:
          source: (B, S) token ids.
          source_mask: (B, S), True at real tokens, or (B,) numbers of leading real tokens; None means no
            padding.
          source_segments: Segments of packed rows, see `__call__`; instead of `source_mask`.
          dropout_key: Turns dropout on.

        Raises:
          ValueError: The source has no tokens or more than `max_length`, or both a mask and segments are
            passed.
        """
        if source_segments is not None and source_mask is not None:
            raise ValueError("segments mark padding already: omit source_mask")
        check_length(self.config, source.shape[1], "a source")
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        embedding = self.target_embedding if self.source_embedding is None else self.source_embedding
        S = source.shape[1]
        visible, positions = None if source_mask is None else real(source_mask, S), jnp.arange(S)
        if source_segments is not None:
            visible = same_segment(source_segments, source_segments) & real(source_segments != 0)
            positions = segment_positions(source_segments)
        context = AttentionContext(prepare_mask(visible, self.compute.attention, S, S, self.config.dtype))
        with jax.named_scope("encoder"):
            x = self._embed(embedding, self.source_positions, source, positions, embed_key)
            x, _ = run_stack(
                lambda block, x, key: block(x, context, dropout_key=key),
                self.encoder,
                x,
                stack_key,
                self.compute,
            )
            return x if self.encoder_norm is None else self.encoder_norm(x)

    def hidden_states(
        self,
        source: jax.Array,
        target: jax.Array,
        *,
        source_mask: jax.Array | None = None,
        target_mask: jax.Array | None = None,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Compute the residual stream after the decoder's last block, the input of `logits`.

        Arguments and errors are those of `__call__`.

        Returns:
          x (B, T, D), or (x, weights (B, L, H, T, S) float32).
        """
        check_length(self.config, target.shape[1], "a target")
        check_masks_and_segments(source_mask, target_mask, source_segments, target_segments)
        encoder_key, embed_key, stack_key = (
            (None, None, None) if dropout_key is None else jax.random.split(dropout_key, 3)
        )
        memory = self.encode(
            source, source_mask=source_mask, source_segments=source_segments, dropout_key=encoder_key
        )
        T, S = target.shape[1], source.shape[1]
        visible, positions = causal(T, T), jnp.arange(T)
        if target_mask is not None:
            visible = visible & real(target_mask, T)
        visible_source = None if source_mask is None else real(source_mask, S)
        if source_segments is not None and target_segments is not None:
            visible = visible & same_segment(target_segments, target_segments)
            visible_source = same_segment(target_segments, source_segments) & real(source_segments != 0)
            positions = segment_positions(target_segments)
        context = AttentionContext(prepare_mask(visible, self.compute.attention, T, T, self.config.dtype))
        memory_mask = prepare_mask(visible_source, self.compute.attention, T, S, self.config.dtype)

        def run_block(block, x, key):
            x, (weights, _) = block(
                x,
                context,
                block.project_memory(memory),
                memory_mask=memory_mask,
                dropout_key=key,
                return_weights=return_weights,
            )
            return x, weights

        with jax.named_scope("decoder"):
            x = self._embed(self.target_embedding, self.target_positions, target, positions, embed_key)
            x, weights = run_stack(run_block, self.decoder, x, stack_key, self.compute)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def start(
        self, source: jax.Array, *, source_mask: jax.Array | None = None, max_length: int
    ) -> TransformerCache:
        """Encode the source and create the cache for decoding.

        Args:
          source: (B, S) token ids.
          source_mask: See `encode`.
          max_length: Maximum number of target tokens.

        Raises:
          ValueError: The source has no tokens, or it or `max_length` exceeds the model's `max_length`.
        """
        check_length(self.config, max_length, "a target")
        config = self.config
        memory = self.encode(source, source_mask=source_mask)
        blocks = unstack(self.decoder)
        return TransformerCache.empty(
            len(blocks), source.shape[0], max_length,
            config.kv_heads, config.width // config.heads, memory.dtype,
            first=None,
            # Materialized in the layout that the steps read; XLA would otherwise keep the layout in which it
            # was computed and transpose it in every step of the loop.
            memory=tuple(jax.tree.map(materialize, block.project_memory(memory)) for block in blocks),
            memory_mask=None if source_mask is None else padding_mask(source_mask, source.shape[1]),
        )  # fmt: skip

    def step_function(self, *, return_weights: bool = False) -> StepFunction:
        """Return the step function for decoding; create it before a loop, since it slices the weights once."""
        blocks = unstack(self.decoder)
        table = None
        if self.unembedding is None:
            table = materialize(self.target_embedding.output_weight(jnp.dtype(self.config.dtype)))

        def step(
            cache: TransformerCache, tokens: jax.Array, *, prompt: bool = False
        ) -> tuple[StepOutput, TransformerCache]:
            positions, _ = cache.positions(tokens.shape[1])
            with jax.named_scope("decoder"):
                x = self._embed(self.target_embedding, self.target_positions, tokens, positions, None)
                x = named(x, EMBEDDING)
                extended, mask = cache.extended(tokens.shape[1])
                layers, weights = [], []
                for block, memory, layer in zip(blocks, cache.memory, cache.target, strict=True):
                    x, (layer_weights, layer) = block(
                        x,
                        AttentionContext(mask),
                        memory,
                        memory_mask=cache.memory_mask,
                        cache=layer,
                        at=cache.length,
                        return_weights=return_weights,
                    )
                    layers.append(layer)
                    weights.append(layer_weights)
            if prompt:
                x = x[:, -1:]
            output = StepOutput(self.logits(x, table), jnp.stack(weights, axis=1) if return_weights else None)
            return output, extended.replace(target=tuple(layers))

        return step
