"""DINO (Caron et al. 2021): a ViT with the projection head that compares a student with its teacher."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.models.config_checks import check_minimum
from transformer_jax.models.encoder_model import EncoderModel
from transformer_jax.models.vision.vit import ViT, ViTConfig


@dataclasses.dataclass(frozen=True)
class DinoConfig(ViTConfig):
    """`ViTConfig` with the fields of the projection head.

    Attributes:
      prototypes: Number of prototypes K, the outputs to which images are assigned; 65,536 in the paper.
      projection_hidden: Width of the head's hidden layers; 2,048 in the paper.
      bottleneck: Width of the unit vectors that are compared with the prototypes.
    """

    prototypes: int = 65_536
    projection_hidden: int = 2_048
    bottleneck: int = 256

    def __post_init__(self):
        super().__post_init__()
        check_minimum(self, 1, "prototypes", "projection_hidden", "bottleneck")

    @property
    def encoder(self) -> ViTConfig:
        """The config of the ViT only."""
        return encoder_config(self)


def encoder_config(config: ViTConfig) -> ViTConfig:
    """Return the `ViTConfig` in a config with further fields."""
    return ViTConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ViTConfig)})


class Dino(EncoderModel):
    """A ViT with a projection head: three dense layers with GELU, normalization to length 1, and prototypes.

    Prototypes are weight-normalized: only their directions are trained, and their lengths are 1 (Caron et al.
    2021, section 3.1 and appendix C).
    """

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

    def project(self, pooled: jax.Array, *, frozen_prototypes: jax.Array | bool = False) -> jax.Array:
        """Compute the similarities (B, K) float32 of images with the prototypes.

        Args:
          pooled: The encoder's pooled vectors (B, D).
          frozen_prototypes: Stop the gradient of the prototypes; may be a traced value.
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
        """Compute the similarities (B, K) float32 of images with the prototypes.

        Args:
          images: (B, height, width, channels) float, normalized; any size that the patch size divides.
          dropout_key: Turns dropout and stochastic depth on.
          frozen_prototypes: Stop the gradient of the prototypes; may be a traced value.
        """
        states = self.hidden_states(images, dropout_key=dropout_key)
        return self.project(self.encoder.pooled(states), frozen_prototypes=frozen_prototypes)
