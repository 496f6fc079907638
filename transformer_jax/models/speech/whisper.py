"""Whisper (Radford et al. 2022): speech recognition by an encoder of spectrograms and a causal decoder."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.layers.attention.self_attention import AttentionContext, SelfAttention, unstack_encoder
from transformer_jax.layers.blocks import EncoderBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.positions.absolute import learned_positions
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.models.config_checks import check_choices, check_minimum, check_rates
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.presets import Presets

# Scale of the initial positions. The outputs of the convolutions are small at first, and sinusoids of full size
# would dominate them.
_POSITION_SCALE = 0.1


def _size(
    layers: int, width: int, heads: int, *, decoder_layers: int | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the fields of a published size."""
    return dict(
        vocab_size=51_865, width=width, encoder_layers=layers, decoder_layers=decoder_layers or layers,
        heads=heads, feed_forward=4 * width, **fields,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WhisperConfig(Presets):
    """The config of Whisper. Sizes have no defaults: use a preset, or set them.

    Attributes:
      vocab_size: Vocabulary size V.
      width: Model width D of encoder and decoder.
      encoder_layers: Number of encoder layers L.
      decoder_layers: Number of decoder layers L.
      heads: Number of attention heads H.
      feed_forward: Width F of the feed-forward layers.
      mel_bins: Number of mel bands of a spectrogram.
      max_frames: Maximum number of frames of a spectrogram, 100 a second.
      kernel: Number of frames that a convolution reads, odd; published models have 3.
      strides: Strides of the two convolutions; a state of the encoder covers as many frames as their product.
      max_length: Maximum length of a transcript in tokens, with its start and end tokens.
      dropout: Dropout rate of the embeddings and of the output of each sub-layer.
      ctc: Add a head that predicts the transcript from the encoder alone (Graves et al. 2006).
      norm_epsilon: Epsilon of the layer normalizations.
      dtype: Compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: The embedding table is padded internally to a multiple of this size.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    vocab_size: int
    width: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    feed_forward: int
    mel_bins: int = 80
    max_frames: int = 3_000
    kernel: int = 3
    strides: tuple[int, int] = (1, 2)
    max_length: int = 448
    dropout: float = 0.0
    ctc: bool = False
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128

    # mini is for short recordings and two CPU cores. The others are from table 1 of the paper and from the
    # model cards of large-v3 and large-v3-turbo.
    preset_fields: ClassVar = {
        "mini": dict(
            vocab_size=300, width=96, encoder_layers=2, decoder_layers=2, heads=4, feed_forward=384,
            mel_bins=40, max_frames=400, kernel=15, strides=(2, 2), max_length=32, ctc=True,
        ),
        "tiny": _size(4, 384, 6),
        "base": _size(6, 512, 8),
        "small": _size(12, 768, 12),
        "medium": _size(24, 1024, 16),
        "large": _size(32, 1280, 20),
        "large-v3": _size(32, 1280, 20, mel_bins=128) | dict(vocab_size=51_866),
        "large-v3-turbo": _size(32, 1280, 20, decoder_layers=4, mel_bins=128) | dict(vocab_size=51_866),
    }  # fmt: skip

    def __post_init__(self):
        check_choices(self)
        check_minimum(self, 1, "width", "encoder_layers", "decoder_layers", "heads", "feed_forward", "mel_bins")
        check_minimum(self, 2, "max_length")
        check_rates(self, "dropout")
        if len(self.strides) != 2 or min(self.strides) < 1:
            raise ValueError(f"strides={self.strides} must be two numbers of at least 1")
        check_minimum(self, self.frames_per_state, "max_frames")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} must be an odd number of at least 1")
        if self.width % 2:
            raise ValueError(f"width={self.width} must be even, for sinusoidal positions")
        self.decoder  # noqa: B018 (checks the fields of the decoder)

    @property
    def frames_per_state(self) -> int:
        """Number of frames that a state of the encoder covers."""
        return self.strides[0] * self.strides[1]

    @property
    def max_states(self) -> int:
        """Maximum number of the encoder's states of a recording."""
        return self.max_frames // self.frames_per_state

    @property
    def decoder(self) -> GPTConfig:
        """The config of the decoder only."""
        return GPTConfig(
            vocab_size=self.vocab_size, width=self.width, layers=self.decoder_layers, heads=self.heads,
            kv_heads=self.heads, feed_forward=self.feed_forward, max_length=self.max_length,
            dropout=self.dropout, activation="gelu", norm_epsilon=self.norm_epsilon, dtype=self.dtype,
            vocab_multiple=self.vocab_multiple,
        )  # fmt: skip


def _initial_positions(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Return sinusoids as in Whisper, all sines before all cosines, scaled by 0.1."""
    states, width = shape
    steps = max(width // 2 - 1, 1)
    angles = np.arange(states)[:, None] * np.exp(-np.log(10_000.0) / steps * np.arange(width // 2))
    return _POSITION_SCALE * jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), dtype)


class SpeechEncoder(nnx.Module):
    """Two convolutions over the frames of a spectrogram, positions, and a stack of bidirectional blocks.

    Initial values: matrices and kernels are normal with variance 1 / inputs (LeCun et al. 1998); positions are
    small sinusoids; biases are 0 and normalization scales 1.

    Args:
      config: Sizes and variants.
      rngs: Source of the initial values.
      compute: Options for computing the model.
    """

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        dense: dict[str, Any] = dict(kernel_init=nnx.initializers.lecun_normal(), dtype=config.dtype)

        def convolution(inputs: int, stride: int) -> nnx.Conv:
            return nnx.Conv(
                inputs,
                config.width,
                config.kernel,
                strides=stride,
                padding=config.kernel // 2,
                dtype=jnp.dtype(config.dtype),
                rngs=rngs,
            )

        def block(key: jax.Array) -> EncoderBlock:
            rngs = nnx.Rngs(key)
            return EncoderBlock(
                self_attention=SelfAttention(
                    config.width, config.heads, config.heads, use_bias=True, key_bias=False,
                    implementation=compute.attention, rngs=rngs, **dense,
                ),
                self_attention_norm=layer_norm(config, rngs),
                feed_forward=FeedForward(
                    config.width, config.feed_forward, activation="gelu", use_bias=True, rngs=rngs, **dense
                ),
                feed_forward_norm=layer_norm(config, rngs),
                norm="pre",
                dropout=config.dropout,
            )  # fmt: skip

        first, second = config.strides
        self.convolutions = nnx.data([convolution(config.mel_bins, first), convolution(config.width, second)])
        self.positions = nnx.Embed(
            config.max_states, config.width, embedding_init=_initial_positions, rngs=rngs
        )
        self.blocks = make_stack(block, rngs.params(), config.encoder_layers)
        self.norm = layer_norm(config, rngs)

    def for_inference(self) -> Self:
        """Return a copy for a program that is called many times; see `unstack_encoder`."""
        return unstack_encoder(self)

    def hidden_states(
        self, spectrograms: jax.Array, *, dropout_key: jax.Array | None = None, return_weights: bool = False
    ):
        """Compute the states after the last block and norm.

        Args:
          spectrograms: (B, frames, bins), see `log_mel`.
          dropout_key: Turns dropout on.
          return_weights: Also return the attention weights.

        Returns:
          x (B, S, D), or (x, weights (B, L, H, S, S) float32).

        Raises:
          ValueError: The number of bins differs, or there are more frames than `max_frames`, or too few for a
            state.
        """
        config = self.config
        if spectrograms.ndim != 3 or spectrograms.shape[-1] != config.mel_bins:
            raise ValueError(f"spectrograms must be (B, frames, {config.mel_bins}), got {spectrograms.shape}")
        frames = spectrograms.shape[1]
        if not config.frames_per_state <= frames <= config.max_frames:
            raise ValueError(
                f"a spectrogram has {frames} frames; the model takes {config.frames_per_state} to "
                f"{config.max_frames}"
            )
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        # Frames at the end that do not fill a state are left out.
        x = spectrograms[:, : frames // config.frames_per_state * config.frames_per_state]
        with jax.named_scope("encoder"):
            for convolution in self.convolutions:
                x = jax.nn.gelu(convolution(x.astype(config.dtype)), approximate=False)
            x = x + learned_positions(jnp.arange(x.shape[1]), self.positions.embedding[...]).astype(x.dtype)
            x = dropout(x, config.dropout, embed_key)

            def run_block(block, x, key):
                return block(x, AttentionContext(), dropout_key=key, return_weights=return_weights)

            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
            x = self.norm(x)
        return (x, weights.swapaxes(0, 1)) if return_weights else x


class Whisper(EncoderDecoder):
    """Whisper: a `SpeechEncoder`, and a GPT-2 whose blocks also attend to the encoder's states.

    With `config.ctc` a dense layer on the encoder's states predicts the transcript as well, see `ctc_logits`.
    """

    children: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    output = "a transcript"

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.encoder = SpeechEncoder(config, rngs=rngs, compute=compute)
        self.decoder = GPT(config.decoder, rngs=rngs, compute=compute, has_cross_attention=True, key_bias=False)
        self.ctc_head = (
            nnx.Linear(
                config.width, config.vocab_size + 1, kernel_init=nnx.initializers.lecun_normal(),
                dtype=jnp.dtype(config.dtype), dot_general=dense_dot_general, rngs=rngs,
            )
            if config.ctc
            else None
        )  # fmt: skip

    def encode(self, inputs: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        """Compute the states (B, S, D) of spectrograms (B, frames, bins); see `SpeechEncoder.hidden_states`."""
        return self.encoder.hidden_states(inputs, dropout_key=dropout_key)

    def ctc_logits(self, states: jax.Array) -> jax.Array:
        """Compute the logits (B, S, V + 1) float32 of the token at each state; the last is the blank.

        Args:
          states: (B, S, D), the result of `encode`.

        Raises:
          ValueError: The model has no such head.
        """
        if self.ctc_head is None:
            raise ValueError("the model has no CTC head: set `ctc` in its config")
        return self.ctc_head(states).astype(jnp.float32)
