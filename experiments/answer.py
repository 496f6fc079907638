r"""Fine-tune a text encoder on questions whose answers are spans of a text, or use a trained one.

    python -m experiments.answer --start-from FOLDER --train train.json --test dev.json --run-dir runs/answers
    printf 'Who wrote it?\tIt was written by Ada Lovelace.\n' | \
        python -m experiments.answer --run-dir runs/answers --stdin --json

Data files have SQuAD's JSON format.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import answer
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: answer.main(prog="python -m experiments.answer")))
