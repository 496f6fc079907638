"""The console script `transformer-jax`, with a subcommand for each task."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

# Module and description of each subcommand; a module is imported when its command is used.
COMMANDS = {
    "translate": ("translate", "train a translator, score it, and translate with it"),
    "lm": ("language_model", "train a language model and score it"),
    "generate": ("generate", "continue texts with a run or published weights"),
    "pretrain": ("pretrain", "pretrain a text encoder on masked or replaced words"),
    "classify": ("classify", "fine-tune an encoder on classes or scores of texts, and classify"),
    "tag": ("tag", "fine-tune an encoder on tags of words, and tag"),
    "answer": ("answer", "fine-tune an encoder on questions on texts, and answer"),
    "embed": ("embed", "compute vectors of texts, and train encoders for them"),
    "classify-images": ("classify_images", "train a vision model on classes of images, and classify"),
    "self-distill": ("self_distill", "train a vision model without labels"),
    "contrast": (
        "contrast",
        "train image and text vectors on pairs, retrieve, and classify by labels in words",
    ),
    "caption": ("caption", "train a captioner on images with captions, and caption images"),
    "transcribe": ("transcribe", "train a speech recognizer on recordings, and transcribe"),
    "decide": ("decide", "learn decisions from recorded episodes, and play"),
    "graphs": ("graphs", "learn to predict properties of graphs or molecules, and predict them"),
    "check-device": ("check_device", "check and time an attached accelerator, next to PyTorch"),
    "plan": ("plan", "print the plan of a training run: plan translate ..., plan classify ..."),
}


def usage() -> str:
    """Return the help of the console script."""
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
    """Print the completion for bash or zsh of all commands except plan, which has the flags of the others."""
    import tyro

    from transformer_jax.commands import (
        answer,
        caption,
        classify_images,
        contrast,
        decide,
        embed,
        encoder_use,
        generate,
        graphs,
        language_model,
        pretrain,
        self_distill,
        transcribe,
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
        "contrast": default_arguments(TASKS["contrastive"], contrast.Arguments),
        "caption": default_arguments(TASKS["captioning"], caption.Arguments),
        "transcribe": default_arguments(TASKS["speech_recognition"], transcribe.Arguments),
        "decide": default_arguments(TASKS["offline_decisions"], decide.Arguments),
        "graphs": default_arguments(TASKS["graph_prediction"], graphs.Arguments),
    }
    subcommands = tyro.extras.subcommand_type_from_defaults(defaults)
    args = ["--tyro-print-completion", shell]
    config = (tyro.conf.OmitArgPrefixes,)
    tyro.cli(subcommands, prog="transformer-jax", args=args, registry=REGISTRY, config=config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    if argv is None:
        restart_with_allocator_settings()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(importlib.metadata.version("transformer_jax"))
        return 0
    if name == "--print-completion":
        print_completion(rest[0] if rest else "bash")
        return 0
    if name not in COMMANDS:
        matches = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {matches[0]}?" if matches else ""
        print(f"error: unknown command {name!r}: choose one of {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return 2
    # JAX is imported only here, so that --help answers immediately.
    from transformer_jax.commands.run_command import run_command

    def run() -> None:
        command = importlib.import_module(f"transformer_jax.commands.{COMMANDS[name][0]}")
        command.main(rest, prog=f"transformer-jax {name}")

    interrupted = {"interrupted": "interrupted"} if name == "generate" else {}
    return run_command(run, **interrupted)
