"""Fine-tune a text encoder on tags of words, or use a trained one.

    python -m experiments.tag --start-from FOLDER_OR_RUN --train train.tsv --test test.tsv --run-dir runs/tags
    python -m experiments.tag --run-dir runs/tags --text "Ada Lovelace wrote the first program"

Data files are .tsv with a header, tokens and tags; both columns are separated by spaces.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import tag
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: tag.main(prog="python -m experiments.tag")))
