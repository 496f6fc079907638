"""Command lines of runs: flags become a complete `RunConfig`, and `--help` shows the recipe's values."""

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
from transformer_jax.training.config import RENAMED, RunConfig, Start, choose, field_names
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
    """A parsed command line.

    Attributes:
      config: The run's config.
      execution: How the run is computed.
      flags: The command's own flags.
      named: Field names of the flags on the command line.
    """

    config: RunConfig
    execution: Execution
    flags: Any
    named: frozenset[str]

    def check_no_training(self, *, used: Sequence[str] = ()) -> None:
        """Check that a command that uses a trained run has no flag that only affects training.

        Args:
          used: Fields that the command uses.

        Raises:
          UserError: A flag would have no effect.
        """
        config, execution = self.config, self.execution
        parts = (config.task, config.model, config.optimization, execution, execution.compute)
        fields = {name for part in parts for name in field_names(part)}
        ineffective = self.named & (fields | {"start", "trainable", "seed", "preset", "recipe"}) - {*used}
        if ineffective:
            raise UserError(f"`{min(ineffective)}` has no effect on a trained run; remove it")

    def for_model(self, entry: TaskEntry, model: str, **changes: Any) -> RunConfig:
        """Build the config for another model, dropping flags that it does not have.

        Args:
          entry: The task's entry.
          model: Name of the model.
          **changes: See `TaskEntry.configure`.

        Raises:
          UserError: A value is invalid.
        """
        config = self.config
        parts = (config.task, config.model, config.optimization, config)
        values = {
            n: getattr(part, n) for part in parts for n in field_names(part) & self.named & config.names()
        }
        missing = field_names(config.model) - field_names(models_of(entry)[model].config)
        values = {name: value for name, value in values.items() if name not in missing | {"recipe"}}
        return entry.configure(config.recipe, **values | changes | {"model": model})


