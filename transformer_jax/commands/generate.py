"""Generate text with a trained run or published weights."""

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
from transformer_jax.data.tokenizers.text_tokenizer import SpecialTokens
from transformer_jax.decoding.generation import Sampling, batch_rows, cache_sizes
from transformer_jax.decoding.speculative import check_draft
from transformer_jax.decoding.text_generation import Generated, TextGenerator
from transformer_jax.distributed.mesh import mesh_of, on_mesh
from transformer_jax.distributed.processes import Processes, is_first, on_every_process, reporting_lost_process
from transformer_jax.errors import UserError
from transformer_jax.limits import LENGTH, SAMPLES, check_seed
from transformer_jax.models.registry import DECODERS
from transformer_jax.pretrained import is_published
from transformer_jax.pretrained.folder import read_config
from transformer_jax.tasks import TASKS, load
from transformer_jax.tasks.decoders.language_modeling import TrainedLanguageModel
from transformer_jax.training.run_folder import read_run

DESCRIPTION = "Generate text with a causal decoder; it is streamed to the terminal."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Generate text with a causal decoder; it is streamed to the terminal."""

    prompt: tuple[str, ...] = ()
    """Start of the text. Several prompts are continued in one batch, with the same results as separately."""
    weights: str | None = None
    """Hugging Face folder of a GPT-2 or a Llama."""
    run_dir: str | None = None
    """Folder of a run of a language model."""
    max_new_tokens: int = 100
    """Maximum number of new tokens."""
    temperature: float = 1.0
    """Divisor of the logits; 0 always selects the most probable token."""
    top_k: int | None = None
    """Sample from the K most probable tokens."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the highest probability."""
    repetition_penalty: float = 1.0
    """Lower the probability of previous tokens; 1 disables it."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is truncated before them."""
    special_tokens: SpecialTokens | None = None
    """Reading of special tokens in the prompt. control: the tokens that they name. text: like other text. None:
    the run's, control for --weights."""
    ignore_end: bool = False
    """Continue after an end-of-text token."""
    samples: int = 1
    """Number of continuations of each prompt."""
    seed: int = 0
    """Seed of sampling."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute dtype. None: the run's, float32 for --weights."""
    int8_weights: bool = False
    """Store the weights as int8, for accelerators: half the memory of bfloat16, and half the bytes to read in a
    step. Texts may differ."""
    allow_nonfinite: bool = False
    """Use --weights although some are NaN or infinite."""
    draft_weights: str | None = None
    """Folder of a smaller model with the same tokenizer that proposes tokens (speculative decoding): it changes
    the speed and not the distribution."""
    draft_run_dir: str | None = None
    """Run folder of such a smaller model."""
    draft_tokens: int = 4
    """Number of tokens that the smaller model proposes at a time."""
    html: str | None = None
    """Write the attention over the prompt and its continuation, every layer and head, as an interactive page;
    needs a single prompt and a single sample."""
    mesh: str | None = None
    """Devices of the model by axis, as tensor=2. None: one device."""
    dry_run: bool = False
    """With --topology: print the memory and time of reading the prompts and of each new token; no weights are
    read."""
    topology: str | None = None
    """Accelerators to compile for with --dry-run, as v5e:1x1 or h100:1; they need not be attached."""
    processes: Annotated[Processes, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Processes)
    json: bool = False
    """Print a JSON object with text and token_ids instead of streaming; a list for several samples."""


def _model(arguments: Arguments, weights: str | None, run_dir: str | None, mesh: Any) -> tuple[Any, Any]:
    if weights is not None and not pathlib.Path(weights).is_dir():
        raise UserError(f"{weights}: no such folder of weights")
    folder = run_dir if weights is None else weights
    assert folder is not None, "checked by _check_model"
    loaded = load(folder, dtype=arguments.dtype, mesh=mesh, allow_nonfinite=arguments.allow_nonfinite)
    if not isinstance(loaded, TrainedLanguageModel):
        raise UserError(f"{folder} holds a {type(loaded.model).__name__}, which does not generate text")
    if arguments.special_tokens is not None:
        loaded.tokenizer.special_tokens = arguments.special_tokens
    return loaded.model, loaded.tokenizer


def _check(arguments: Arguments) -> Sampling:
    """Check the flags before anything is read, and return the sampling method.

    Raises:
      UserError: Flags are missing, invalid or contradict each other.
    """
    _check_model(arguments)
    if not arguments.prompt or not all(arguments.prompt):
        raise UserError("the prompt is empty: write some text after `prompt`")
    _check_counts(arguments)
    if arguments.html is not None and len(arguments.prompt) * arguments.samples > 1:
        raise UserError("`html` shows one text: use one `prompt` and remove `samples`")
    if arguments.html is not None:
        from transformer_jax.plotting.page import check_writable

        check_writable(arguments.html)
    check_seed(arguments.seed)
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
        raise UserError("`draft_weights` and `draft_run_dir` contradict each other: use one of them")
    if arguments.int8_weights and (arguments.draft_weights or arguments.draft_run_dir):
        raise UserError("`int8_weights` cannot be combined with a draft: remove one of them")


def _check_counts(arguments: Arguments) -> None:
    for name in ("max_new_tokens", "samples", "draft_tokens"):
        if getattr(arguments, name) < 1:
            raise UserError(f"`{name}` {getattr(arguments, name)} is below 1")
    SAMPLES.check(arguments.samples, "`samples`")
    SAMPLES.check(arguments.draft_tokens, "`draft_tokens`")
    LENGTH.check(arguments.max_new_tokens, "`max_new_tokens`")


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax generate") -> None:
    """Run the command."""
    arguments = tyro.cli(
        Arguments, prog=prog, description=DESCRIPTION, args=argv, config=(tyro.conf.OmitArgPrefixes,)
    )
    if arguments.dry_run or arguments.topology is not None:
        show_plan(arguments)
        return
    arguments.processes.join()
    sampling = _check(arguments)
    if arguments.run_dir is not None:
        keep_programs()
    mesh = on_every_process(lambda: mesh_of(arguments.mesh))
    with on_mesh(mesh), reporting_lost_process():
        generate(arguments, sampling, mesh)


