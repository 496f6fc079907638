"""Sequence to sequence with one fixed vector (Sutskever et al. 2014): a deep LSTM reads, another one writes."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.layers.dropout import dropout
from transformer_jax.layers.recurrent import CELLS, RecurrentStack
from transformer_jax.models.config_checks import check_choices
from transformer_jax.models.translators.recurrent_translator import (
    DEEP_SIZES,
    Memory,
    RecurrentConfig,
    RecurrentTranslator,
)


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig(RecurrentConfig):
    """What the model computes.

    Attributes:
      cell: "lstm" (the paper's) or "gru".

    Raises:
      ValueError: a value outside its choices or its range.
    """

    cell: Literal["lstm", "gru"] = "lstm"

    preset_fields: ClassVar = DEEP_SIZES

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, cell=CELLS)


class Seq2Seq(RecurrentTranslator):
    """The encoder reads the source from its last token to its first, which brings the beginnings of both
    sentences near each other (section 3.3); its layers' last states are the decoder's first ones.

    Args:
      config: what it computes.
      rngs: source of the initial values, only used here.
      compute: how it is computed.
    """

    attends = False

    def __init__(self, config: Seq2SeqConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        options: dict[str, Any] = dict(dropout=config.dropout, dtype=config.dtype, rngs=rngs)
        self.encoder = RecurrentStack(config.cell, config.width, config.hidden, config.layers, **options)
        self.decoder = RecurrentStack(config.cell, config.width, config.hidden, config.layers, **options)
        # Logits are made at the embeddings' width.
        self.readout = nnx.Linear(config.hidden, config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def _read(self, x, valid, begins, ends, dropout_key):
        _, states, _ = self.encoder(
            x,
            self.encoder.zero_states(len(x)),
            valid=valid,
            restart=ends,
            reverse=True,
            unroll=self.compute.unroll_of_time(x.shape[1]),
            dropout_key=dropout_key,
        )
        return Memory(), states

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        where: dict[str, Any] = dict(unroll=self.compute.unroll_of_time(x.shape[1]))
        if restart is not None:
            where |= dict(restart=restart.at, fresh=restart.state)
        outputs, _, state = self.decoder(x, state, dropout_key=keys[0], **where)
        return self.readout(dropout(outputs, self.config.dropout, keys[1])), None, state
