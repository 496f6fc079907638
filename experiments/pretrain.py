"""Pretrain a text encoder from random or existing weights; `experiments.classify` and others fine-tune it.

    python -m experiments.pretrain                                      # BERT on the Python language reference
    python -m experiments.pretrain --model electra --text corpus.txt.xz --steps 20000 --run-dir runs/electra
    python -m experiments.pretrain --run-dir runs/electra --fill "The [MASK] of the list"

The same command resumes a run, or scores a finished one.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import pretrain
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: pretrain.main(prog="python -m experiments.pretrain")))
