"""Train, score and use a translator.

    python -m experiments.translate                                    # embedded phrases, English to German
    python -m experiments.translate --corpus phrases:en-ja             # any CLDR locale
    python -m experiments.translate --train a.en a.de --valid b.en b.de --test c.en c.de --run-dir runs/mine
    python -m experiments.translate --run-dir runs/phrases-en-de-transformer --text "in 3 weeks"

The first command takes two minutes on two cores of an AMD EPYC and reaches an exact match of at least 95 % on
1,000 held-out phrases. The same command resumes a run, or scores a finished one.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import translate
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: translate.main(prog="python -m experiments.translate")))
