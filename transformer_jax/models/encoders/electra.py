"""ELECTRA (Clark et al. 2020): an encoder that learns to detect the tokens that a small generator replaced."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.mimetic_initialization import add_identity
from transformer_jax.models.encoders.encoder import EncoderConfig, TextEmbeddings, TextEncoder, dense
from transformer_jax.models.encoders.heads import (
    EncoderWithHead,
    MaskedLM,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)

# Approximate share of replaced tokens at a mask rate of 0.15. A discriminator that initially predicts it need
# not learn first how rare replaced tokens are (Lin et al. 2017, section 3.3, on rare classes).
_REPLACED_SHARE = 0.13


def _size(layers: int, width: int, heads: int, embedding_width: int, generator: float) -> dict[str, Any]:
    return dict(
        vocab_size=30_522,
        width=width,
        layers=layers,
        heads=heads,
        feed_forward=4 * width,
        embedding_width=embedding_width,
        generator_size=generator,
    )


@dataclasses.dataclass(frozen=True)
class ElectraConfig(EncoderConfig):
    """The config of ELECTRA, with the sizes of the discriminator; see `EncoderConfig` for the other fields.

    The published models have V = 30,522.

    Attributes:
      embedding_width: Width E of the embeddings, which both networks share; a dense layer projects them to D.
      generator_size: Width, heads and feed-forward width of the generator as a fraction of the discriminator's.
      token_types: Number of token types; a pair of texts needs two.
      initial_values: Initial values: "normal", or "neighbours", with which heads initially attend to adjacent
        tokens, for short pretraining, see `attend_to_neighbors`, and the discriminator initially predicts the
        expected share of replaced tokens.
    """

    embedding_width: int = dataclasses.field(kw_only=True)
    generator_size: float = 0.25
    token_types: int = 2

    position_offset: ClassVar = 0
    pooler: ClassVar = False

    # Sizes are from table 6 of the paper; mini is BERT's, for two CPU cores.
    preset_fields: ClassVar = {
        "mini": _size(4, 256, 4, 256, 0.25),
        "small": _size(12, 256, 4, 128, 0.25),
        "base": _size(12, 768, 12, 768, 1 / 3),
        "large": _size(24, 1024, 16, 1024, 0.25),
    }

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.generator_size <= 1:
            raise ValueError(f"generator_size={self.generator_size} must be above 0 and at most 1")
        heads = self.heads * self.generator_size
        if abs(heads - round(heads)) > 1e-6 or round(self.width * self.generator_size) % round(heads):
            raise ValueError(
                f"generator_size={self.generator_size} times {self.heads} heads must be an integer that "
                f"divides the generator's width {round(self.width * self.generator_size)}"
            )

    @property
    def projects(self) -> bool:
        """True if a dense layer projects the embeddings to the blocks' width."""
        return self.embedding_width != self.width

    def generator(self) -> "ElectraConfig":
        """Return the config of the generator."""
        names = ("width", "heads", "feed_forward")
        sizes = {name: round(getattr(self, name) * self.generator_size) for name in names}
        return dataclasses.replace(self, **sizes, generator_size=1.0)


class Electra(TextEncoder):
    """ELECTRA: BERT's blocks over embeddings whose width may differ from the blocks' width."""

    classifier_activation = "gelu"


class ElectraGenerator(MaskedLM):
    """The generator: a small masked language model that fills in masked tokens."""

    body = Electra
    head_activation = "gelu"


class ElectraDiscriminator(EncoderWithHead):
    """The network that predicts for each token whether it was replaced."""

    body = Electra
    heads = ("transform", "head")

    def __init__(self, config: ElectraConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.transform = dense(config, config.width, config.width, rngs)
        if config.initial_values == "neighbours":
            add_identity(self.transform.kernel)
        self.head = dense(config, config.width, 1, rngs)
        if config.initial_values == "neighbours":
            self.head.bias = nnx.Param(jnp.full(1, math.log(_REPLACED_SHARE / (1 - _REPLACED_SHARE))))

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute logits (...) float32 from states (..., D), above 0 if a token was probably replaced."""
        hidden = ACTIVATIONS[self.config.activation](self.transform(states))
        return self.head(hidden)[..., 0].astype(jnp.float32)


class ElectraPretraining(nnx.Module):
    """Generator and discriminator, trained together; the discriminator is the model to keep.

    The generator shares the discriminator's embeddings, including their norm, and computes its logits with
    their table (section 3.2, and the authors' code).
    """

    children = ("generator", "discriminator")

    def __init__(self, config: ElectraConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.generator = ElectraGenerator(config.generator(), rngs=rngs, compute=compute, has_embeddings=False)
        self.discriminator = ElectraDiscriminator(config, rngs=rngs, compute=compute)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the discriminator."""
        return self.discriminator.parameter_count

    @property
    def embeddings(self) -> TextEmbeddings:
        """The embeddings that both networks read."""
        embeddings = self.discriminator.encoder.embeddings
        assert embeddings is not None, "the discriminator has embeddings"
        return embeddings

    def generated(self, tokens: jax.Array, positions: jax.Array, **inputs: Any) -> jax.Array:
        """Compute the generator's logits (B, M, V) float32 at positions (B, M) of tokens (B, T)."""
        return self.generator_logits(self.generator_states(tokens, positions, **inputs))

    def generator_states(self, tokens: jax.Array, positions: jax.Array, **inputs: Any) -> jax.Array:
        """Compute the generator's states (B, M, D) at positions (B, M) of tokens (B, T)."""
        states = self.generator.encoder.hidden_states(tokens, embeddings=self.embeddings, **inputs)
        return jnp.take_along_axis(states, positions[..., None], axis=1)

    def generator_logits(self, states: jax.Array) -> jax.Array:
        """Compute the generator's logits (B, M, V) float32 from its states (B, M, D)."""
        return self.generator.logits(states, self.embeddings.tokens)

    def replaced(self, tokens: jax.Array, **inputs: Any) -> jax.Array:
        """Compute the discriminator's logits (B, T) float32."""
        return self.discriminator(tokens, **inputs)

    def __call__(self, tokens: jax.Array, **inputs: Any) -> jax.Array:
        """Compute `replaced`."""
        return self.replaced(tokens, **inputs)


class ElectraClassifier(SequenceClassifier):
    """ELECTRA's discriminator that classifies or scores texts and pairs of texts."""

    body = Electra


class ElectraTagger(TokenClassifier):
    """ELECTRA's discriminator that classifies each token."""

    body = Electra


class ElectraReader(SpanPredictor):
    """ELECTRA's discriminator that finds the span of an answer in a text."""

    body = Electra
