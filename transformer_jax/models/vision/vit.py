"""Vision Transformer (Dosovitskiy et al. 2021): an encoder that reads patches of an image instead of words."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.pooling import AttentionPooling
from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention, unstack_encoder
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward, GatedFeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.patches import ConvolutionalTokens, PatchTokens
from transformer_jax.layers.positions.images import resize_grid, sinusoidal_grid
from transformer_jax.layers.positions.schemes import LearnedPositions
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.models.config_checks import check_choices, check_heads, check_minimum, check_rates
from transformer_jax.models.encoder_model import EncoderModel
from transformer_jax.models.presets import Presets
from transformer_jax.parameter_names import named_leaves

# Standard deviation of the initial values of tokens, positions and heads (Touvron et al. 2021, DeiT).
INITIAL_STD = 0.02


def _sizes(layers: int, width: int, heads: int, patch: int, image: int = 224) -> dict[str, Any]:
    """Return the size fields of a ViT, whose feed-forward layers are four times as wide as its stream."""
    return dict(
        layers=layers, width=width, heads=heads, feed_forward=4 * width, patch_size=patch, image_size=image
    )


def _compact(layers: int, width: int, heads: int, factor: int, convolutions: int) -> dict[str, Any]:
    """Return the fields of a compact convolutional transformer (Hassani et al. 2021, table 1 and code)."""
    return dict(
        layers=layers, width=width, heads=heads, feed_forward=factor * width, patch_size=1, image_size=32,
        convolutions=convolutions, pooling="weighted", norm_epsilon=1e-5, stochastic_depth=0.1,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ViTConfig(Presets):
    """The config of a Vision Transformer. Sizes have no defaults: use a preset, or set them.

    Attributes:
      image_size: Height and width in pixels for which positions are learned; they are interpolated for images
        of other sizes.
      patch_size: Height and width of a patch; ignored if `convolutions` is above 0.
      width: Model width D.
      layers: Number of layers L.
      heads: Number of attention heads H.
      feed_forward: Width F of the feed-forward layers.
      channels: Number of channels of an image.
      patch_bias: Add a bias to the projection of patches.
      convolutions: Number of layers of a convolutional tokenizer, used instead of patches; 0 means patches.
      pooling: Input of the classifier: "class" token, "mean" of the patches, "class_mean" for both
        concatenated, "weighted" mean with trained weights (Hassani et al. 2021, equation 5), or "attention" of
        a trained query with a feed-forward layer (Zhai et al. 2022, "Scaling Vision Transformers").
      positions: "learned", or fixed "sinusoidal" positions of row and column.
      antialias: Smooth positions that are interpolated to a smaller grid.
      registers: Number of tokens that belong to no patch (Darcet et al. 2024).
      distillation: Add a second class token, trained on another network's predictions (Touvron et al. 2021).
      distillation_head: Let a classifier read that token too, and predict the mean of both heads.
      norm: "pre", or "post" as in older models.
      input_norm: Apply a norm before the first block, as in CLIP.
      final_norm: Apply a norm after the last block.
      layer_scale: Initial value of a trained factor on the output of each sub-layer; 0 means no factor.
      gated: Use SwiGLU feed-forward layers.
      stochastic_depth: Probability that training skips a sub-layer of the last block; it rises linearly from 0
        in the first block.
      dropout: Dropout rate of the embeddings and of the output of each sub-layer.
      attention_dropout: Dropout rate of the attention weights.
      activation: Activation of the feed-forward layers; any name in `ACTIVATIONS`.
      norm_epsilon: Epsilon of the layer normalizations.
      pooler: Apply a dense layer with tanh to the class token, as pretrained models do.
      classes: Number of classes of a classifier's head; 0 means the number in the data.
      dtype: Compute dtype; parameters, softmax and logits are float32.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    channels: int = 3
    patch_bias: bool = True
    convolutions: int = 0
    pooling: Literal["class", "mean", "class_mean", "weighted", "attention"] = "class"
    positions: Literal["learned", "sinusoidal"] = "learned"
    antialias: bool = False
    registers: int = 0
    distillation: bool = False
    distillation_head: bool = False
    norm: Literal["pre", "post"] = "pre"
    input_norm: bool = False
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

    # Ti is from DeiT (Touvron et al. 2021, table 1), the others are from table 1 of the paper; the number is
    # the patch size.
    preset_fields: ClassVar = {
        "mini": _sizes(4, 64, 4, 2, 8),
        "mini_cct": _sizes(4, 64, 4, 2, 8) | dict(convolutions=1, pooling="weighted"),
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
            self, activation=tuple(ACTIVATIONS), positions=("learned", "sinusoidal"), norm=("pre", "post"),
            pooling=("class", "mean", "class_mean", "weighted", "attention"),
        )  # fmt: skip
        check_minimum(self, 0, "convolutions", "registers", "classes", "layer_scale")
        if not self.convolutions and self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}")
        check_heads(self)
        if self.positions == "sinusoidal" and self.width % 4:
            raise ValueError(f"width {self.width} must be a multiple of 4 for sinusoidal positions of two axes")
        check_rates(self, "dropout", "attention_dropout", "stochastic_depth")

    @property
    def has_class_token(self) -> bool:
        """True if a class token precedes the patches."""
        return self.pooling in ("class", "class_mean")

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return self.has_class_token + self.distillation + self.registers

    @property
    def features(self) -> int:
        """Width of the pooled vector."""
        return self.width * (2 if self.pooling == "class_mean" else 1)


