"""Train a translator, score it, use it.

    python -m experiments.translate                                    # embedded phrases, English to German
    python -m experiments.translate --corpus phrases:en-ja             # any CLDR locale
    python -m experiments.translate --train a.en a.de --valid b.en b.de --test c.en c.de --run-dir runs/mine
    python -m experiments.translate --run-dir runs/phrases-en-de-transformer --text "in 3 weeks"

The first command takes two minutes on two cores of an AMD EPYC (2026-11-21) and reaches an exact match of
at least 95 on 1,000 unseen phrases. The same command again resumes a run, or scores a finished one.
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
from typing import Annotated, Any  # noqa: E402

import tyro  # noqa: E402

from experiments.command import Processes, compiles, fake_devices, run_command  # noqa: E402
from transformer_jax.distributed.mesh import mesh_of, on_mesh  # noqa: E402
from transformer_jax.distributed.processes import broadcast_from_first, is_first, reporting_lost_process  # noqa: E402
from transformer_jax.errors import UserError  # noqa: E402
from transformer_jax.layers.compute_options import Attention, ComputeOptions  # noqa: E402
from transformer_jax.recipes import COMMON  # noqa: E402
from transformer_jax.translation import train_translator  # noqa: E402
from transformer_jax.translation_config import TranslationConfig, resolve  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a Transformer translator, score it on unseen sentences, and translate with it."""

    config: Annotated[TranslationConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TranslationConfig
    )
    run_dir: str | None = None
    """Folder of the run; a run that stands there is resumed. None: runs/CORPUS-MODEL, with -PRESET
    where one is named."""
    text: str | None = None
    """Translate this sentence with the trained run in --run-dir and print it; no training."""
    stdin: bool = False
    """Translate the lines of standard input with the trained run; an empty line stays empty."""
    plot_attention: str | None = None
    """With --text: draw the cross-attention of its translation, heads side by side, to this picture."""
    plot_layer: int = -1
    """With --plot-attention: the decoder layer to draw, counted from 0; negative from the end."""
    html: str | None = None
    """With --text: write all attention of its translation, every layer and head, as an interactive page."""
    mesh: str | None = None
    """Spread the run over devices, as data=2,fsdp=2,tensor=2: rows of a batch over data and fsdp, parameters
    over fsdp and tensor, tokens over sequence; None: one device, or the rows over all devices of several
    processes."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Processes)
    step_timeout: float | None = None
    """Seconds that a training step may take before the run ends and says which process is late, and ten times
    as many for the first one, which compiles, an evaluation and a save; None: half an hour where there are
    several processes, no limit for one."""
    remat: bool = False
    """Compute each block again in the backward pass instead of keeping its activations: less memory."""
    attention: Attention = "auto"
    """plain keeps the attention weights; chunked keeps none, for long sentences; fused calls JAX's own kernel,
    cuDNN's on a GPU where it fits; auto is plain, and chunked above 2,048 tokens."""
    dry_run: bool = False
    """Print what the run would be: its work, the time that it takes on 8 accelerators, what lies where on a
    --mesh of any size, and for up to 64 devices what a compiled step needs and sends; nothing is read,
    allocated or written."""


def default_run_dir(config: TranslationConfig) -> pathlib.Path:
    """A folder name that says what was trained."""
    named = config.recipe if config.recipe and not config.corpus else None
    corpus = named or ("files" if config.train else (config.corpus or COMMON["corpus"]))
    corpus = corpus.replace(":", "-").replace("/", "-")
    return pathlib.Path("runs") / "-".join(filter(None, (corpus, config.model, config.preset)))


def read_lines() -> list[str]:
    """The lines of standard input.

    Raises:
      UserError: it is not UTF-8.
    """
    try:
        lines = sys.stdin.buffer.read().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 at byte {error.start + 1}; convert it first") from None
    return lines[:-1] if lines[-1] == "" else lines


