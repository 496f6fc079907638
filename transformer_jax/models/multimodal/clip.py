"""CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023): image and text vectors in one space."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention, unstack_encoder
from transformer_jax.layers.attention.visibility import causal
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.embedding import count_without_padding
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.schemes import LearnedPositions
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.layers.text_pooling import scale_to_unit_length
from transformer_jax.models.config_checks import check_minimum, check_rates
from transformer_jax.models.input_checks import check_length
from transformer_jax.models.token_embedding import token_embedding
from transformer_jax.models.vision.dino import encoder_config
from transformer_jax.models.vision.vit import ViT, ViTConfig

# Standard deviation of the token vectors' initial values in CLIP's code; positions have half of it.
_TOKEN_STD = 0.02


def _sizes(
    layers: int, width: int, heads: int, patch: int, image: int, text_layers: int, text_width: int,
    text_heads: int, embedding: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the size fields; the feed-forward layers are four times as wide as the streams."""
    return dict(
        layers=layers, width=width, heads=heads, feed_forward=4 * width, patch_size=patch, image_size=image,
        text_layers=text_layers, text_width=text_width, text_heads=text_heads, text_feed_forward=4 * text_width,
        embedding_width=embedding,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TextTowerConfig:
    """The config of the text encoder; see `ClipConfig` for the fields."""

    vocab_size: int
    max_length: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    is_causal: bool
    dropout: float
    activation: str
    norm_epsilon: float
    dtype: str
    vocab_multiple: int


@dataclasses.dataclass(frozen=True)
class ClipConfig(ViTConfig):
    """`ViTConfig` of the image encoder, with the fields of the text encoder and the shared space.

    Attributes:
      vocab_size: Vocabulary size V of the texts.
      max_length: Maximum length of a text in tokens, with its begin and end token.
      text_width: Width of the text encoder.
      text_layers: Number of its layers.
      text_heads: Number of its attention heads.
      text_feed_forward: Width of its feed-forward layers.
      text_pooling: State that represents a text. "end": that of the end token, in a causal encoder (CLIP).
        "last": that of the last position, in a bidirectional encoder that also reads the padding (SigLIP).
      text_bias: Add a bias to the projection of texts.
      image_projection: Project image vectors; SigLIP uses the pooled vector itself.
      embedding_width: Width E of the shared space.
      similarity: "softmax" over the batch (CLIP), or "sigmoid" of each pair with a trained bias (SigLIP).
      text_dropout: Dropout rate of the text encoder.
      vocab_multiple: The embedding table is padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    vocab_size: int = 49_408
    max_length: int = 77
    text_width: int = 512
    text_layers: int = 12
    text_heads: int = 8
    text_feed_forward: int = 2_048
    text_pooling: Literal["end", "last"] = "end"
    text_bias: bool = False
    image_projection: bool = True
    embedding_width: int = 512
    similarity: Literal["softmax", "sigmoid"] = "softmax"
    text_dropout: float = 0.0
    vocab_multiple: int = 128

    # b32, b16 and l14 are CLIP's sizes (table 20), siglip_b16 is SigLIP's B/16. mini is for scenes of 32
    # pixels, small for photographs of 64 pixels, both for two CPU cores.
    _clip: ClassVar = dict(
        activation="quick_gelu", input_norm=True, patch_bias=False, norm_epsilon=1e-5, vocab_size=49_408
    )
    _small: ClassVar = dict(input_norm=True, patch_bias=False, norm_epsilon=1e-5, max_length=32)
    _siglip: ClassVar = dict(
        activation="gelu_tanh",
        pooling="attention",
        text_pooling="last",
        text_bias=True,
        image_projection=False,
        similarity="sigmoid",
        vocab_size=32_000,
        max_length=64,
    )
    preset_fields: ClassVar = {
        "mini": _small | _sizes(3, 96, 4, 4, 32, 2, 96, 4, 64) | dict(vocab_size=300),
        "small": _small | _sizes(6, 192, 6, 8, 64, 3, 192, 6, 192) | dict(vocab_size=2_048),
        "b32": _sizes(12, 768, 12, 32, 224, 12, 512, 8, 512) | _clip,
        "b16": _sizes(12, 768, 12, 16, 224, 12, 512, 8, 512) | _clip,
        "l14": _sizes(24, 1_024, 16, 14, 224, 12, 768, 12, 768) | _clip,
        "siglip_b16": _sizes(12, 768, 12, 16, 224, 12, 768, 12, 768) | _siglip,
    }

    def __post_init__(self):
        super().__post_init__()
        if self.text_pooling not in ("end", "last"):
            raise ValueError(f"text_pooling={self.text_pooling!r} is not one of end, last")
        if self.similarity not in ("softmax", "sigmoid"):
            raise ValueError(f"similarity={self.similarity!r} is not one of softmax, sigmoid")
        check_minimum(self, 1, "text_width", "text_layers", "text_heads", "text_feed_forward")
        check_minimum(self, 2, "max_length")
        check_rates(self, "text_dropout")
        if self.text_width % self.text_heads:
            raise ValueError(f"text_width {self.text_width} must be a multiple of text_heads {self.text_heads}")
        if not self.image_projection and self.features != self.embedding_width:
            raise ValueError(
                f"without an image_projection, embedding_width {self.embedding_width} must be the width of "
                f"image vectors, {self.features}"
            )

    @property
    def encoder(self) -> ViTConfig:
        """The config of the image encoder only."""
        return encoder_config(self)

    @property
    def text(self) -> TextTowerConfig:
        """The config of the text encoder only."""
        return TextTowerConfig(
            vocab_size=self.vocab_size, max_length=self.max_length, width=self.text_width,
            layers=self.text_layers, heads=self.text_heads, feed_forward=self.text_feed_forward,
            is_causal=self.text_pooling == "end", dropout=self.text_dropout, activation=self.activation,
            norm_epsilon=self.norm_epsilon, dtype=self.dtype, vocab_multiple=self.vocab_multiple,
        )  # fmt: skip


class TextTower(nnx.Module):
    """Token embeddings with learned positions, pre-norm blocks and a norm.

    Kernels are normal with standard deviation width^-0.5; the output kernels of sub-layers are also divided by
    sqrt(2 * layers).

    Args:
      config: Sizes.
      rngs: Source of the initial values.
      compute: Options for computing the model.
    """

    def __init__(self, config: TextTowerConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        options: dict[str, Any] = dict(
            use_bias=True, kernel_init=nnx.initializers.normal(config.width**-0.5), dtype=config.dtype,
            output_init=nnx.initializers.normal(config.width**-0.5 * (2 * config.layers) ** -0.5),
        )  # fmt: skip

        def block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            return EncoderBlock(
                self_attention=SelfAttention(
                    config.width, config.heads, config.heads, implementation=compute.attention, rngs=rngs,
                    **options,
                ),
                self_attention_norm=layer_norm(config, rngs),
                feed_forward=FeedForward(
                    config.width, config.feed_forward, activation=config.activation, rngs=rngs, **options
                ),
                feed_forward_norm=layer_norm(config, rngs),
                norm="pre",
                dropout=config.dropout,
            )  # fmt: skip

        self.embedding = token_embedding(config, std=_TOKEN_STD, rngs=rngs)
        self.positions = LearnedPositions(config.max_length, config.width, std=_TOKEN_STD / 2, rngs=rngs)
        self.blocks = make_stack(block, rngs.params(), config.layers)
        self.norm = layer_norm(config, rngs)

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `unstack_encoder`."""
        return unstack_encoder(self)

    def hidden_states(
        self, tokens: jax.Array, *, dropout_key: jax.Array | None = None, return_weights: bool = False
    ):
        """Compute the hidden states after the last block and norm.

        Args:
          tokens: (B, T) token ids.
          dropout_key: Turns dropout on.
          return_weights: Also return the attention weights.

        Returns:
          x (B, T, D), or (x, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: There are no tokens, or more than `max_length`.
        """
        config, T = self.config, tokens.shape[1]
        check_length(config, T, "a text")
        visible = causal(T, T) if config.is_causal else None
        context = AttentionContext(prepare_mask(visible, self.compute.attention, T, T, config.dtype))
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)

        def run_block(block, x, key):
            return block(x, context, dropout_key=key, return_weights=return_weights)

        with jax.named_scope("text_encoder"):
            x = self.positions.add_to(self.embedding(tokens), jnp.arange(T))
            x = dropout(x, config.dropout, embed_key)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
            x = self.norm(x)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def pooled(self, states: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the state (B, D) that represents each text.

        Args:
          states: (B, T, D).
          lengths: (B,) numbers of real tokens; a bidirectional encoder reads the last position instead.
        """
        if not self.config.is_causal:
            return states[:, -1]
        return jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]


class Clip(nnx.Module):
    """An image encoder and a text encoder whose vectors are similar for pairs that belong together."""

    children: ClassVar[tuple[str, ...]] = ("image_encoder", "text_encoder")

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.image_encoder = ViT(config.encoder, rngs=rngs, compute=compute)
        self.text_encoder = TextTower(config.text, rngs=rngs, compute=compute)

        def projection(inputs: int, use_bias: bool) -> nnx.Linear:
            return nnx.Linear(
                inputs, config.embedding_width, use_bias=use_bias,
                kernel_init=nnx.initializers.normal(inputs**-0.5), dtype=jnp.dtype(config.dtype),
                dot_general=dense_dot_general, rngs=rngs,
            )  # fmt: skip

        self.image_projection = projection(config.features, False) if config.image_projection else None
        self.text_projection = projection(config.text_width, config.text_bias)
        # The initial temperature is 0.07 in CLIP (section 2.5), 0.1 in SigLIP, whose bias starts at -10.
        is_softmax = config.similarity == "softmax"
        self.logit_scale = nnx.Param(jnp.full(1, math.log(1 / 0.07 if is_softmax else 10.0)))
        self.logit_bias = None if is_softmax else nnx.Param(jnp.full(1, -10.0))

    @property
    def parameter_count(self) -> int:
        """Number of parameters, without the padding of the vocabulary."""
        return count_without_padding(self, self.text_encoder.embedding)

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `unstack_encoder`."""
        copy = nnx.merge(*nnx.split(self))
        copy.image_encoder = copy.image_encoder.for_inference()
        copy.text_encoder = copy.text_encoder.for_inference()
        return copy

    def embed_images(self, images: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Compute the vectors (B, E) float32 of length 1 of images (B, height, width, channels)."""
        encoder = self.image_encoder
        x = encoder.pooled(encoder.hidden_states(images, dropout_key=dropout_key))
        x = x if self.image_projection is None else self.image_projection(x)
        return scale_to_unit_length(x.astype(jnp.float32))

    def embed_texts(
        self, tokens: jax.Array, lengths: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Compute the vectors (B, E) float32 of length 1 of texts.

        Args:
          tokens: (B, T) token ids with begin and end token.
          lengths: (B,) numbers of real tokens.
          dropout_key: Turns dropout on.

        Raises:
          ValueError: There are no tokens, or more than `max_length`.
        """
        states = self.text_encoder.hidden_states(tokens, dropout_key=dropout_key)
        x = self.text_projection(self.text_encoder.pooled(states, lengths))
        return scale_to_unit_length(x.astype(jnp.float32))

    @property
    def scale(self) -> jax.Array:
        """The factor () of similarities, the inverse temperature."""
        return jnp.exp(self.logit_scale[0])

    @property
    def bias(self) -> jax.Array:
        """The number () added to scaled similarities; 0 for CLIP."""
        return jnp.zeros(()) if self.logit_bias is None else self.logit_bias[0]

    def __call__(self, images: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Compute the logits (B, N) float32 of B images (B, height, width, channels) and N texts (N, T)."""
        similarity = self.embed_images(images) @ self.embed_texts(tokens, lengths).T
        return similarity * self.scale + self.bias
