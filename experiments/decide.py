"""Learn decisions from recorded episodes, or play with a trained policy.

    python -m experiments.decide                                   # a key and a door in a grid world
    python -m experiments.decide --environment cart_pole
    python -m experiments.decide --data EPISODES [--environment gymnasium:NAME]   # .npz, .jsonl, minari:NAME
    python -m experiments.decide --run-dir RUN --play 100 [--plot-returns FILE] [--plot-attention FILE]

`--help` lists the flags; docs/decisions.md contains a recipe with its scores.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import decide
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: decide.main(prog="python -m experiments.decide")))