def translate(arguments: Arguments, run_dir: pathlib.Path, mesh: Any) -> None:
    """Translates `--text` or standard input with the run in `run_dir`, on a mesh or None."""
    from transformer_jax.plotting.attention import plot_alignment
    from transformer_jax.runs import load_translator

    if arguments.text is not None and not arguments.text.strip():
        raise UserError("--text is empty: give a sentence")
    if arguments.text is not None and not arguments.text.isprintable():
        try:
            arguments.text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("--text is not UTF-8: convert it first") from None
    run = load_translator(run_dir, mesh=mesh)
    search: dict[str, Any] = dict(beam_size=arguments.config.beam_size, alpha=arguments.config.length_penalty)
    if arguments.stdin:
        for line in run.translate(broadcast_from_first(read_lines), **search):
            print(line)
        return
    assert arguments.text is not None
    if arguments.html is not None:
        show_page(arguments, run, search)
        return
    if arguments.plot_attention is None:
        print(run.translate([arguments.text], **search)[0])
        return
    alignment = run.align(arguments.text, **search)
    layers = len(alignment.weights)
    if not -layers <= arguments.plot_layer < layers:
        raise UserError(f"--plot-layer {arguments.plot_layer}: the model has layers 0 to {layers - 1}")
    if not is_first():
        return
    try:
        plot_alignment(
            alignment.weights[arguments.plot_layer],
            alignment.source_tokens,
            alignment.target_tokens,
            arguments.plot_attention,
            title=f"{arguments.text} → {alignment.text}",
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{arguments.plot_attention}: the picture cannot be written ({error})") from None
    print(alignment.text)


def show_page(arguments: Arguments, run: Any, search: dict[str, Any]) -> None:
    """Writes `--html` and prints the translation that it is of."""
    from transformer_jax.interpretability.sentence import attention_of_translation
    from transformer_jax.plotting.attention_page import AttentionPage

    assert arguments.text is not None
    assert arguments.html is not None
    made = run.align(arguments.text, **search)
    print(made.text)
    maps = attention_of_translation(run.model, run.tokenizer, arguments.text, made.target_ids)
    if is_first():
        AttentionPage(maps, title=f"{arguments.text} → {made.text}").save(arguments.html)


def train(arguments: Arguments, run_dir: pathlib.Path) -> None:
    """Trains or resumes the run and prints its scores with some translations."""
    results = train_translator(
        arguments.config,
        run_dir,
        compute=ComputeOptions(remat=arguments.remat, attention=arguments.attention),
        mesh=arguments.mesh,
        step_timeout=arguments.step_timeout,
        started=_STARTED,
        note=lambda line: print(line, file=sys.stderr),
    )
    translations = results["translations"]
    for source, translation, reference in translations[:: max(1, len(translations) // 8)][:8]:
        print(f"\nsource       {source}\ntranslation  {translation}")
        if translation != reference:
            print(f"reference    {reference}")
    print(
        f"\nBLEU {results['bleu']:.2f} ({results['signature']})\n"
        f"chrF {results['chrf']:.2f}\n"
        f"exact match {results['exact_match']:.1f} % of {len(translations):,} unseen sentences\n"
        f"{results['parameters']:,} parameters, {results['steps']:,} steps, "
        f"{results['tokens_per_second']:,.0f} target tokens/s, {results['seconds']:.0f} s in all\n"
        f"run folder   {run_dir}"
    )


def show_plan(arguments: Arguments) -> None:
    """Prints what the run would be."""
    from transformer_jax.dry_run import describe, describe_compiled, translation_step

    config = resolve(arguments.config)
    mesh = fake_devices(arguments.mesh)
    for name, value in describe(config, arguments.mesh):
        print(f"{name:<10} {value}", flush=True)
    if compiles(arguments.mesh):
        # A loop over the layers, as on an accelerator.
        compute = ComputeOptions(unroll=1, remat=arguments.remat, attention=arguments.attention)
        for line in describe_compiled(translation_step(config, compute, mesh)):
            print(f"{'compiled':<10} {line}")


def main() -> None:
    """The command."""
    arguments = tyro.cli(Arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    if arguments.dry_run:
        show_plan(arguments)
        return
    arguments.processes.join()
    run_dir = pathlib.Path(arguments.run_dir or default_run_dir(arguments.config))
    if arguments.plot_attention is not None and arguments.text is None:
        raise UserError("--plot-attention draws the sentence of --text: give one")
    if arguments.html is not None and arguments.text is None:
        raise UserError("--html shows the sentence of --text: give one")
    if arguments.html is not None:
        from transformer_jax.plotting.attention_page import check_writable

        if arguments.plot_attention is not None:
            raise UserError("--html and --plot-attention contradict each other: give one of them")
        check_writable(arguments.html)
    if arguments.text is not None and arguments.stdin:
        raise UserError("--text and --stdin contradict each other: give one of them")
    if arguments.text is not None or arguments.stdin:
        mesh = mesh_of(arguments.mesh)
        with on_mesh(mesh), reporting_lost_process():
            translate(arguments, run_dir, mesh)
    else:
        train(arguments, run_dir)


if __name__ == "__main__":
    sys.exit(run_command(main))
