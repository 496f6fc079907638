"""Decision Transformer ("Reinforcement Learning via Sequence Modeling", Chen et al. 2021).

Each step of an episode is three tokens: the return that remains to be collected, the state, and the action. A
causal decoder predicts each action from the tokens before it, so that a high return asks for good actions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.attention.dispatch import prepare_mask
from transformer_jax.layers.attention.self_attention import AttentionContext
from transformer_jax.layers.attention.visibility import causal
from transformer_jax.layers.blocks import CausalBlock
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dense import dense_dot_general
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.norms import layer_norm
from transformer_jax.layers.stack import make_stack, run_stack
from transformer_jax.models.config_checks import check_choices, check_heads, check_minimum, check_rates
from transformer_jax.models.decoders.gpt import INITIAL_STD, gpt_block
from transformer_jax.models.presets import Presets

# Tokens of a step: the return to go, the state and the action.
TOKENS_PER_STEP = 3


@dataclasses.dataclass(frozen=True)
class DecisionTransformerConfig(Presets):
    """The config of a Decision Transformer. Sizes have no defaults: use a preset, or set them.

    Attributes:
      state_width: Number of values of a state; 0 means the number in the data.
      actions: Number of actions A, or of the values of a continuous action; 0 means the number in the data.
      continuous: Predict vectors of numbers instead of one of A actions.
      width: Model width D.
      layers: Number of layers L.
      heads: Number of attention heads H.
      feed_forward: Width F of the feed-forward layers.
      context: Maximum number of steps that an action is predicted from.
      max_steps: Maximum length of an episode in steps; each step has its own embedding.
      dropout: Dropout rate of the embeddings and of the output of each sub-layer.
      activation: Activation of the feed-forward layers; any name in `ACTIVATIONS`.
      norm_epsilon: Epsilon of the layer normalizations.
      dtype: Compute dtype; parameters, softmax and predictions are float32.

    Raises:
      ValueError: A value is not among its choices or out of range, or sizes do not divide.
    """

    width: int
    layers: int
    heads: int
    feed_forward: int
    state_width: int = 0
    actions: int = 0
    continuous: bool = False
    context: int = 20
    max_steps: int = 1_000
    dropout: float = 0.1
    activation: str = "relu"
    norm_epsilon: float = 1e-5
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    # "gym" and "atari" are the sizes of the paper's appendix A, "mini" is for two CPU cores.
    preset_fields: ClassVar = {
        "mini": dict(width=64, layers=2, heads=4, feed_forward=256, context=20, max_steps=200, dropout=0.0),
        "gym": dict(width=128, layers=3, heads=1, feed_forward=512, context=20, max_steps=1_000),
        "atari": dict(
            width=128, layers=6, heads=8, feed_forward=512, context=30, max_steps=10_000, activation="gelu"
        ),
    }

    def __post_init__(self):
        check_choices(self, activation=tuple(ACTIVATIONS))
        check_heads(self)
        check_minimum(self, 0, "state_width", "actions")
        check_minimum(self, 1, "context", "max_steps")
        check_rates(self, "dropout")


class DecisionTransformer(nnx.Module):
    """A causal decoder over returns to go, states and actions.

    Initial values are those of GPT-2: matrices and embeddings are normal with standard deviation 0.02, matrices
    that write to the residual stream with 0.02 / sqrt(2 L); biases are 0 and normalization scales 1. States and
    returns are projected with LeCun's initial values, since their width is small.

    Args:
      config: Sizes and variants.
      rngs: Source of the initial values.
      compute: Options for computing the model.
    """

    def __init__(
        self,
        config: DecisionTransformerConfig,
        *,
        rngs: nnx.Rngs,
        compute: ComputeOptions = ComputeOptions(),
    ):
        self.config, self.compute = config, compute
        normal = nnx.initializers.normal(INITIAL_STD)
        dtype = jnp.dtype(config.dtype)

        def projection(inputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, config.width, dtype=dtype, dot_general=dense_dot_general, rngs=rngs)

        def block(key: jax.Array) -> CausalBlock:
            return gpt_block(config, compute, nnx.Rngs(key), kv_heads=config.heads)

        table: dict[str, Any] = dict(embedding_init=normal, dtype=dtype, rngs=rngs)
        # Sizes that the data determines are 0 in a plan without data.
        actions = max(1, config.actions)
        self.return_projection, self.state_projection = projection(1), projection(max(1, config.state_width))
        self.action_projection = projection(actions) if config.continuous else None
        self.action_table = None if config.continuous else nnx.Embed(actions, config.width, **table)
        # Replaces the returns of an episode that is not conditioned on its return.
        self.unknown_return = nnx.Param(normal(rngs.params(), (1, config.width), jnp.float32))
        self.steps_table = nnx.Embed(config.max_steps, config.width, **table)
        self.input_norm = layer_norm(config, rngs)
        self.blocks = make_stack(block, rngs.params(), config.layers)
        self.norm = layer_norm(config, rngs)
        self.head = nnx.Linear(
            config.width, actions, kernel_init=normal, dtype=dtype, dot_general=dense_dot_general,
            rngs=rngs,
        )  # fmt: skip

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def _embed(self, states, actions, returns, steps, is_conditioned) -> jax.Array:
        """Return the embedded tokens (B, 3 T, D) of T steps, in the order return, state, action."""
        B, T = steps.shape
        x_returns = self.return_projection(returns[..., None])
        if is_conditioned is not None:
            unknown = self.unknown_return[...].astype(x_returns.dtype)
            x_returns = jnp.where(is_conditioned[:, None, None], x_returns, unknown)
        if self.action_table is None:
            assert self.action_projection is not None, "continuous actions are projected"
            x_actions = self.action_projection(actions)
        else:
            x_actions = self.action_table(actions)
        tokens = jnp.stack([x_returns, self.state_projection(states), x_actions], axis=2)
        tokens = tokens + self.steps_table(steps)[:, :, None]
        return self.input_norm(tokens.reshape(B, TOKENS_PER_STEP * T, self.config.width))

    def __call__(
        self,
        states: jax.Array,
        actions: jax.Array,
        returns: jax.Array,
        steps: jax.Array,
        *,
        is_conditioned: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        return_weights: bool = False,
    ):
        """Predict the action of each step from the tokens before it.

        Steps after the last one of an episode may hold any values, since no earlier step attends to them.

        Args:
          states: (B, T, state_width) float32, normalized.
          actions: (B, T) integers below A, or (B, T, A) float32 if they are continuous.
          returns: (B, T) float32, the scaled sum of the rewards from each step on.
          steps: (B, T) number of each step in its episode.
          is_conditioned: (B,) False for episodes whose returns are masked, which makes the model imitate all
            episodes alike; None conditions all.
          dropout_key: Turns dropout on.
          return_weights: Also return the attention weights.

        Returns:
          logits (B, T, A) float32, or predicted values if actions are continuous; with weights
          (logits, weights (B, L, H, 3 T, 3 T) float32).

        Raises:
          ValueError: There are no steps, or more than `context`, or states have another width.
        """
        T, config = steps.shape[1], self.config
        if not 1 <= T <= config.context:
            raise ValueError(f"{T} steps: the model takes 1 to {config.context} (its `context`)")
        width = self.state_projection.in_features
        if states.shape[-1] != width:
            raise ValueError(f"states of {states.shape[-1]} values: the model's have {width}")
        embed_key, stack_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        length = TOKENS_PER_STEP * T
        positions = jnp.arange(length)
        mask = prepare_mask(causal(length, length), self.compute.attention, length, length, config.dtype)
        context = AttentionContext(mask, positions, positions)

        def run_block(block, x, key):
            x, (weights, _) = block(x, context, dropout_key=key, return_weights=return_weights)
            return x, weights

        with jax.named_scope("decoder"):
            x = self._embed(states, actions, returns, steps, is_conditioned)
            x = dropout(x, config.dropout, embed_key)
            x, weights = run_stack(run_block, self.blocks, x, stack_key, self.compute)
        # An action is predicted from the state of its step, the second token.
        logits = self.head(self.norm(x[:, 1::TOKENS_PER_STEP])).astype(jnp.float32)
        return (logits, weights.swapaxes(0, 1)) if return_weights else logits
