"""Fine-tune a text encoder on classes or scores of texts and pairs, or use a trained one.

    python -m experiments.classify --start-from FOLDER --train train.tsv --test test.tsv --run-dir runs/mine
    python -m experiments.classify --run-dir runs/mine --text "What a film."
    python -m experiments.classify --run-dir runs/mine --stdin --json < texts.txt

Data files are .tsv with a header: sentence, or sentence1 and sentence2; and label, labels or score.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import classify
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: classify.main(prog="python -m experiments.classify")))
