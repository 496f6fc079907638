"""Run folders: everything that a trained model needs, in one place, readable by other tools.

`config.json` (format version, model name and config, training config), `tokenizer.json`, `checkpoints/`,
`metrics.jsonl` with TensorBoard event files, `results.json`, `loss.png`, and for a corpus that is read from
disk `lengths.npy`, its token counts.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.generation import Sampling
from transformer_jax.decoding.text_generation import Generated, TextGenerator
from transformer_jax.decoding.translator import Alignment, Translator
from transformer_jax.distributed.mesh import check_model
from transformer_jax.distributed.sharding import model_shardings, placed_shapes
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.registry import DECODERS, TASKS, module_of
from transformer_jax.training.checkpoints import Checkpoints, write_text_atomically

FORMAT_VERSION = 1
CONFIG, TOKENIZER, RESULTS, CHECKPOINTS = "config.json", "tokenizer.json", "results.json", "checkpoints"
AVERAGED, LENGTHS = "averaged", "lengths.npy"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file of a run.

    Raises:
      UserError: no such file, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path}: no such file; is {path.parent} the folder of a run?") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    """Writes a JSON file of a run, whole or not at all.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --run-dir") from None


def is_run(folder: pathlib.Path) -> bool:
    """Whether a run's config stands in the folder.

    Raises:
      UserError: the folder cannot be looked at.
    """
    try:
        return (folder / CONFIG).exists()
    except OSError as error:
        raise UserError(f"{folder}: cannot be used ({error.strerror}); name another --run-dir") from None


def write_lengths(folder: pathlib.Path, lengths: np.ndarray) -> None:
    """Keeps the token counts of a corpus that is read from disk, so that it is counted once.

    Raises:
      UserError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / LENGTHS, lengths)
    except OSError as error:
        raise UserError(
            f"{folder / LENGTHS}: cannot be written ({error.strerror}); choose another --run-dir"
        ) from None


def read_lengths(folder: pathlib.Path) -> np.ndarray | None:
    """What `write_lengths` kept, or None where there is nothing that can be read."""
    try:
        return np.load(folder / LENGTHS) if is_run(folder) else None
    except (OSError, ValueError, EOFError):
        return None


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """A run's config.

    Raises:
      UserError: not a run, or one of a newer format.
    """
    config = read_json(folder / CONFIG)
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder / CONFIG}: format version {version}, and this package reads {FORMAT_VERSION}: "
            "install the version that wrote it"
        )
    return config


def keep_changes(folder: pathlib.Path, stored: dict[str, Any], changed: dict[str, Any]) -> None:
    """Writes fields of the training config that a resumed run has now, where they differ.

    Raises:
      UserError: the folder cannot be written.
    """
    training = stored["training"] | changed
    if training != stored["training"]:
        write_json(folder / CONFIG, stored | {"training": training})


def draw_losses(folder: pathlib.Path, record: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The picture of a run's losses, from its metrics; returns the last line of them.

    Raises:
      UserError: the folder cannot be written.
    """
    from transformer_jax.plotting.curves import plot_losses  # matplotlib takes seconds to import

    try:
        plot_losses(record, folder / "loss.png")
    except OSError as error:
        raise UserError(f"{folder / 'loss.png'}: cannot be written ({error}); free some space") from None
    return record[-1] if record else {}


def make_model(
    config: Any, *, seed: int = 0, compute: ComputeOptions = ComputeOptions(), mesh: Mesh | None = None
) -> Any:
    """A freshly initialised model of its config, built in one compiled program, in its parts where there is a
    mesh."""
    module = module_of(config)

    def make(key: jax.Array) -> Any:
        return module(config, rngs=nnx.Rngs(key), compute=compute)

    key = jax.random.key(seed)
    shardings = None if mesh is None else model_shardings(jax.eval_shape(make, key), mesh)
    return jax.jit(make, out_shardings=shardings)(key)


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained translator.

    Attributes:
      model: the module with its trained parameters.
      tokenizer: text to ids and back.
      config: `config.json` as a dictionary.
      weights: which checkpoint the parameters are from.
    """

    model: Any
    tokenizer: BytePairTokenizer
    config: dict[str, Any]
    weights: str

    def translator(self, *, beam_size: int | None = None, alpha: float | None = None) -> Translator:
        """A `Translator` with the search of the run's config, or another."""
        training = self.config["training"]
        return Translator(
            self.model,
            self.tokenizer,
            beam_size=training["beam_size"] if beam_size is None else beam_size,
            alpha=training["length_penalty"] if alpha is None else alpha,
        )

    def translate(
        self, texts: Sequence[str], *, beam_size: int | None = None, alpha: float | None = None
    ) -> list[str]:
        """The translation of each text; an empty text stays empty.

        Args:
          texts: any number of sentences.
          beam_size, alpha: see `beam_search`; None takes the run's.

        Raises:
          UserError: a text longer than the model's limit.
        """
        return self.translator(beam_size=beam_size, alpha=alpha)(texts)

    def align(
        self,
        text: str,
        translation: str | None = None,
        *,
        beam_size: int | None = None,
        alpha: float | None = None,
    ) -> Alignment:
        """The translation of one text, the model's or a given one, with its cross-attention; see `Alignment`.

        Raises:
          UserError: an empty text, or one longer than the model's limit.
        """
        return self.translator(beam_size=beam_size, alpha=alpha).align(text, translation)


