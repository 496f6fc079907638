"""ELECTRA (Clark et al. 2020): an encoder that learns which tokens a small generator has replaced."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.mimetic_initialization import add_identity
from transformer_jax.models.config_checks import check_encoder_choices, check_encoder_sizes
from transformer_jax.models.encoders.encoder import TextEmbeddings, TextEncoder, dense
from transformer_jax.models.encoders.heads import (
    EncoderWithHead,
    MaskedLM,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from transformer_jax.models.presets import Presets

# About the share of tokens that are replaced at a mask rate of 0.15. A discriminator that begins with it need
# not learn first how rare they are (Lin et al. 2017, section 3.3, on rare classes).
_REPLACED = 0.13


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
class ElectraConfig(Presets):
    """What the model computes. Sizes default to nothing: take a preset, or name them.

    Attributes:
      vocab_size: V; 30,522 of the published models.
      width: D of the discriminator.
      layers: L.
      heads: H of the discriminator.
      feed_forward: F of the discriminator.
      embedding_width: E of the embeddings, which both networks share; a dense layer takes them to D.
      generator_size: width, heads and feed-forward width of the generator as a fraction of the discriminator's.
      max_length: longest text in tokens.
      token_types: number of token types; a pair of texts needs two.
      dropout: on the embeddings and on what each sub-layer adds.
      attention_dropout: on the attention weights.
      classifier_dropout: in front of a head with classes; None is `dropout`.
      classifier_pooling: which state the classes of a text are read from: of its first token, as published, or
        the mean or the maximum of all its states.
      activation: of the feed-forward layers; any name of `ACTIVATIONS`.
      norm_epsilon: of the layer normalisations.
      classes: of a classifier's head; 0 takes what the data has.
      dtype: compute dtype; parameters, softmax and logits are float32.
      vocab_multiple: the embedding table is padded inside to a multiple of this.
      initial_values: normal, or neighbours, with which heads first attend to the tokens beside: for pretraining
        of few steps, see `attend_to_neighbours`; the discriminator begins with the share of replaced tokens.

    Raises:
      ValueError: a value outside its choices, or sizes that do not divide.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    embedding_width: int
    generator_size: float = 0.25
    max_length: int = 512
    token_types: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    classifier_dropout: float | None = None
    classifier_pooling: Literal["first", "mean", "max"] = "first"
    activation: str = "gelu"
    norm_epsilon: float = 1e-12
    classes: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_multiple: int = 128
    initial_values: Literal["normal", "neighbours"] = "normal"

    position_offset: ClassVar = 0
    pooler: ClassVar = False

    # Table 6 of the paper; mini is BERT's, for two CPU cores.
    preset_fields: ClassVar = {
        "mini": _size(4, 256, 4, 256, 0.25),
        "small": _size(12, 256, 4, 128, 0.25),
        "base": _size(12, 768, 12, 768, 1 / 3),
        "large": _size(24, 1024, 16, 1024, 0.25),
    }

    def __post_init__(self):
        check_encoder_choices(self)
        check_encoder_sizes(self)
        if not 0 < self.generator_size <= 1:
            raise ValueError(f"generator_size={self.generator_size} must be above 0 and at most 1")
        heads = self.heads * self.generator_size
        if abs(heads - round(heads)) > 1e-6 or round(self.width * self.generator_size) % round(heads):
            raise ValueError(
                f"generator_size={self.generator_size} of {self.heads} heads and width {self.width} is no "
                "whole number of heads"
            )

    @property
    def projects(self) -> bool:
        """Whether a dense layer takes the embeddings to the blocks' width."""
        return self.embedding_width != self.width

    def generator(self) -> "ElectraConfig":
        """The config of the generator."""
        share = self.generator_size
        sizes = {name: round(getattr(self, name) * share) for name in ("width", "heads", "feed_forward")}
        return dataclasses.replace(self, **sizes, generator_size=1.0)


class Electra(TextEncoder):
    """ELECTRA: BERT's blocks over embeddings of a width of their own."""

    classifier_activation = "gelu"


class ElectraGenerator(MaskedLM):
    """The network that fills masked words in."""

    body = Electra
    head_activation = "gelu"


class ElectraDiscriminator(EncoderWithHead):
    """The network that says of each token whether it was replaced."""

    body = Electra
    heads = ("transform", "head")

    def __init__(self, config: ElectraConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        self.transform = dense(config, config.width, config.width, rngs)
        if config.initial_values == "neighbours":
            add_identity(self.transform.kernel)
        self.head = dense(config, config.width, 1, rngs)
        if config.initial_values == "neighbours":
            self.head.bias = nnx.Param(jnp.full(1, math.log(_REPLACED / (1 - _REPLACED))))

    def logits(self, states: jax.Array) -> jax.Array:
        """States (..., D) -> (...) float32, above 0 where a token was rather replaced."""
        hidden = ACTIVATIONS[self.config.activation](self.transform(states))
        return self.head(hidden)[..., 0].astype(jnp.float32)


class ElectraPretraining(nnx.Module):
    """Generator and discriminator, trained together; the discriminator is what is kept.

    The generator has no embeddings of its own: it reads the discriminator's, norm included, and its logits are
    made with their table (section 3.2, and the authors' code).
    """

    children = ("generator", "discriminator")

    def __init__(self, config: ElectraConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        self.config, self.compute = config, compute
        self.generator = ElectraGenerator(config.generator(), rngs=rngs, compute=compute, embeds=False)
        self.discriminator = ElectraDiscriminator(config, rngs=rngs, compute=compute)

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the discriminator, which is what is kept."""
        return self.discriminator.parameter_count

    @property
    def embeddings(self) -> TextEmbeddings:
        """What both networks read."""
        found = self.discriminator.encoder.embeddings
        assert found is not None, "the discriminator has embeddings of its own"
        return found

    def generated(
        self, tokens: jax.Array, positions: jax.Array, *, dropout_key: jax.Array | None = None, **where: Any
    ) -> jax.Array:
        """The generator's logits (B, M, V) float32 at positions (B, M) of tokens (B, T)."""
        return self.generator_logits(self.generator_states(tokens, positions, dropout_key=dropout_key, **where))

    def generator_states(
        self, tokens: jax.Array, positions: jax.Array, *, dropout_key: jax.Array | None = None, **where: Any
    ) -> jax.Array:
        """The generator's states (B, M, D) at positions (B, M) of tokens (B, T)."""
        states = self.generator.encoder.hidden_states(
            tokens, embeddings=self.embeddings, dropout_key=dropout_key, **where
        )
        return jnp.take_along_axis(states, positions[..., None], axis=1)

    def generator_logits(self, states: jax.Array) -> jax.Array:
        """The generator's states (B, M, D) -> its logits (B, M, V) float32."""
        return self.generator.logits(states, self.embeddings.tokens)

    def replaced(self, tokens: jax.Array, *, dropout_key: jax.Array | None = None, **where: Any) -> jax.Array:
        """The discriminator's logits (B, T) float32."""
        return self.discriminator(tokens, dropout_key=dropout_key, **where)

    def __call__(self, tokens: jax.Array, **where: Any) -> jax.Array:
        """`replaced`."""
        return self.replaced(tokens, **where)


class ElectraClassifier(SequenceClassifier):
    """ELECTRA's discriminator that classifies or scores texts and pairs."""

    body = Electra


class ElectraTagger(TokenClassifier):
    """ELECTRA's discriminator that classifies each token."""

    body = Electra


class ElectraReader(SpanPredictor):
    """ELECTRA's discriminator that finds an answer in a text."""

    body = Electra