def _dense(config: ViTConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, kernel_init=nnx.initializers.truncated_normal(INITIAL_STD),
        dtype=jnp.dtype(config.dtype), dot_general=dense_dot_general, rngs=rngs,
    )  # fmt: skip


def _pooling(
    config: ViTConfig, compute: ComputeOptions, rngs: nnx.Rngs, options: dict[str, Any]
) -> nnx.Linear | AttentionPooling | None:
    """Return the layers of a pooling that is trained, or None."""
    if config.pooling == "weighted":
        return _dense(config, config.width, 1, rngs)
    if config.pooling != "attention":
        return None
    return AttentionPooling(
        config.width, config.heads, config.feed_forward, norm=layer_norm(config, rngs),
        activation=config.activation, implementation=compute.attention, rngs=rngs, **options,
    )  # fmt: skip


class ViT(nnx.Module):
    """Patches with positions and a class token, and a stack of bidirectional blocks.

    Initial values: matrices of blocks and patches are uniform (Glorot & Bengio 2010), as in the authors' code;
    tokens and positions are normal with standard deviation 0.02, truncated at two standard deviations; biases
    are 0 and normalization scales 1.

    Args:
      config: Sizes and variants.
      rngs: Source of the initial values.
      compute: Options for computing the model.
      reads_images: False for a stack of blocks without patches, see `run_blocks`.
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
                    config.patch_size, config.channels, config.width, use_bias=config.patch_bias, rngs=rngs,
                    **options,
                )  # fmt: skip
            self.grid = self.patches.grid(config.image_size, config.image_size)
            self.class_token = token(1) if config.has_class_token else None
            self.distillation_token = token(1) if config.distillation else None
            self.registers = token(config.registers) if config.registers else None
            # The class tokens have positions; registers have none.
            self._tokens_with_position = config.has_class_token + config.distillation
            rows = self._tokens_with_position + self.grid[0] * self.grid[1]
            learned = config.positions == "learned"
            self.positions = (
                LearnedPositions(rows, config.width, std=INITIAL_STD, rngs=rngs) if learned else None
            )
        self.blocks = make_stack(block, rngs.params(), config.layers)
        self.input_norm = layer_norm(config, rngs) if config.input_norm and reads_images else None
        self.norm = layer_norm(config, rngs) if config.final_norm else None
        self.pooling = _pooling(config, compute, rngs, options)
        self.pooler = _dense(config, config.width, config.width, rngs) if config.pooler else None

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in named_leaves(self).values())

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `unstack_encoder`."""
        return unstack_encoder(self)

    def position_vectors(self, grid: tuple[int, int]) -> jax.Array:
        """Compute the vectors to add to the class tokens and to the patches of a grid, (tokens, D) float32."""
        count = self._tokens_with_position
        if self.positions is None:
            patch_vectors = sinusoidal_grid(*grid, self.config.width)
            return jnp.concatenate([jnp.zeros((count, self.config.width)), patch_vectors])
        table = self.positions.table.embedding[...]
        patch_vectors = resize_grid(table[count:], self.grid, grid, antialias=self.config.antialias)
        return jnp.concatenate([table[:count], patch_vectors.astype(table.dtype)])

    def embed_images(self, images: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        """Compute the input of the first block: the tokens of images with their positions.

        Args:
          images: (B, height, width, channels) float, normalized.
          kept: (B, K) indices of the patches to read, for a masked autoencoder; None means all.

        Returns:
          (B, prefix + P, D).

        Raises:
          ValueError: The patch size does not divide the image, or the number of channels differs.
        """
        config = self.config
        if images.ndim != 4 or images.shape[-1] != config.channels:
            raise ValueError(f"images must be (B, height, width, {config.channels}), got {images.shape}")
        x = self.patches(images.astype(config.dtype))
        vectors = self.position_vectors(self.patches.grid(*images.shape[1:3])).astype(x.dtype)
        count = self._tokens_with_position
        x = x + vectors[count:]
        if kept is not None:
            x = jnp.take_along_axis(x, kept[..., None], axis=1)
        tokens = [t[...].astype(x.dtype) for t in (self.class_token, self.distillation_token) if t is not None]
        parts = [jnp.concatenate(tokens) + vectors[:count]] if tokens else []
        if self.registers is not None:
            parts.append(self.registers[...].astype(x.dtype))
        if not parts:
            return x
        prefix = jnp.concatenate(parts)
        return jnp.concatenate([jnp.broadcast_to(prefix, (len(x), *prefix.shape)), x], axis=1)

    def _branch_factors(self, rows: int, key: jax.Array | None) -> jax.Array | None:
        """Draw the factors (L, 2, B) of stochastic depth: 0 skips a sub-layer, else 1 / probability."""
        rate, layers = self.config.stochastic_depth, self.config.layers
        if key is None or not rate:
            return None
        probability = 1.0 - jnp.linspace(0.0, rate, layers)[:, None, None]
        return jax.random.bernoulli(key, jnp.broadcast_to(probability, (layers, 2, rows))) / probability

    def hidden_states(
        self,
        images: jax.Array,
        *,
        kept: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Compute the hidden states after the last block and norm.

        Args:
          images: (B, height, width, channels) float, normalized; any size that the patch size divides.
          kept: (B, K) indices of the patches to read; None means all.
          dropout_key: Turns dropout and stochastic depth on.
          return_weights: Also return the attention weights.

        Returns:
          x (B, prefix + P, D), starting with the class token, the distillation token and the registers; or
          (x, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: The images do not fit, see `embed_images`.
        """
        embed_key, blocks_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        with jax.named_scope("encoder"):
            x = self.embed_images(images, kept)
            if self.input_norm is not None:
                x = self.input_norm(x)
            x = dropout(x, self.config.dropout, embed_key)
        return self.run_blocks(x, dropout_key=blocks_key, return_weights=return_weights)

    def run_blocks(self, x: jax.Array, *, dropout_key: jax.Array | None = None, return_weights: bool = False):
        """Apply the blocks and the last norm to tokens (B, T, D); return what `hidden_states` returns."""
        stack_key, depth_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        factors = self._branch_factors(len(x), depth_key)

        def run_block(block, x, key, factors=None):
            return block(
                x, AttentionContext(), dropout_key=key, return_weights=return_weights, branch_factors=factors
            )

        with jax.named_scope("encoder"):
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute, by_layer=factors)
            if self.norm is not None:
                x = self.norm(x)
        return (x, weights.swapaxes(0, 1)) if return_weights else x

    def __call__(self, images: jax.Array, **arguments: Any):
        """Compute `hidden_states`."""
        return self.hidden_states(images, **arguments)

    def pooled(self, states: jax.Array) -> jax.Array:
        """Pool states (B, prefix + P, D) to the classifier's input (B, `config.features`)."""
        config = self.config
        patches = states[:, config.prefix :]
        if isinstance(self.pooling, AttentionPooling):
            return self.pooling(states)
        if self.pooling is not None:
            weights = jax.nn.softmax(self.pooling(patches).astype(jnp.float32), axis=1)
            return jnp.einsum("bpo,bpd->bd", weights.astype(patches.dtype), patches)
        if config.pooling == "mean":
            return patches.mean(axis=1)
        first = states[:, 0] if self.pooler is None else jnp.tanh(self.pooler(states[:, 0]))
        return (
            jnp.concatenate([first, patches.mean(axis=1)], axis=1) if config.pooling == "class_mean" else first
        )


class ViTClassifier(EncoderModel):
    """A ViT with a dense layer on the pooled vector.

    If the config has a distillation head, a second dense layer reads the distillation token, and the model
    predicts the mean of both (Touvron et al. 2021).
    """

    heads: ClassVar[tuple[str, ...]] = ("head", "distillation_head")

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.encoder = ViT(config, rngs=rngs, compute=compute)
        classes = max(1, config.classes)
        self.head = _dense(config, config.features, classes, rngs)
        second = config.distillation and config.distillation_head
        self.distillation_head = _dense(config, config.width, classes, rngs) if second else None

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute the logits (B, C) float32 from states (B, prefix + P, D)."""
        logits = self.head(self.encoder.pooled(states)).astype(jnp.float32)
        if self.distillation_head is None:
            return logits
        distillation_state = states[:, int(self.config.has_class_token)]
        return (logits + self.distillation_head(distillation_state).astype(jnp.float32)) / 2

    def __call__(
        self, images: jax.Array, *, dropout_key: jax.Array | None = None, return_weights: bool = False
    ):
        """Compute the logits (B, C) float32 of images.

        Args:
          images: (B, height, width, channels) float, normalized; any size that the patch size divides.
          dropout_key: Turns dropout and stochastic depth on.
          return_weights: Also return the attention weights.

        Returns:
          logits, or (logits, weights (B, L, H, T, T) float32).

        Raises:
          ValueError: The images do not fit, see `ViT.embed_images`.
        """
        output = self.hidden_states(images, dropout_key=dropout_key, return_weights=return_weights)
        states, weights = output if return_weights else (output, None)
        return (self.logits(states), weights) if return_weights else self.logits(states)
