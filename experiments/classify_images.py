"""Train a vision model on classes of images, or use a trained one.

    python -m experiments.classify_images                                    # scikit-learn's digits
    python -m experiments.classify_images --data FOLDER --test FOLDER        # one folder per class
    python -m experiments.classify_images --start-from FOLDER --data FOLDER [--probe linear]
    python -m experiments.classify_images --run-dir RUN --images FILE...

`--help` lists the flags; docs/vision.md contains a recipe with its score.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import classify_images
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: classify_images.main(prog="python -m experiments.classify_images")))
