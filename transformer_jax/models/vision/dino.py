"""DINO (Caron et al. 2021): a ViT with the projection head that a student and its teacher are compared by."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.models.vision.vit import ViT, ViTConfig
from transformer_jax.parameter_names import named_leaves


@dataclasses.dataclass(frozen=True)
class DinoConfig(ViTConfig):
    """`ViTConfig` with the projection head.

    Attributes:
      prototypes: K, outputs that images are sorted into; 65,536 of the paper.
      projection_hidden: width of the head's hidden layers; 2,048 of the paper.
      bottleneck: width of the vectors of length 1 that prototypes are compared with.

    Raises:
      ValueError: a size below 1, or see `ViTConfig`.
    """

    prototypes: int = 65_536
    projection_hidden: int = 2_048
    bottleneck: int = 256

    def __post_init__(self):
        super().__post_init__()
        for field in ("prototypes", "projection_hidden", "bottleneck"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")

    @property
    def encoder(self) -> ViTConfig:
        """The config of the ViT alone."""
        return encoder_config(self)


def encoder_config(config: ViTConfig) -> ViTConfig:
    """The `ViTConfig` in a config that has further fields."""
    return ViTConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ViTConfig)})


class Dino(nnx.Module):
    """A ViT and, on what it pools, three dense layers with GELU, a vector of length 1, and prototypes (Caron et
    al. 2021, section 3.1 and appendix C).

    Prototypes are weight-normalised: their directions alone are trained, their lengths are 1.

    Args:
      config: of the encoder and the head.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    children = ("encoder",)

    def __init__(self, config: DinoConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.encoder = ViT(config.encoder, rngs=rngs, compute=compute)
        sizes = [config.features, config.projection_hidden, config.projection_hidden, config.bottleneck]

        def dense(inputs: int, outputs: int, use_bias: bool = True) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, kernel_init=nnx.initializers.xavier_uniform(), use_bias=use_bias,
                dtype=jnp.dtype(config.dtype), dot_general=dense_dot_general, rngs=rngs,
            )  # fmt: skip

        self.projector = nnx.List(dense(*pair) for pair in itertools.pairwise(sizes))
        self.prototypes = dense(config.bottleneck, config.prototypes, use_bias=False)

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in named_leaves(self).values())

    def for_inference(self) -> Self:
        """See `ViT.for_inference`."""
        copy = nnx.merge(*nnx.split(self))
        copy.encoder = copy.encoder.for_inference()
        return copy

    def hidden_states(self, images: jax.Array, **how):
        """See `ViT.hidden_states`."""
        return self.encoder.hidden_states(images, **how)

    def projected(self, pooled: jax.Array, *, frozen_prototypes: jax.Array | bool = False) -> jax.Array:
        """What the encoder pools (B, D) -> (B, K) float32.

        Args:
          pooled: of the images.
          frozen_prototypes: prototypes get no gradient; may be traced.
        """
        x = pooled
        for number, layer in enumerate(self.projector):
            x = layer(x if number == 0 else jax.nn.gelu(x, approximate=False))
        x = x.astype(jnp.float32)
        x = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        kernel = self.prototypes.kernel[...].astype(jnp.float32)
        kernel = jnp.where(frozen_prototypes, jax.lax.stop_gradient(kernel), kernel)
        return x @ (kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True))

    def __call__(
        self,
        images: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        frozen_prototypes: jax.Array | bool = False,
    ) -> jax.Array:
        """Images (B, height, width, channels) of any size that patches divide -> (B, K) float32."""
        states = self.hidden_states(images, dropout_key=dropout_key)
        return self.projected(self.encoder.pooled(states), frozen_prototypes=frozen_prototypes)