class _Keywords(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _keyword_values(entry: TaskEntry, argv: Sequence[str]) -> dict[str, Any]:
    """Return the recipe and the keywords of recipes that the command line sets."""
    parser = _Keywords(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    types: dict[str, Any] = {"recipe": str}
    for recipe in entry.recipes.values():
        types |= {name: parameter.annotation for name, parameter in recipe_keywords(recipe).items()}
    for name, value_type in types.items():
        flags = dict.fromkeys((_flag(name), "--" + name, *_ALIASES.get(name, ())))
        if value_type is bool:
            parser.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction)
        elif typing.get_origin(value_type) is tuple:
            parser.add_argument(*flags, dest=name, nargs="*")
        else:
            number = next((number for number in (int, float) if value_type in (number, number | None)), str)
            parser.add_argument(*flags, dest=name, type=number)
    values = vars(parser.parse_known_args(list(argv))[0])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def flag_value(argv: Sequence[str], *flags: str) -> str | None:
    """Return the last value of a flag, given all its spellings, or None; used before the parser exists."""
    last = None
    for number, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name in flags and equals:
            last = value
        elif name in flags and number + 1 < len(argv):
            last = argv[number + 1]
    return last


def _config_without_starts(
    entry: TaskEntry, keywords: Mapping[str, Any], run_dir: str | None
) -> RunConfig | None:
    """Return the config of the run in `run_dir` if a start folder that the recipe would read no longer exists.

    A run that has a checkpoint never opens its starts again.
    """
    starts = Start.parse_all(keywords.get("start", ()))
    missing = any(not pathlib.Path(start.folder).exists() for start in starts)
    if not missing or "preset" in keywords or run_dir is None or not is_run(run_dir):
        return None
    if read_config(run_dir)["task"] != entry.name:
        return None
    stored = read_run(run_dir, {entry.name: entry})
    same = stored.run.start == starts and keywords.get("model", stored.model) == stored.model
    return stored.run if same else None


def flattened(config_type: type) -> Any:
    """Return a subclass of a dataclass in which the flags of nested dataclasses have no prefix."""
    hints = typing.get_type_hints(config_type)
    nested = [
        (field.name, Annotated[hints[field.name], _FLAT], dataclasses.field(default_factory=hints[field.name]))
        for field in dataclasses.fields(config_type)
        if dataclasses.is_dataclass(hints[field.name])
    ]
    return dataclasses.make_dataclass(config_type.__name__, nested, bases=(config_type,), frozen=True)


def parse_run(
    entry: TaskEntry,
    argv: Sequence[str],
    flag_type: type,
    *,
    prog: str,
    description: str,
    default_recipe: Callable[[Mapping[str, Any]], str] | None = None,
) -> Parsed:
    """Parse a run's config, its execution and the command's own flags.

    Args:
      entry: The task's entry.
      argv: The arguments.
      flag_type: Dataclass of the command's own flags, all with defaults.
      prog: Name of the command in the help.
      description: Description in the help.
      default_recipe: Function from the recipe keywords on the command line to the recipe; None means the task's
        first.

    Raises:
      UserError: A flag is unknown or belongs to another model, or a value is invalid.
    """
    keywords = _keyword_values(entry, argv)
    recipe = keywords.pop("recipe", None)
    base = _config_without_starts(entry, keywords, flag_value(argv, "--run-dir", "--run_dir"))
    if base is not None:
        recipe = recipe or base.recipe
    elif recipe is None:
        recipe = next(iter(entry.recipes)) if default_recipe is None else default_recipe(keywords)
    choose("recipe", recipe, tuple(entry.recipes))
    accepted = recipe_keywords(entry.recipes[recipe])
    try:
        if base is None:
            base = entry.recipes[recipe](**{n: value for n, value in keywords.items() if n in accepted})
    except ValueError as error:
        raise UserError(str(error)) from None
    model = name_of(models_of(entry), base.model)
    arguments = _arguments(entry, base, model, flag_type)
    try:
        values, unknown = tyro.cli(
            type(arguments), prog=prog, description=description, args=list(argv), default=arguments,
            return_unknown_args=True, config=(tyro.conf.AvoidSubcommands,), registry=REGISTRY,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(str(error)) from None
    if unknown:
        raise UserError(_unknown(unknown[0], entry, model, arguments))
    config = RunConfig(
        task=values.task,
        model=values.model_config,
        optimization=values.optimization,
        start=values.start,
        trainable=values.trainable,
        seed=values.seed,
        recipe=recipe,
        preset=base.preset,
    )
    return Parsed(config, values.execution, values.flags, _named(argv))


def _named(argv: Sequence[str]) -> frozenset[str]:
    """Return the fields of flags: `start` for --start-from, `tie` for --tie=all, `flip` for --no-flip."""
    flags = (flag.removeprefix("--").split("=")[0].replace("_", "-") for flag in argv if flag.startswith("--"))
    fields = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
    return frozenset({"start" if field == "start_from" else field for field in fields})


def default_arguments(entry: TaskEntry, flag_type: type) -> Any:
    """Return the flags of a task's command with the values of its first recipe."""
    base = next(iter(entry.recipes.values()))()
    return _arguments(entry, base, name_of(models_of(entry), base.model), flag_type)


def _arguments(entry: TaskEntry, base: RunConfig, model: str, flag_type: type) -> Any:
    """Return the dataclass instance that tyro reads flags into, with the recipe's values as defaults."""
    recipes, models = ", ".join(entry.recipes), ", ".join(models_of(entry))
    presets = ", ".join(type(base.model).presets)

    def text(value: Any, name: str, about: str, value_type: Any = str, **options: Any) -> tuple[str, Any, Any]:
        annotation = Annotated[value_type, tyro.conf.arg(help=about, **options)]
        return (name, annotation, dataclasses.field(default=value))

    def flat(value: Any, name: str, value_type: Any = None) -> tuple[str, Any, Any]:
        return (name, Annotated[value_type or type(value), _FLAT], dataclasses.field(default=value))

    execution = flattened(Execution)
    arguments_type = dataclasses.make_dataclass(
        "Arguments",
        [
            flat(flag_type(), "flags"),
            text(base.recipe, "recipe", f"Source of the default values: {recipes}."),
            text(model, "model", f"Model to train: {models}."),
            text(base.preset, "preset", f"Size of the model, whose fields are also flags: {presets}."),
            flat(base.task, "task"),
            flat(base.model, "model_config"),
            flat(base.optimization, "optimization"),
            text(
                base.start,
                "start",
                "Folders of runs or of published weights to start from, with a new optimizer and schedule: "
                "FOLDER or FOLDER,part=encoder,into=encoder,leave_out=head/.*; the first has the vocabulary.",
                tuple[Start, ...],
                aliases=_ALIASES["start"][:1],
            ),
            text(
                base.trainable,
                "trainable",
                "Regular expression of the names of parameters to train; the rest are frozen.",
            ),
            text(base.seed, "seed", "Seed of the parameters, the order of the data and dropout.", int),
            flat(execution(), "execution", execution),
        ],
        frozen=True,
    )
    return arguments_type()


def _unknown(argument: str, entry: TaskEntry, model: str, arguments: Any) -> str:
    """Return the error message for an argument that is not a flag of the command."""
    flag = argument.split("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    known = {"recipe", "model", "preset", "start", "trainable", "seed"}
    for part in (arguments.task, arguments.model_config, arguments.optimization, arguments.flags):
        known |= field_names(part)
    negation = "no_" if name.startswith("no_") else ""
    if RENAMED.get(name.removeprefix("no_")) in known:
        return f"{flag} is now called {_flag(negation + RENAMED[name.removeprefix('no_')])}"
    models = models_of(entry) or MODELS[entry.kind]
    owners = [owner for owner, registered in models.items() if name in field_names(registered.config)]
    if owners and flag.startswith("--"):
        return f"{flag} is a flag of {', '.join(owners)}, not of {model}"
    matches = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {_flag(matches[0])}?" if matches else "; --help lists the flags"
    return f"unknown argument {argument}{hint}"
