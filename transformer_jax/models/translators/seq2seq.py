"""Sequence to sequence with one fixed vector (Sutskever et al. 2014): a deep LSTM reads, another writes."""

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
    read_in_reverse,
)


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig(RecurrentConfig):
    """The config of sequence to sequence; see `RecurrentConfig` for the other fields.

    Attributes:
      cell: Recurrent cell, "lstm", as in the paper, or "gru".
    """

    cell: Literal["lstm", "gru"] = "lstm"

    preset_fields: ClassVar = DEEP_SIZES

    def __post_init__(self):
        super().__post_init__()
        check_choices(self, cell=CELLS)


class Seq2Seq(RecurrentTranslator):
    """Two recurrent stacks: the last states of the encoder are the first states of the decoder, layer by layer.

    The encoder reads the source from its last token to its first, so that the first words of both sentences are
    close in time (section 3.3).
    """

    attends = False

    def __init__(self, config: Seq2SeqConfig, *, rngs: nnx.Rngs, compute: ComputeOptions = ComputeOptions()):
        super().__init__(config, rngs=rngs, compute=compute)
        options: dict[str, Any] = dict(dropout=config.dropout, dtype=config.dtype, rngs=rngs)
        self.encoder = RecurrentStack(config.cell, config.width, config.hidden, config.layers, **options)
        self.decoder = RecurrentStack(config.cell, config.width, config.hidden, config.layers, **options)
        # The logits use a table of the embeddings' width.
        self.readout = nnx.Linear(config.hidden, config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def _read(self, x, valid, starts, ends, dropout_key):
        _, states = read_in_reverse(self.encoder, x, valid, ends, dropout_key, self.compute)
        return Memory(), states

    def _unroll(self, x, state, memory, restart, dropout_key, draws):
        stack_key, output_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        options: dict[str, Any] = dict(unroll=self.compute.unroll_of_time(x.shape[1]))
        if restart is not None:
            options |= dict(restart=restart.at, fresh=restart.state)
        outputs, _, state = self.decoder(x, state, dropout_key=stack_key, **options)
        return self.readout(dropout(outputs, self.config.dropout, output_key)), None, state
