"""Train a captioner, or caption images with a trained one.

    python -m experiments.caption                                           # drawn scenes
    python -m experiments.caption --data TABLE IMAGES --test TABLE IMAGES   # columns image and caption
    python -m experiments.caption --data TABLE IMAGES --encoder FOLDER_OR_RUN
    python -m experiments.caption --run-dir RUN --images FILE... [--plot-attention words.png]

`--help` lists the flags; docs/multimodal.md contains a recipe with its scores.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import caption
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: caption.main(prog="python -m experiments.caption")))
