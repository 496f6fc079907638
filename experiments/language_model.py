"""Train and score a language model; `experiments.generate` continues texts with it.

    python -m experiments.language_model                               # the Python language reference
    python -m experiments.language_model --text book.txt --tokenizer char --model modern_gpt
    python -m experiments.language_model --corpus tfds:lm1b --tokenizer bpe --vocab-size 8000
    python -m experiments.generate --run-dir runs/python-gpt-mini --prompt "The for statement"

The same command resumes a run, or scores a finished one.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import language_model
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: language_model.main(prog="python -m experiments.language_model")))
