"""Embed texts with a published folder or a run of a text encoder, or train one on pairs of texts.

    python -m experiments.embed --weights FOLDER_OR_RUN --stdin --json < texts.txt
    python -m experiments.embed --weights FOLDER_OR_RUN --stdin --similarity similarity.png < texts.txt
    python -m experiments.embed --start-from FOLDER_OR_RUN --train pairs.tsv --run-dir runs/vectors

Files of pairs are .tsv with a header: sentence1 and sentence2.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import embed
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: embed.main(prog="python -m experiments.embed")))