@dataclasses.dataclass(frozen=True)
class LanguageRun:
    """A trained language model.

    Attributes:
      model: the module with its trained parameters.
      tokenizer: text to ids and back.
      config: `config.json` as a dictionary.
      weights: which checkpoint the parameters are from.
    """

    model: Any
    tokenizer: TextTokenizer
    config: dict[str, Any]
    weights: str

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 100,
        samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
        **sampling: Any,
    ) -> list[list[Generated]]:
        """Continuations of each prompt, see `TextGenerator`.

        Args:
          prompts: any number of texts.
          max_new_tokens, samples, seed, stop: see `TextGenerator.__call__`.
          **sampling: see `Sampling`.

        Raises:
          UserError: a prompt that is empty or too long, or a value out of range.
        """
        generator = TextGenerator(self.model, self.tokenizer, sampling=Sampling(**sampling))
        return generator(prompts, max_new_tokens=max_new_tokens, samples=samples, seed=seed, stop=stop)


def trained_parameters(folder: pathlib.Path, target: Any, weights: str | None = None) -> tuple[Any, str]:
    """(the parameters of a run in the shape of `target`, which checkpoint they are from).

    Args:
      folder: of the run.
      target: a model, or its abstract shape.
      weights: see `load_run`.

    Raises:
      UserError: no such checkpoint, a damaged one, or one of another model.
    """
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        if weights is None:
            # Averaged at an earlier end, before the run was extended, it is no longer the run's result.
            newest = max(checkpoints.steps(), default=0)
            whole = [AVERAGED] if (checkpoints.step_of(AVERAGED) or -1) >= newest else []
            whole += [str(step) for step in reversed(checkpoints.steps()) if checkpoints.is_whole(step)]
            if not whole:
                raise UserError(f"{folder}: no complete checkpoint yet: train first")
            weights = whole[0]
        return checkpoints.restore_model(target, weights), weights


def load_run(
    folder: str | pathlib.Path,
    *,
    weights: str | None = None,
    compute: ComputeOptions = ComputeOptions(),
    mesh: Mesh | None = None,
) -> Run | LanguageRun:
    """Reads a run.

    Args:
      folder: the run's folder.
      weights: "averaged", or the step of a checkpoint; None takes the averaged parameters where the
        run is finished, else the newest checkpoint.
      compute: how the model is computed.
      mesh: that the parameters are spread over; None is the default device.

    Returns:
      A `Run`, which translates, or a `LanguageRun`, which continues texts.

    Raises:
      UserError: not a run, no such checkpoint, or a damaged one.
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    name = config["model"]
    # Runs from before recurrent models do not say their task; their models have one only.
    task = config.get("task", "language" if name in DECODERS else "translation")
    if name not in TASKS[task]:
        raise UserError(f"{folder / CONFIG}: unknown model {name!r}; known are {', '.join(TASKS[task])}")
    model_config = TASKS[task][name].config(**config["model_config"])
    target = jax.eval_shape(lambda: make_model(model_config, compute=compute))
    if mesh is not None:
        check_model(model_config, mesh)
        target = placed_shapes(target, model_shardings(target, mesh))
    model, weights = trained_parameters(folder, target, weights)
    if task == "language":
        return LanguageRun(model, TextTokenizer.load(folder / TOKENIZER), config, weights)
    return Run(model, BytePairTokenizer.load(folder / TOKENIZER), config, weights)


def load_translator(folder: str | pathlib.Path, **options: Any) -> Run:
    """`load_run` of a translator.

    Raises:
      UserError: see `load_run`; or a run of a language model.
    """
    run = load_run(folder, **options)
    if not isinstance(run, Run):
        raise UserError(
            f"{folder} holds a language model ({run.config['model']}): continue texts with generate"
        )
    return run


def load_language_run(folder: str | pathlib.Path, **options: Any) -> LanguageRun:
    """`load_run` of a language model.

    Raises:
      UserError: see `load_run`; or a run of a translator.
    """
    run = load_run(folder, **options)
    if not isinstance(run, LanguageRun):
        raise UserError(f"{folder} holds a translator ({run.config['model']}): translate with it")
    return run
