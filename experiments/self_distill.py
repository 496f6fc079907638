"""Train a vision model without labels, by DINO (self-distillation) or as a masked autoencoder.

    python -m experiments.self_distill                                       # scikit-learn's digits
    python -m experiments.self_distill --data FOLDER [--test FOLDER ...]
    python -m experiments.self_distill --method mae --data FOLDER

`--help` lists the flags; docs/vision.md explains the methods and contains a recipe with its score.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import self_distill
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: self_distill.main(prog="python -m experiments.self_distill")))
