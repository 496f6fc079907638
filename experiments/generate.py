"""Continue a text with a trained run or with published weights.

    python -m experiments.generate --run-dir runs/python-gpt-mini --prompt "The for statement"
    python -m experiments.generate --weights FOLDER --prompt "Once upon a time" --temperature 0 --json

FOLDER is a Hugging Face folder of a GPT-2 or a Llama with config.json, safetensors and tokenizer.json.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import generate
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(
        run_command(lambda: generate.main(prog="python -m experiments.generate"), interrupted="interrupted")
    )
