"""Captioner: a causal decoder that attends to the patches of an image encoder (Xu et al. 2015)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.models.config_checks import check_minimum, check_rates
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.vision.dino import encoder_config
from transformer_jax.models.vision.vit import ViT, ViTConfig


@dataclasses.dataclass(frozen=True)
class CaptionerConfig(ViTConfig):
    """`ViTConfig` of the image encoder, with the fields of the decoder.

    Attributes:
      vocab_size: Vocabulary size V of the captions.
      max_length: Maximum length of a caption in tokens, with its begin and end token.
      decoder_width: Width of the decoder.
      decoder_layers: Number of its layers.
      decoder_heads: Number of its attention heads.
      decoder_feed_forward: Width of its feed-forward layers.
      decoder_dropout: Dropout rate of its embeddings and of the output of each sub-layer.
      decoder_activation: Activation of its feed-forward layers.
      decoder_epsilon: Epsilon of its norms.
      tie: Compute logits with the embedding table.
      vocab_multiple: The embedding table is padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    vocab_size: int = 50_257
    max_length: int = 1_024
    decoder_width: int = 768
    decoder_layers: int = 12
    decoder_heads: int = 12
    decoder_feed_forward: int = 3_072
    decoder_dropout: float = 0.0
    decoder_activation: str = "gelu_tanh"
    decoder_epsilon: float = 1e-5
    tie: bool = True
    vocab_multiple: int = 128

    # mini is for scenes of 32 pixels, small for photographs of 64 pixels, both for two CPU cores; b16 is a
    # ViT-B/16 with a GPT-2 of 124 million parameters.
    preset_fields: ClassVar = {
        "mini": dict(
            width=96, layers=3, heads=4, feed_forward=384, patch_size=4, image_size=32, vocab_size=300,
            max_length=32, decoder_width=96, decoder_layers=2, decoder_heads=4, decoder_feed_forward=384,
        ),
        "small": dict(
            width=192, layers=6, heads=6, feed_forward=768, patch_size=8, image_size=64, vocab_size=2_048,
            max_length=32, decoder_width=192, decoder_layers=3, decoder_heads=6, decoder_feed_forward=768,
            decoder_dropout=0.1,
        ),
        "b16": dict(
            ViTConfig.preset_fields["b16"], vocab_size=50_257, max_length=1_024
        ),
    }  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_minimum(self, 1, "decoder_layers", "decoder_feed_forward")
        check_minimum(self, 2, "max_length")
        check_rates(self, "decoder_dropout")
        self.decoder  # noqa: B018 (checks the fields of the decoder)

    @property
    def has_projection(self) -> bool:
        """True if the encoder's states are projected to the decoder's width."""
        return self.width != self.decoder_width

    @property
    def encoder(self) -> ViTConfig:
        """The config of the image encoder only."""
        return encoder_config(self)

    @property
    def decoder(self) -> GPTConfig:
        """The config of the decoder only."""
        return GPTConfig(
            vocab_size=self.vocab_size, width=self.decoder_width, layers=self.decoder_layers,
            heads=self.decoder_heads, kv_heads=self.decoder_heads, feed_forward=self.decoder_feed_forward,
            max_length=self.max_length, dropout=self.decoder_dropout, activation=self.decoder_activation,
            norm_epsilon=self.decoder_epsilon, tie=self.tie, dtype=self.dtype,
            vocab_multiple=self.vocab_multiple,
        )  # fmt: skip


class Captioner(EncoderDecoder):
    """A ViT, and a GPT-2 whose blocks also attend to the ViT's states, projected if the widths differ."""

    children: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    output = "a caption"

    def __init__(self, config: CaptionerConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.encoder = ViT(config.encoder, rngs=rngs, compute=compute)
        self.projection = (
            nnx.Linear(
                config.width, config.decoder_width, kernel_init=nnx.initializers.normal(0.02),
                dtype=jnp.dtype(config.dtype), dot_general=dense_dot_general, rngs=rngs,
            )
            if config.has_projection
            else None
        )  # fmt: skip
        self.decoder = GPT(config.decoder, rngs=rngs, compute=compute, has_cross_attention=True)

    def encode(self, inputs: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Compute the states (B, S, D) of images (B, height, width, channels) in the decoder's width.

        The images are float and normalized. S counts the class token and registers before the patches.

        Raises:
          ValueError: The images do not fit, see `ViT.embed_images`.
        """
        states = self.encoder.hidden_states(inputs, dropout_key=dropout_key)
        return states if self.projection is None else self.projection(states)
