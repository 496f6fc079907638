"""Masked autoencoder (He et al. 2022): a ViT reads a quarter of the patches, a decoder predicts the rest."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.positions.images import sinusoidal_grid
from transformer_jax.models.config_checks import check_minimum
from transformer_jax.models.vision.dino import encoder_config
from transformer_jax.models.vision.vit import INITIAL_STD, ViT, ViTConfig
from transformer_jax.parameter_names import named_leaves


@dataclasses.dataclass(frozen=True)
class MaskedAutoencoderConfig(ViTConfig):
    """`ViTConfig` with the fields of the decoder.

    Attributes:
      decoder_width: Width of the decoder; 512 in the paper.
      decoder_layers: Number of the decoder's layers; 8 in the paper.
      decoder_heads: Number of the decoder's attention heads; 16 in the paper.
    """

    decoder_width: int = 128
    decoder_layers: int = 2
    decoder_heads: int = 4

    preset_fields: ClassVar = {
        name: fields for name, fields in ViTConfig.preset_fields.items() if not fields.get("convolutions")
    }

    def __post_init__(self):
        super().__post_init__()
        if self.convolutions:
            raise ValueError("a masked autoencoder needs patches, since convolutions see every pixel: "
                             "set convolutions=0")  # fmt: skip
        check_minimum(self, 1, "decoder_width", "decoder_layers", "decoder_heads")
        if self.decoder_width % self.decoder_heads or self.decoder_width % 4:
            raise ValueError(
                f"decoder_width {self.decoder_width} must be a multiple of 4 and of decoder_heads "
                f"{self.decoder_heads}"
            )

    @property
    def encoder(self) -> ViTConfig:
        """The config of the ViT only."""
        return encoder_config(self)

    @property
    def decoder(self) -> ViTConfig:
        """The config of the decoder, a ViT without patches."""
        return dataclasses.replace(
            self.encoder, width=self.decoder_width, layers=self.decoder_layers, heads=self.decoder_heads,
            feed_forward=4 * self.decoder_width, pooling="mean", registers=0, distillation=False, pooler=False,
            norm="pre", final_norm=True, positions="sinusoidal",
        )  # fmt: skip


class MaskedAutoencoder(nnx.Module):
    """An encoder that reads the visible patches, and a decoder that predicts the pixels of all patches."""

    children = ("encoder", "decoder")

    def __init__(
        self, config: MaskedAutoencoderConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()
    ):
        self.config, self.compute = config, compute
        self.encoder = ViT(config.encoder, rngs=rngs, compute=compute)
        self.decoder = ViT(config.decoder, rngs=rngs, compute=compute, reads_images=False)

        def dense(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(
                inputs, outputs, kernel_init=nnx.initializers.xavier_uniform(),
                dtype=jnp.dtype(config.dtype), dot_general=dense_dot_general, rngs=rngs,
            )  # fmt: skip

        self.projection = dense(config.width, config.decoder_width)
        self.mask_token = nnx.Param(
            nnx.initializers.truncated_normal(INITIAL_STD)(
                rngs.params(), (1, config.decoder_width), jnp.float32
            )
        )
        self.head = dense(config.decoder_width, config.patch_size**2 * config.channels)

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in named_leaves(self).values())

    def __call__(
        self, images: jax.Array, kept: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Predict the pixels of every patch.

        Args:
          images: (B, height, width, channels) float, normalized.
          kept: (B, K) indices of the patches that the encoder reads.
          dropout_key: Turns dropout and stochastic depth on.

        Returns:
          (B, P, size * size * channels) float32.
        """
        encoder_key, decoder_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        states = self.encoder.hidden_states(images, kept=kept, dropout_key=encoder_key)
        visible = self.projection(states[:, self.config.prefix :])
        rows, columns = self.encoder.patches.grid(*images.shape[1:3])
        B, P = len(images), rows * columns
        masked = jnp.broadcast_to(self.mask_token[...].astype(visible.dtype), (B, P, visible.shape[-1]))
        x = masked.at[jnp.arange(B)[:, None], kept].set(visible)
        x = x + sinusoidal_grid(rows, columns, visible.shape[-1]).astype(visible.dtype)
        return self.head(self.decoder.run_blocks(x, dropout_key=decoder_key)).astype(jnp.float32)
