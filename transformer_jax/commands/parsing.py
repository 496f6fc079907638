"""Command lines of runs: flags become a complete `RunConfig`, and `--help` shows the values of the recipe."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import pathlib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from transformer_jax.errors import UserError
from transformer_jax.layers.positions.configs import Positions, parse_positions
from transformer_jax.models.registry import MODELS, name_of
from transformer_jax.training.config import RunConfig, Start, choose, field_names
from transformer_jax.training.execution import Execution
from transformer_jax.training.run_folder import is_run, models_of, read_config, read_run
from transformer_jax.training.task import TaskEntry, recipe_keywords

REGISTRY = ConstructorRegistry()
_FLAT = tyro.conf.arg(name="")
_ALIASES = {"start": ("--start-from", "--start_from")}


@REGISTRY.primitive_rule
def _positions(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if not (isinstance(info.type, type) and issubclass(info.type, Positions)):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="POSITIONS",
        instance_from_str=lambda texts: parse_positions(texts[0]),
        is_instance=lambda value: isinstance(value, Positions),
        str_from_instance=lambda value: [str(value)],
    )


@REGISTRY.primitive_rule
def _start(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if info.type is not Start:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FOLDER",
        instance_from_str=lambda texts: Start.parse(texts[0]),
        is_instance=lambda value: isinstance(value, Start),
        str_from_instance=lambda value: [str(value)],
    )


class Parsed(NamedTuple):
    """What a command line says.

    Attributes:
      config: of the run.
      execution: how it is computed.
      own: the command's own flags.
      named: which flags were given, by field name.
    """

    config: RunConfig
    execution: Execution
    own: Any
    named: frozenset[str]

    def check_no_training(self, *, read: Sequence[str] = ()) -> None:
        """Checks that a trained run, which answers, is given no flag of training or of how that is computed.

        Args:
          read: fields that the answers read.

        Raises:
          UserError: the first flag that would be without effect.
        """
        config, execution = self.config, self.execution
        parts = (config.task, config.model, config.optimization, execution, execution.compute)
        fields = {name for part in parts for name in field_names(part)}
        idle = self.named & (fields | {"start", "trainable", "seed", "preset", "recipe"}) - {*read}
        if idle:
            raise UserError(
                f"`{min(idle)}` is for training: a trained run reads as it was trained; leave it out"
            )

    def for_model(self, entry: TaskEntry, model: str, **changes: Any) -> RunConfig:
        """The config of the same flags for another model, without the flags that are not of that model.

        Args:
          entry: of the task.
          model: its name.
          changes: see `TaskEntry.configure`.

        Raises:
          UserError: a value that cannot be.
        """
        config = self.config
        parts = (config.task, config.model, config.optimization, config)
        given = {n: getattr(part, n) for part in parts for n in field_names(part) & self.named & config.names()}
        others = field_names(config.model) - field_names(models_of(entry)[model].config)
        given = {name: value for name, value in given.items() if name not in others | {"recipe"}}
        return entry.configure(config.recipe, **given | changes | {"model": model})


class _Keywords(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _keyword_values(entry: TaskEntry, argv: Sequence[str]) -> dict[str, Any]:
    """The recipe and its functions' keywords, as far as they are given."""
    parser = _Keywords(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    kinds: dict[str, Any] = {"recipe": str}
    for recipe in entry.recipes.values():
        kinds |= {name: parameter.annotation for name, parameter in recipe_keywords(recipe).items()}
    for name, kind in kinds.items():
        flags = dict.fromkeys((_flag(name), "--" + name, *_ALIASES.get(name, ())))
        if typing.get_origin(kind) is tuple:
            parser.add_argument(*flags, dest=name, nargs="*")
        else:
            parser.add_argument(*flags, dest=name, type=kind if kind in (int, float) else str)
    found = vars(parser.parse_known_args(list(argv))[0])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def flag_value(argv: Sequence[str], *flags: str) -> str | None:
    """The last value of a flag that decides which others there are, or None if it is not among the
    arguments; `flags` are its spellings."""
    found = None
    for number, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in flags and equals:
            found = value
        elif name in flags and number + 1 < len(argv):
            found = argv[number + 1]
    return found


def _begun(entry: TaskEntry, keywords: Mapping[str, Any], run_dir: str | None) -> RunConfig | None:
    """The config of the run in `run_dir` if a folder that it started from, and the recipe would read, is gone.

    A run that has a checkpoint never opens its starts again.
    """
    starts = Start.every(keywords.get("start", ()))
    gone = any(not pathlib.Path(start.folder).exists() for start in starts)
    if not gone or "preset" in keywords or run_dir is None or not is_run(run_dir):
        return None
    if read_config(run_dir)["task"] != entry.name:
        return None
    stored = read_run(run_dir, {entry.name: entry})
    same = stored.run.start == starts and keywords.get("model", stored.model) == stored.model
    return stored.run if same else None


def flattened(kind: type) -> Any:
    """A dataclass whose fields that are dataclasses have flags without a prefix."""
    hints = typing.get_type_hints(kind)
    nested = [
        (field.name, Annotated[hints[field.name], _FLAT], dataclasses.field(default_factory=hints[field.name]))
        for field in dataclasses.fields(kind)
        if dataclasses.is_dataclass(hints[field.name])
    ]
    return dataclasses.make_dataclass(kind.__name__, nested, bases=(kind,), frozen=True)


def parse_run(
    entry: TaskEntry,
    argv: Sequence[str],
    own: type,
    *,
    prog: str,
    description: str,
    default_recipe: Callable[[Mapping[str, Any]], str] | None = None,
) -> Parsed:
    """A run's config, its execution and a command's own flags.

    Args:
      entry: of the task.
      argv: the arguments.
      own: dataclass of the command's own flags, all with defaults.
      prog, description: of the help.
      default_recipe: from the recipe keywords that are given to the recipe; None takes the task's first.

    Raises:
      UserError: an unknown flag, a flag of another model, or a value that cannot be.
    """
    keywords = _keyword_values(entry, argv)
    recipe = keywords.pop("recipe", None)
    base = _begun(entry, keywords, flag_value(argv, "--run-dir", "--run_dir"))
    if base is not None:
        recipe = recipe or base.recipe
    elif recipe is None:
        recipe = next(iter(entry.recipes)) if default_recipe is None else default_recipe(keywords)
    choose("recipe", recipe, tuple(entry.recipes))
    taken = recipe_keywords(entry.recipes[recipe])
    try:
        if base is None:
            base = entry.recipes[recipe](**{name: value for name, value in keywords.items() if name in taken})
    except ValueError as error:
        raise UserError(str(error)) from None
    model = name_of(models_of(entry), base.model)
    arguments = _arguments(entry, base, model, own)
    try:
        found, unknown = tyro.cli(
            type(arguments), prog=prog, description=description, args=list(argv), default=arguments,
            return_unknown_args=True, config=(tyro.conf.AvoidSubcommands,), registry=REGISTRY,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None
    if unknown:
        raise UserError(_unknown(unknown[0], entry, model, arguments))
    config = RunConfig(
        task=found.task,
        model=found.model_config,
        optimization=found.optimization,
        start=found.start,
        trainable=found.trainable,
        seed=found.seed,
        recipe=recipe,
        preset=base.preset,
    )
    return Parsed(config, found.execution, found.own, _named(argv))


def _named(argv: Sequence[str]) -> frozenset[str]:
    """The fields that flags name: `start` of --start-from, `tie` of --tie=all, `remat` of --no-remat."""
    flags = (flag.removeprefix("--").split("=")[0].replace("_", "-") for flag in argv if flag.startswith("--"))
    fields = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
    return frozenset({"start" if field == "start_from" else field for field in fields})


def default_arguments(entry: TaskEntry, own: type) -> Any:
    """The flags of a task's command with the values of its first recipe."""
    base = next(iter(entry.recipes.values()))()
    return _arguments(entry, base, name_of(models_of(entry), base.model), own)


def _arguments(entry: TaskEntry, base: RunConfig, model: str, own: type) -> Any:
    """The dataclass instance that tyro reads flags into, with the recipe's values as defaults."""
    recipes, models = ", ".join(entry.recipes), ", ".join(models_of(entry))
    presets = ", ".join(type(base.model).presets)

    def text(value: Any, name: str, about: str, kind: Any = str, **options: Any) -> tuple[str, Any, Any]:
        return (name, Annotated[kind, tyro.conf.arg(help=about, **options)], dataclasses.field(default=value))

    def flat(value: Any, name: str, kind: Any = None) -> tuple[str, Any, Any]:
        return (name, Annotated[kind or type(value), _FLAT], dataclasses.field(default=value))

    execution = flattened(Execution)
    kind = dataclasses.make_dataclass(
        "Arguments",
        [
            flat(own(), "own"),
            text(base.recipe, "recipe", f"What the other values begin as: {recipes}."),
            text(model, "model", f"Model of the zoo: {models}."),
            text(base.preset, "preset", f"Size of the model, whose fields are flags too: {presets}."),
            flat(base.task, "task"),
            flat(base.model, "model_config"),
            flat(base.optimization, "optimization"),
            text(
                base.start,
                "start",
                "Folders of runs or of published weights to start from, with a new optimizer and schedule: "
                "FOLDER or FOLDER,part=encoder,into=encoder,leave_out=head/.*; the first gives the vocabulary.",
                tuple[Start, ...],
                aliases=_ALIASES["start"][:1],
            ),
            text(
                base.trainable,
                "trainable",
                "Regular expression of the names of parameters that are trained; the others stay as they are.",
            ),
            text(base.seed, "seed", "Of the parameters, the order of the data and dropout.", int),
            flat(execution(), "execution", execution),
        ],
        frozen=True,
    )
    return kind()


def _unknown(argument: str, entry: TaskEntry, model: str, arguments: Any) -> str:
    """What is said of an argument that is no flag here."""
    flag = argument.split("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    models = models_of(entry) or MODELS[entry.kind]
    others = [other for other, found in models.items() if name in field_names(found.config)]
    if others and flag.startswith("--"):
        return f"{flag} is a flag of {', '.join(others)}, not of {model}"
    known = ["recipe", "model", "preset", "start", "trainable", "seed"]
    for part in (arguments.task, arguments.model_config, arguments.optimization, arguments.own):
        known += field_names(part)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {_flag(near[0])}?" if near else "; --help lists the flags"
    return f"unknown argument {argument}{hint}"
