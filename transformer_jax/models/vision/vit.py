"""Vision Transformer (Dosovitskiy et al. 2021): an encoder that reads patches of an image in place of words."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention, unstacked
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward, GatedFeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.patches import ConvolutionalTokens, PatchTokens
from transformer_jax.layers.positions.images import resized_grid, sinusoidal_grid
from transformer_jax.layers.positions.schemes import LearnedPositions
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.models.config_checks import check_choices, check_dropout
from transformer_jax.models.presets import Presets
from transformer_jax.parameter_names import named_leaves

# Standard deviation of the initial values of tokens, positions and heads (Touvron et al. 2021, DeiT).
INITIAL_STD = 0.02


def _sizes(layers: int, width: int, heads: int, patch: int, image: int = 224, **others: Any) -> dict[str, Any]:
    """The fields of a ViT, whose feed-forward layers are four times as wide."""
    return (
        dict(
            layers=layers, width=width, heads=heads, feed_forward=4 * width, patch_size=patch, image_size=image
        )
        | others
    )


def _compact(layers: int, width: int, heads: int, factor: int, convolutions: int) -> dict[str, Any]:
    """The fields of a compact convolutional transformer (Hassani et al. 2021, table 1, and their code)."""
    return dict(
        layers=layers, width=width, heads=heads, feed_forward=factor * width, patch_size=1, image_size=32,
        convolutions=convolutions, pooling="weighted", norm_epsilon=1e-5, stochastic_depth=0.1,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ViTConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      image_size: height and width in pixels that positions are learned for; other sizes have them interpolated.
      patch_size: height and width of a patch; not read where there are convolutions.
      width: D.
      layers: L.
      heads: H.
      feed_forward: F.
      channels: of an image.
      convolutions: layers of a convolutional tokenizer in place of patches; 0 is patches.
      pooling: what classes are read from: "class" token, "mean" of the patches, "class_mean" both after each
        other, "weighted" mean with trained weights (Hassani et al. 2021, equation 5).
      positions: "learned", or fixed "sinusoidal" ones of row and column.
      antialias: whether positions that are interpolated to a smaller grid are smoothed.
      registers: tokens that belong to no patch (Darcet et al. 2024).
      distillation: a second class token, taught by another network (Touvron et al. 2021).
      distillation_head: a classifier reads that token too, and the mean of both is predicted.
      norm: "pre", or "post" as in older models.
      final_norm: a norm behind the last block.
      layer_scale: first value of a factor on what each sub-layer adds; 0 has none.
      gated: SwiGLU feed-forward layers.
      stochastic_depth: probability that a sub-layer of the last block is left out in training; it rises from 0
        in the first one.
      dropout: on the embeddings and on what each sub-layer adds.
      attention_dropout: on the attention weights.
      activation: of the feed-forward layers; any name of `ACTIVATIONS`.
      norm_epsilon: of the layer normalisations.
      pooler: a dense layer with tanh on the class token, as pretrained models have.
      classes: of a classifier's head; 0 takes what the data has.
      dtype: compute dtype; parameters, softmax and logits are float32.

    Raises:
      ValueError: a value outside its choices, or sizes that do not divide.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    channels: int = 3
    convolutions: int = 0
    pooling: Literal["class", "mean", "class_mean", "weighted"] = "class"
    positions: Literal["learned", "sinusoidal"] = "learned"
    antialias: bool = False
    registers: int = 0
    distillation: bool = False
    distillation_head: bool = False
    norm: Literal["pre", "post"] = "pre"
    final_norm: bool = True
    layer_scale: float = 0.0
    gated: bool = False
    stochastic_depth: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: str = "gelu"
    norm_epsilon: float = 1e-6
    pooler: bool = False
    classes: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    # Ti is DeiT's (Touvron et al. 2021, table 1), the others are the paper's table 1; the number is the
    # patch's.
    preset_fields: ClassVar = {
        "mini": _sizes(4, 64, 4, 2, 8),
        "ti4": _sizes(12, 192, 3, 4, 32),
        "s4": _sizes(12, 384, 6, 4, 32),
        "lite_6_4": _sizes(6, 256, 4, 4, 32) | dict(feed_forward=512),
        "cct_2_3x2": _compact(2, 128, 2, 1, 2),
        "cct_4_3x2": _compact(4, 128, 2, 1, 2),
        "cct_6_3x1": _compact(6, 256, 4, 2, 1),
        "cct_7_3x1": _compact(7, 256, 4, 2, 1),
        "ti16": _sizes(12, 192, 3, 16),
        "s16": _sizes(12, 384, 6, 16),
        "b32": _sizes(12, 768, 12, 32),
        "b16": _sizes(12, 768, 12, 16),
        "l16": _sizes(24, 1024, 16, 16),
        "h14": _sizes(32, 1280, 16, 14),
    }

    def __post_init__(self):
        check_choices(
            self, activation=tuple(ACTIVATIONS), pooling=("class", "mean", "class_mean", "weighted"),
            positions=("learned", "sinusoidal"), norm=("pre", "post"),
        )  # fmt: skip
        for field in ("image_size", "patch_size", "width", "layers", "heads", "feed_forward", "channels"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        for field in ("convolutions", "registers", "classes", "layer_scale"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 0")
        if not self.convolutions and self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.positions == "sinusoidal" and self.width % 4:
            raise ValueError(f"width {self.width} must be a multiple of 4 for sinusoidal positions of two axes")
        check_dropout(self)
        for field in ("attention_dropout", "stochastic_depth"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 0 and below 1")

    @property
    def has_class_token(self) -> bool:
        """Whether a token stands in front of the patches that classes are read from."""
        return self.pooling in ("class", "class_mean")

    @property
    def prefix(self) -> int:
        """Number of tokens in front of the patches."""
        return self.has_class_token + self.distillation + self.registers

    @property
    def features(self) -> int:
        """Width of what classes are read from."""
        return self.width * (2 if self.pooling == "class_mean" else 1)


def _dense(config: ViTConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, kernel_init=nnx.initializers.truncated_normal(INITIAL_STD),
        dtype=jnp.dtype(config.dtype), dot_general=dense_dot_general, rngs=rngs,
    )  # fmt: skip


class ViT(nnx.Module):
    """Patches, positions and a class token through a stack of bidirectional blocks.

    Initial values: matrices of blocks and patches are uniform (Glorot & Bengio 2010), as in the authors' code;
    tokens and positions are normal with standard deviation 0.02, cut off at two of them; biases are 0 and
    normalisation scales 1.

    Args:
      config: sizes and variants.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
      reads_images: False for a stack that is given its tokens, see `through_blocks`.
    """

    def __init__(
        self,
        config: ViTConfig,
        *,
        rngs: nnx.Rngs,
        compute: ComputeOptions = ComputeOptions(),
        reads_images: bool = True,
    ):
        self.config, self.compute = config, compute
        init = nnx.initializers.truncated_normal(INITIAL_STD)
        options: dict[str, Any] = dict(kernel_init=nnx.initializers.xavier_uniform(), dtype=config.dtype)
        feed_forward = GatedFeedForward if config.gated else FeedForward

        def block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            attention = SelfAttention(
                config.width, config.heads, config.heads, use_bias=True,
                weight_dropout=config.attention_dropout, implementation=compute.attention, rngs=rngs, **options,
            )  # fmt: skip
            return EncoderBlock(
                self_attention=attention,
                self_attention_norm=layer_norm(config, rngs),
                feed_forward=feed_forward(
                    config.width, config.feed_forward, activation="silu" if config.gated else config.activation,
                    use_bias=True, rngs=rngs, **options,
                ),
                feed_forward_norm=layer_norm(config, rngs),
                norm=config.norm,
                dropout=config.dropout,
                layer_scale=config.layer_scale or None,
                width=config.width,
            )  # fmt: skip

        def token(count: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), (count, config.width), jnp.float32))

        if reads_images:
            self.patches: PatchTokens | ConvolutionalTokens
            if config.convolutions:
                self.patches = ConvolutionalTokens(
                    config.convolutions, config.channels, 64, config.width, dtype=config.dtype, rngs=rngs
                )
            else:
                self.patches = PatchTokens(
                    config.patch_size, config.channels, config.width, rngs=rngs, **options
                )
            self.grid = self.patches.grid(config.image_size, config.image_size)
            self.class_token = token(1) if config.has_class_token else None
            self.distillation_token = token(1) if config.distillation else None
            self.registers = token(config.registers) if config.registers else None
            # The class tokens have positions of their own; registers have none.
            self._tokens_with_position = config.has_class_token + config.distillation
            rows = self._tokens_with_position + self.grid[0] * self.grid[1]
            learned = config.positions == "learned"
            self.positions = (
                LearnedPositions(rows, config.width, std=INITIAL_STD, rngs=rngs) if learned else None
            )
        self.blocks = make_stack(block, rngs.params(), config.layers)
        self.norm = layer_norm(config, rngs) if config.final_norm else None
        self.pooling = _dense(config, config.width, 1, rngs) if config.pooling == "weighted" else None
        self.pooler = _dense(config, config.width, config.width, rngs) if config.pooler else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in named_leaves(self).values())

    def for_inference(self) -> Self:
        """The same for a program that is called many times, see `unstacked`."""
        return unstacked(self)

    def position_vectors(self, grid: tuple[int, int]) -> jax.Array:
        """What is added to the class tokens and to the patches of a grid, (tokens, D) float32."""
        front = self._tokens_with_position
        if self.positions is None:
            fixed = sinusoidal_grid(*grid, self.config.width)
            return jnp.concatenate([jnp.zeros((front, self.config.width)), fixed])
        table = self.positions.table.embedding[...]
        own = resized_grid(table[front:], self.grid, grid, antialias=self.config.antialias)
        return jnp.concatenate([table[:front], own.astype(table.dtype)])

    def embedded(self, images: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        """The tokens of images with their positions, in front of the first block.

        Args:
          images: (B, height, width, channels) float, normalised.
          kept: (B, K) numbers of the patches that are read, of a masked autoencoder; None is all.

        Returns:
          (B, prefix + P, D).

        Raises:
          ValueError: patches that do not divide the image, or another number of channels.
        """
        config = self.config
        if images.ndim != 4 or images.shape[-1] != config.channels:
            raise ValueError(f"images are (B, height, width, {config.channels}), got {images.shape}")
        x = self.patches(images.astype(config.dtype))
        vectors = self.position_vectors(self.patches.grid(*images.shape[1:3])).astype(x.dtype)
        front = self._tokens_with_position
        x = x + vectors[front:]
        if kept is not None:
            x = jnp.take_along_axis(x, kept[..., None], axis=1)
        own = [t[...].astype(x.dtype) for t in (self.class_token, self.distillation_token) if t is not None]
        parts = [jnp.concatenate(own) + vectors[:front]] if own else []
        if self.registers is not None:
            parts.append(self.registers[...].astype(x.dtype))
        if not parts:
            return x
        prefix = jnp.concatenate(parts)
        return jnp.concatenate([jnp.broadcast_to(prefix, (len(x), *prefix.shape)), x], axis=1)

    def _branch_factors(self, rows: int, key: jax.Array | None) -> jax.Array | None:
        """(L, 2, B): 0 for sub-layers that are left out, 1 / probability for the others."""
        rate, layers = self.config.stochastic_depth, self.config.layers
        if key is None or not rate:
            return None
        kept = 1.0 - jnp.linspace(0.0, rate, layers)[:, None, None]
        return jax.random.bernoulli(key, jnp.broadcast_to(kept, (layers, 2, rows))) / kept

    def hidden_states(
        self,
        images: jax.Array,
        *,
        kept: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """The states behind the last block and norm.

        Args:
          images: (B, height, width, channels) float, normalised; any size that patches divide.
          kept: (B, K) numbers of the patches that are read; None is all.
          dropout_key: dropout and stochastic depth are on where given.
          return_weights: also return the attention weights.

        Returns:
          x (B, prefix + P, D), the class token, that of distillation and registers first; or
          (x, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: see `embedded`.
        """
        keys: Any = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        with jax.named_scope("encoder"):
            x = dropout(self.embedded(images, kept), self.config.dropout, keys[0])
        return self.through_blocks(x, dropout_key=keys[1], return_weights=return_weights)

    def through_blocks(
        self, x: jax.Array, *, dropout_key: jax.Array | None = None, return_weights: bool = False
    ):
        """Tokens (B, T, D) through the blocks and the last norm; returns what `hidden_states` does."""
        keys: Any = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        factors = self._branch_factors(len(x), keys[1])

        def run_block(block, x, key, factors=None):
            return block(
                x, AttentionContext(), dropout_key=key, return_weights=return_weights, branch_factors=factors
            )

        with jax.named_scope("encoder"):
            x, weights = run_stack(run_block, self.blocks, x, keys[0], self.compute, by_layer=factors)
            if self.norm is not None:
                x = self.norm(x)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def __call__(self, images: jax.Array, **arguments: Any):
        """`hidden_states`."""
        return self.hidden_states(images, **arguments)

    def pooled(self, states: jax.Array) -> jax.Array:
        """What classes are read from: states (B, prefix + P, D) -> (B, `config.features`)."""
        config = self.config
        patches = states[:, config.prefix :]
        if self.pooling is not None:
            weights = jax.nn.softmax(self.pooling(patches).astype(jnp.float32), axis=1)
            return jnp.einsum("bpo,bpd->bd", weights.astype(patches.dtype), patches)
        if config.pooling == "mean":
            return patches.mean(axis=1)
        first = states[:, 0] if self.pooler is None else jnp.tanh(self.pooler(states[:, 0]))
        return (
            jnp.concatenate([first, patches.mean(axis=1)], axis=1) if config.pooling == "class_mean" else first
        )


class ViTClassifier(nnx.Module):
    """A ViT with a dense layer on what it pools.

    A model with a distillation token has a second one on that, and predicts their mean (Touvron et al. 2021).

    Args:
      config: of the encoder; `classes` is read here.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    children = ("encoder",)
    heads: ClassVar[tuple[str, ...]] = ("head", "distillation_head")

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.encoder = ViT(config, rngs=rngs, compute=compute)
        classes = max(1, config.classes)
        self.head = _dense(config, config.features, classes, rngs)
        second = config.distillation and config.distillation_head
        self.distillation_head = _dense(config, config.width, classes, rngs) if second else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in named_leaves(self).values())

    def for_inference(self) -> Self:
        """See `ViT.for_inference`."""
        copy = nnx.merge(*nnx.split(self))
        copy.encoder = copy.encoder.for_inference()
        return copy

    def hidden_states(self, images: jax.Array, **how: Any):
        """See `ViT.hidden_states`."""
        return self.encoder.hidden_states(images, **how)

    def logits(self, states: jax.Array) -> jax.Array:
        """States (B, prefix + P, D) -> (B, C) float32."""
        own = self.head(self.encoder.pooled(states)).astype(jnp.float32)
        if self.distillation_head is None:
            return own
        taught = states[:, int(self.config.has_class_token)]
        return (own + self.distillation_head(taught).astype(jnp.float32)) / 2

    def __call__(
        self, images: jax.Array, *, dropout_key: jax.Array | None = None, return_weights: bool = False
    ):
        """Logits (B, C) float32 of images (B, height, width, channels), or (logits, weights (B, L, H, T, T)).

        Raises:
          ValueError: see `ViT.embedded`.
        """
        found = self.hidden_states(images, dropout_key=dropout_key, return_weights=return_weights)
        states, weights = found if return_weights else (found, None)
        return (self.logits(states), weights) if return_weights else self.logits(states)
