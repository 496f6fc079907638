"""Train image and text vectors (CLIP, SigLIP), or use trained ones.

    python -m experiments.contrast                                          # drawn scenes
    python -m experiments.contrast --data TABLE IMAGES --test TABLE IMAGES  # columns image and caption
    python -m experiments.contrast --start-from FOLDER --data TABLE IMAGES
    python -m experiments.contrast --run-dir RUN --images FILE... --labels dog cat

`--help` lists the flags; docs/multimodal.md contains a recipe with its scores.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import contrast
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: contrast.main(prog="python -m experiments.contrast")))
