"""Check and time an attached accelerator; `transformer-jax check-device` without a clone.

python -m experiments.on_accelerator [--only gpt generation] [--json]
python -m experiments.on_accelerator --trial
"""

from __future__ import annotations

import sys

from transformer_jax.commands import check_device
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: check_device.main(prog="python -m experiments.on_accelerator")))
