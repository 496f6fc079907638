"""Continue texts with a trained run or with published weights."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from transformer_jax.commands.plan_decoding import TOKENS, show_chips, show_decoding, target
from transformer_jax.commands.train import keep_programs
from transformer_jax.decoding.generation import Sampling, batch_rows, cache_sizes
from transformer_jax.decoding.speculative import check_draft
from transformer_jax.decoding.text_generation import Generated, TextGenerator
from transformer_jax.distributed.mesh import mesh_of, on_mesh
from transformer_jax.distributed.processes import Processes, is_first, on_every_process, reporting_lost_process
from transformer_jax.errors import UserError
from transformer_jax.models.registry import DECODERS
from transformer_jax.pretrained import is_published
from transformer_jax.pretrained.folder import read_config
from transformer_jax.tasks import TASKS, load
from transformer_jax.tasks.decoders.language_modeling import TrainedLanguageModel
from transformer_jax.training.run_folder import read_run

DESCRIPTION = "Continue texts with a causal decoder; the text streams to the terminal as it is made."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Continue texts with a causal decoder; the text streams to the terminal as it is made."""

    prompt: tuple[str, ...] = ()
    """What the text begins with; several prompts are continued together, each as if it were alone."""
    weights: str | None = None
    """Hugging Face folder of a GPT-2 or a Llama."""
    run_dir: str | None = None
    """Folder of a run of a language model."""
    max_new_tokens: int = 100
    """Largest number of new tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from the K likeliest tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens that hold this share of the probability."""
    min_p: float | None = None
    """Draw from tokens that are at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Makes tokens that came before less likely; 1 changes nothing."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are cut off."""
    ignore_end: bool = False
    """Go on behind an end-of-text token."""
    samples: int = 1
    """Continuations of each prompt."""
    seed: int = 0
    """Of all draws."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the computation; None: the run's own, float32 for --weights."""
    draft_weights: str | None = None
    """Folder of a smaller model with the same tokenizer that proposes tokens: speculative decoding, which
    changes the speed and not the distribution."""
    draft_run_dir: str | None = None
    """The same, from a run."""
    draft_tokens: int = 4
    """Tokens that the small model proposes at a time."""
    html: str | None = None
    """Write all attention over the prompt and its continuation, every layer and head, as an interactive page;
    of one prompt and one sample."""
    mesh: str | None = None
    """Devices of the model by axis, as tensor=2; None: one device."""
    dry_run: bool = False
    """With --topology: print what reading the prompts and each new token need there; no weights are read."""
    topology: str | None = None
    """Accelerators that --dry-run compiles for, without being here, as v5e:1x1 or h100:1."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Processes)
    json: bool = False
    """Print one JSON object instead of streaming: text, token_ids; a list of them in several samples."""


def _model(weights: str | None, run_dir: str | None, dtype: str | None, mesh: Any) -> tuple[Any, Any]:
    if weights is not None and not pathlib.Path(weights).is_dir():
        raise UserError(f"{weights}: no such folder of weights")
    folder = run_dir if weights is None else weights
    assert folder is not None, "one of the two is given"
    loaded = load(folder, dtype=dtype, mesh=mesh)
    if not isinstance(loaded, TrainedLanguageModel):
        raise UserError(f"{folder} holds a {type(loaded.model).__name__}, which continues no text")
    return loaded.model, loaded.tokenizer


def _check(arguments: Arguments) -> Sampling:
    """What can be said before anything is read.

    Raises:
      UserError: flags that are missing or contradict each other.
    """
    _check_model(arguments)
    if not arguments.prompt or not all(arguments.prompt):
        raise UserError("the prompt is empty: give some text with `prompt`")
    _check_counts(arguments)
    if arguments.html is not None and len(arguments.prompt) * arguments.samples > 1:
        raise UserError("`html` shows one text: give one `prompt` and no `samples`")
    if arguments.html is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(arguments.html)
    if arguments.seed < 0:
        raise UserError(f"`seed` {arguments.seed} is below 0")
    try:
        "".join((*arguments.prompt, *arguments.stop)).encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("`prompt` is not UTF-8: convert it first") from None
    return Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )


def _check_model(arguments: Arguments) -> None:
    if (arguments.weights is None) == (arguments.run_dir is None):
        raise UserError("name the model: either `weights` FOLDER or `run_dir` DIR")
    if arguments.draft_weights is not None and arguments.draft_run_dir is not None:
        raise UserError("`draft_weights` and `draft_run_dir` contradict each other: give one of them")


def _check_counts(arguments: Arguments) -> None:
    for name in ("max_new_tokens", "samples", "draft_tokens"):
        if getattr(arguments, name) < 1:
            raise UserError(f"`{name}` {getattr(arguments, name)} is below 1")


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax generate") -> None:
    """The command."""
    arguments = tyro.cli(
        Arguments, prog=prog, description=DESCRIPTION, args=argv, config=(tyro.conf.OmitArgPrefixes,)
    )
    if arguments.dry_run or arguments.topology is not None:
        show_plan(arguments)
        return
    arguments.processes.join()
    sampling = _check(arguments)
    if arguments.run_dir is not None:
        keep_programs(pathlib.Path(arguments.run_dir))
    mesh = on_every_process(lambda: mesh_of(arguments.mesh))
    with on_mesh(mesh), reporting_lost_process():
        generate(arguments, sampling, mesh)


def show_plan(arguments: Arguments) -> None:
    """Prints what the compiler for `topology` says of the generation.

    Raises:
      UserError: flags that are missing, or see `show_decoding`.
    """
    if not arguments.dry_run or arguments.topology is None:
        raise UserError("`dry_run` and `topology` belong together: give both")
    _check_model(arguments)
    _check_counts(arguments)
    config, parameters = _config(arguments.weights, arguments.run_dir, arguments.dtype)
    drafts = arguments.draft_weights is not None or arguments.draft_run_dir is not None
    limit, judged = config.max_length, 1
    if drafts:
        draft, of_draft = _config(arguments.draft_weights, arguments.draft_run_dir, arguments.dtype)
        check_draft(config, draft)
        limit, judged = min(limit, draft.max_length), arguments.draft_tokens + 1
    new = arguments.max_new_tokens + (judged if drafts else 0)
    if new >= limit:
        raise UserError(
            f"`max_new_tokens` {arguments.max_new_tokens} leaves no room for a prompt in the context of "
            f"{limit}: lower it"
        )
    topology = target(arguments.topology)
    prompt, room = cache_sizes(min(TOKENS, limit - new), new, limit)
    # A draft model's texts are made one by one.
    rows = 1 if drafts else batch_rows(max(1, len(arguments.prompt)) * arguments.samples)
    show_chips(topology, arguments.mesh, rows)
    options: dict[str, Any] = dict(
        topology=topology, mesh=arguments.mesh, prompt=prompt, rows=rows, length=room
    )

    found = show_decoding(config, dtype=config.dtype, parameters=parameters, new_tokens=judged, **options)
    if drafts:
        found["draft"] = show_decoding(draft, name="draft ", dtype=draft.dtype, parameters=of_draft, **options)
    if arguments.json:
        print(json.dumps(found))


def _config(weights: str | None, run_dir: str | None, dtype: str | None) -> tuple[Any, str | None]:
    """(config of a language model, dtype of its parameters if it is not that of the computation); no weights
    are read."""
    folder = run_dir if weights is None else weights
    assert folder is not None, "one of the two is given"
    config: Any
    if weights is not None or is_published(folder):
        config, parameters = read_config(pathlib.Path(folder), dtype)[0], None
    else:  # a run's parameters stay float32 whatever it computes in
        stored = read_run(folder, TASKS).model_config
        config, parameters = dataclasses.replace(stored, dtype=dtype or stored.dtype), "float32"
    if type(config) not in {entry.config for entry in DECODERS.values()}:
        raise UserError(f"{folder} has a {type(config).__name__}, which is of no language model")
    return config, parameters


def generate(arguments: Arguments, sampling: Sampling, mesh: Any) -> None:
    """Reads the model and continues the prompts."""
    model, tokenizer = _model(arguments.weights, arguments.run_dir, arguments.dtype, mesh)
    draft = None
    if arguments.draft_weights is not None or arguments.draft_run_dir is not None:
        draft, _ = _model(arguments.draft_weights, arguments.draft_run_dir, arguments.dtype, mesh)
    generator = TextGenerator(
        model,
        tokenizer,
        sampling=sampling,
        ends=() if arguments.ignore_end else None,
        draft=draft,
        draft_tokens=arguments.draft_tokens,
    )
    inspected = model if arguments.html is not None else None
    if inspected is not None:
        from transformer_jax.interpretability.sentence import check_attends

        check_attends(inspected)
    del model, draft  # the generator has its own, cut into blocks
    single = len(arguments.prompt) * arguments.samples == 1
    streams = single and not arguments.json
    started = time.perf_counter()
    found = generator(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        samples=arguments.samples,
        seed=arguments.seed,
        stop=arguments.stop,
        on_text=(lambda _, text: print(text, end="", flush=True)) if streams else None,
    )
    spent = time.perf_counter() - started
    texts: list[Generated] = [one for samples in found for one in samples]
    if arguments.json:
        objects = [{"text": one.text, "token_ids": one.token_ids} for one in texts]
        print(json.dumps(objects[0] if single else objects, ensure_ascii=False), flush=True)
    elif streams:
        print(flush=True)
    else:
        for number, one in enumerate(texts, 1):
            print(f"--- {number}\n{one.text}", flush=True)
    if inspected is not None:
        show_page(arguments, inspected, tokenizer, texts[0].token_ids)
    if arguments.json:
        return
    new = sum(one.new_tokens for one in texts)
    if is_first():
        print(f"{new} new tokens in {spent:.1f} s, compilation included", file=sys.stderr)


def show_page(arguments: Arguments, model: Any, tokenizer: Any, ids: Sequence[int]) -> None:
    """Writes `--html`."""
    from transformer_jax.interpretability.sentence import attention_of_text
    from transformer_jax.plotting.attention_page import AttentionPage

    assert arguments.html is not None
    maps = attention_of_text(model, tokenizer, ids)
    if is_first():
        AttentionPage(maps).save(arguments.html)
