"""Train a speech recognizer, or transcribe recordings with a trained one.

    python -m experiments.transcribe                                     # synthesized digits
    python -m experiments.transcribe --data TABLE AUDIO --test TABLE AUDIO   # columns file and transcript
    python -m experiments.transcribe --data TABLE AUDIO --start-from FOLDER_OR_RUN
    python -m experiments.transcribe --run-dir RUN --audio FILE... [--plot-attention words.png]

`--help` lists the flags; docs/speech.md contains a recipe with its scores.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import transcribe
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: transcribe.main(prog="python -m experiments.transcribe")))
