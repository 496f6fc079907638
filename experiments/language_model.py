"""Train a language model and score it; then `experiments.generate` continues texts with it.

    python -m experiments.language_model                               # the Python language reference
    python -m experiments.language_model --text book.txt --tokenizer char --model modern_gpt
    python -m experiments.language_model --corpus tfds:lm1b --tokenizer bpe --vocab-size 8000
    python -m experiments.generate --run-dir runs/python-gpt-mini --prompt "The for statement"

The same command again resumes a run, or scores a finished one.
"""

from __future__ import annotations

import time

from experiments.allocator_settings import restart_with_kept_memory

if __name__ == "__main__":
    restart_with_kept_memory()

_STARTED = time.perf_counter()  # before the imports: `seconds` is the whole command's

import dataclasses  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
from typing import Annotated  # noqa: E402

import tyro  # noqa: E402

from experiments.command import Processes, compiles, fake_devices, run_command  # noqa: E402
from transformer_jax.language_config import LanguageConfig, resolve_language  # noqa: E402
from transformer_jax.language_model import train_language_model  # noqa: E402
from transformer_jax.layers.compute_options import Attention, ComputeOptions  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a causal decoder on text and score it on text that is held out."""

    config: Annotated[LanguageConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=LanguageConfig
    )
    run_dir: str | None = None
    """Folder of the run; a run that stands there is resumed. None: runs/CORPUS-MODEL-PRESET."""
    mesh: str | None = None
    """Spread the run over devices, as data=2,fsdp=2,tensor=2: rows of a batch over data and fsdp, parameters
    over fsdp and tensor, tokens over sequence; None: one device, or the rows over all devices of several
    processes."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Processes)
    step_timeout: float | None = None
    """Seconds that a training step may take before the run ends and says which process is late, and ten times
    as many for the first one, which compiles, an evaluation and a save; None: half an hour where there are
    several processes, no limit for one."""
    dry_run: bool = False
    """Print what the run would be, what lies where on a --mesh of any size, and for up to 64 devices what a
    compiled step needs and sends; nothing is read, allocated or written."""
    remat: bool = False
    """Compute each block again in the backward pass instead of keeping its activations: less memory."""
    unroll: int | None = None
    """Layers that one iteration of the loop over the stack holds; None: all on a CPU, 1 elsewhere."""
    attention: Attention = "auto"
    """plain keeps the attention weights; chunked keeps none, for long contexts; fused calls JAX's own kernel,
    cuDNN's on a GPU where it fits; auto is plain, and chunked above 2,048 tokens."""


def default_run_dir(config: LanguageConfig) -> pathlib.Path:
    """A folder name that says what was trained."""
    corpus = pathlib.Path(config.text[0]).stem if config.text else config.corpus
    name = f"{corpus}-{config.model}-{config.preset}"
    return pathlib.Path("runs") / name.replace(":", "-").replace("/", "-")


def show_plan(arguments: Arguments, compute: ComputeOptions) -> None:
    """Prints what the run would be."""
    from transformer_jax.dry_run import describe_compiled, describe_language, language_step

    config = resolve_language(arguments.config)
    mesh = fake_devices(arguments.mesh)
    for name, value in describe_language(config, arguments.mesh):
        print(f"{name:<10} {value}", flush=True)
    if compiles(arguments.mesh):
        for line in describe_compiled(language_step(config, compute, mesh)):
            print(f"{'compiled':<10} {line}")


def main() -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    compute = ComputeOptions(unroll=arguments.unroll, remat=arguments.remat, attention=arguments.attention)
    if arguments.dry_run:
        show_plan(arguments, dataclasses.replace(compute, unroll=arguments.unroll or 1))
        return
    arguments.processes.join()
    run_dir = pathlib.Path(arguments.run_dir or default_run_dir(arguments.config))
    results = train_language_model(
        arguments.config,
        run_dir,
        compute=compute,
        mesh=arguments.mesh,
        step_timeout=arguments.step_timeout,
        started=_STARTED,
        note=lambda line: print(line, file=sys.stderr),
    )
    if results["sample"]:
        print(f"\n{results['sample']}\n")
    print(
        f"validation loss {results['validation_loss']:.4f} nats a token\n"
        f"perplexity {results['perplexity']:.2f}\n"
        f"bits per byte {results['bits_per_byte']:.3f}\n"
        f"{results['parameters']:,} parameters, {results['steps']:,} steps, {results['tokens']:,.0f} tokens, "
        f"{results['tokens_per_second']:,.0f} tokens/s, {results['seconds']:.0f} s in all\n"
        f"run folder   {run_dir}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