def show_plan(arguments: Arguments) -> None:
    """Print the plan of the generation for `topology`.

    Raises:
      UserError: Flags are missing, or see `show_decoding`.
    """
    if not arguments.dry_run or arguments.topology is None:
        raise UserError("`dry_run` and `topology` belong together: use both")
    _check_model(arguments)
    _check_counts(arguments)
    config, parameters = _config(arguments.weights, arguments.run_dir, arguments.dtype)
    has_draft = arguments.draft_weights is not None or arguments.draft_run_dir is not None
    limit, step_tokens = config.max_length, 1
    if getattr(config, "dilation", 1) > 1:
        raise UserError(f"a model with a dilated window ({config.dilation}) has no cache and does not generate")
    if has_draft:
        draft, draft_parameters = _config(arguments.draft_weights, arguments.draft_run_dir, arguments.dtype)
        check_draft(config, draft)
        limit, step_tokens = min(limit, draft.max_length), arguments.draft_tokens + 1
    new = arguments.max_new_tokens + (step_tokens if has_draft else 0)
    if new >= limit:
        raise UserError(
            f"`max_new_tokens` {arguments.max_new_tokens} leaves no room for a prompt in the context of "
            f"{limit}: lower it"
        )
    topology = target(arguments.topology)
    prompt, length = cache_sizes(min(TOKENS, limit - new), new, limit)
    # Speculative decoding generates one text at a time.
    rows = 1 if has_draft else batch_rows(max(1, len(arguments.prompt)) * arguments.samples)
    show_chips(topology, arguments.mesh, rows)
    options: dict[str, Any] = dict(
        topology=topology, mesh=arguments.mesh, prompt=prompt, rows=rows, length=length
    )
    values = show_decoding(
        config,
        dtype=config.dtype,
        parameters=parameters,
        new_tokens=step_tokens,
        int8=arguments.int8_weights,
        **options,
    )
    if has_draft:
        values["draft"] = show_decoding(
            draft, name="draft ", dtype=draft.dtype, parameters=draft_parameters, **options
        )
    if arguments.json:
        print(json.dumps(values))


def _config(weights: str | None, run_dir: str | None, dtype: str | None) -> tuple[Any, str | None]:
    """Return (a language model's config, its parameters' dtype if it differs from the compute dtype)."""
    folder = run_dir if weights is None else weights
    assert folder is not None, "checked by _check_model"
    config: Any
    if weights is not None or is_published(folder):
        config, parameters = read_config(pathlib.Path(folder), dtype)[0], None
    else:  # a run's parameters are float32 for every compute dtype
        stored = read_run(folder, TASKS).model_config
        config, parameters = dataclasses.replace(stored, dtype=dtype or stored.dtype), "float32"
    if type(config) not in {entry.config for entry in DECODERS.values()}:
        raise UserError(f"{folder} has a {type(config).__name__}, which is not the config of a language model")
    return config, parameters


def generate(arguments: Arguments, sampling: Sampling, mesh: Any) -> None:
    """Load the model and continue the prompts."""
    model, tokenizer = _model(arguments, arguments.weights, arguments.run_dir, mesh)
    draft = None
    if arguments.draft_weights is not None or arguments.draft_run_dir is not None:
        draft, _ = _model(arguments, arguments.draft_weights, arguments.draft_run_dir, mesh)
    generator = TextGenerator(
        model,
        tokenizer,
        sampling=sampling,
        ends=() if arguments.ignore_end else None,
        draft=draft,
        draft_tokens=arguments.draft_tokens,
        int8=arguments.int8_weights,
    )
    inspected = model if arguments.html is not None else None
    if inspected is not None:
        from transformer_jax.interpretability.sentence import check_attends

        check_attends(inspected)
    del model, draft  # the generator holds copies with unstacked blocks
    single = len(arguments.prompt) * arguments.samples == 1
    streams = single and not arguments.json
    start_time = time.perf_counter()
    outputs = generator(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        samples=arguments.samples,
        seed=arguments.seed,
        stop=arguments.stop,
        on_text=(lambda _, text: print(text, end="", flush=True)) if streams else None,
    )
    seconds = time.perf_counter() - start_time
    texts: list[Generated] = [text for samples in outputs for text in samples]
    if arguments.json:
        objects = [{"text": generated.text, "token_ids": generated.token_ids} for generated in texts]
        print(json.dumps(objects[0] if single else objects, ensure_ascii=False), flush=True)
    elif streams:
        print(flush=True)
    else:
        for number, generated in enumerate(texts, 1):
            print(f"--- {number}\n{generated.text}", flush=True)
    if inspected is not None:
        show_page(arguments, inspected, tokenizer, texts[0].token_ids)
    if arguments.json:
        return
    new = sum(generated.new_tokens for generated in texts)
    if is_first():
        print(f"{new} new tokens in {seconds:.1f} s, including compilation", file=sys.stderr)


def show_page(arguments: Arguments, model: Any, tokenizer: Any, ids: Sequence[int]) -> None:
    """Write the page of `--html`."""
    from transformer_jax.interpretability.sentence import attention_of_text
    from transformer_jax.plotting.attention_page import AttentionPage

    assert arguments.html is not None
    maps = attention_of_text(model, tokenizer, ids)
    if is_first():
        AttentionPage(maps).save(arguments.html)
