"""The console script `transformer-jax`: one subcommand a task, and what is done with runs."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

# Each subcommand with its module and a line on it; modules are imported when they are asked for.
COMMANDS = {
    "translate": ("translate", "train a translator, score it, and translate with it"),
    "lm": ("language_model", "train a language model and score it"),
    "generate": ("generate", "continue texts with a run or published weights"),
    "pretrain": ("pretrain", "pretrain a text encoder on masked or replaced words"),
    "classify": ("classify", "fine-tune an encoder on classes or scores of texts, and classify"),
    "tag": ("tag", "fine-tune an encoder on tags of words, and tag"),
    "answer": ("answer", "fine-tune an encoder on questions on texts, and answer"),
    "embed": ("embed", "vectors of texts, and encoders for them"),
    "classify-images": ("classify_images", "train a vision model on classes of images, and classify"),
    "self-distill": ("self_distill", "train a vision model without labels"),
    "plan": ("plan", "what a training run would be: plan translate ..., plan classify ..."),
}


def usage() -> str:
    """The help of the console script."""
    lines = [f"  {name:<15} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: transformer-jax COMMAND ...",
            "",
            *lines,
            "",
            "transformer-jax COMMAND --help lists the flags of a command;",
            "transformer-jax --print-completion bash (or zsh) prints the completion of all commands but plan.",
        ]
    )


def print_completion(shell: str) -> None:
    """Prints the completion of all commands but plan, which has the flags of the others, for bash or zsh."""
    import tyro

    from transformer_jax.commands import (
        answer,
        classify_images,
        embed,
        encoder_use,
        generate,
        language_model,
        pretrain,
        self_distill,
        translate,
    )
    from transformer_jax.commands.parsing import REGISTRY, default_arguments
    from transformer_jax.tasks import TASKS

    defaults = {
        "translate": default_arguments(TASKS["translation"], translate.Arguments),
        "lm": default_arguments(TASKS["language_modeling"], language_model.Arguments),
        "generate": generate.Arguments(),
        "pretrain": default_arguments(TASKS["masked_language_modeling"], pretrain.Arguments),
        "classify": default_arguments(TASKS["sequence_classification"], encoder_use.Arguments),
        "tag": default_arguments(TASKS["token_classification"], encoder_use.Arguments),
        "answer": default_arguments(TASKS["question_answering"], answer.Arguments),
        "embed": default_arguments(TASKS["sentence_embedding"], embed.Arguments),
        "classify-images": default_arguments(TASKS["image_classification"], classify_images.Arguments),
        "self-distill": default_arguments(TASKS["self_distillation"], self_distill.Arguments),
    }
    kind = tyro.extras.subcommand_type_from_defaults(defaults)
    args = ["--tyro-print-completion", shell]
    tyro.cli(kind, prog="transformer-jax", args=args, registry=REGISTRY, config=(tyro.conf.OmitArgPrefixes,))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit status."""
    if argv is None:
        restart_with_allocator_settings()
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("--help", "-h"):
        print(usage())
        return 0 if given else 2
    name, *rest = given
    if name == "--version":
        print(importlib.metadata.version("transformer_jax"))
        return 0
    if name == "--print-completion":
        print_completion(rest[0] if rest else "bash")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: unknown command {name!r}: choose one of {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    # JAX is imported here and not before: --help of all commands answers at once.
    from transformer_jax.commands.run_command import run_command

    command = importlib.import_module(f"transformer_jax.commands.{COMMANDS[name][0]}")
    interrupted = {"interrupted": "interrupted"} if name == "generate" else {}
    return run_command(lambda: command.main(rest, prog=f"transformer-jax {name}"), **interrupted)
