"""What a task is to the driver: an entry that works without data, and the task with its data opened."""

from __future__ import annotations

import base64
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import jax
import numpy as np

from transformer_jax.distributed.processes import broadcast_from_first
from transformer_jax.errors import UserError
from transformer_jax.training.config import RunConfig, choose
from transformer_jax.training.objective import Objective
from transformer_jax.training.totals import Totals

Batch = Mapping[str, np.ndarray]
Files = Mapping[str, bytes]


class Processor(Protocol):
    """What turns examples into arrays and back: a tokenizer, labels, image settings.

    Attributes:
      FILES: the names that `files` may give.
    """

    FILES: ClassVar[tuple[str, ...]]

    def files(self) -> dict[str, bytes]:
        """Its files by name, as a run folder keeps them."""
        ...

    @classmethod
    def from_files(cls, files: Files) -> Self:
        """The processor of what `files` gave."""
        ...


Kind = TypeVar("Kind", bound=Processor)


class Batches(Protocol):
    """Training batches; which examples make up step n is a function of the data, the seed and n alone."""

    def from_step(self, step: int) -> Iterator[Batch]:
        """The batches of step `step` (counted from 0) and all after it."""
        ...


class Task(Protocol):
    """A task with its data opened; it never holds parameters.

    Attributes:
      model_config: the model's config with the sizes that the data gave.
      processor: see `Processor`.
      files: what else the run folder keeps.
      fingerprint: of all that decides which examples there are.
      batches: for training, with the rows of this process.
      best: name of the value that says which evaluation is best, and whether less or more is better.
      unit: what the weight of the loss counts: tokens, rows, images.
      about: a line on the batches.
    """

    @property
    def model_config(self) -> Any: ...
    @property
    def processor(self) -> Any: ...
    @property
    def files(self) -> Files: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def best(self) -> tuple[str, Literal["min", "max"]]: ...
    @property
    def unit(self) -> str: ...
    @property
    def about(self) -> str: ...

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Scores while training: yields (name, value)."""
        ...

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """(what `results.json` says of the kept model, lines that a command prints)."""
        ...


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model from a run or a published folder; a task's subclass adds what it can do.

    Attributes:
      model: the module with its parameters.
      processor: see `Processor`.
      config: of the run, or None for published weights.
      weights: which parameters these are: "averaged", the step of a checkpoint, or "published".
    """

    model: Any
    processor: Any
    config: RunConfig | None = None
    weights: str = ""

    @property
    def tokenizer(self) -> Any:
        """The processor, under the name that it has for text."""
        return self.processor


class OpenedStart(Protocol):
    """A folder that a run starts from, see `training.starts`."""

    @property
    def processor(self) -> Any: ...


_REGISTERED: dict[type, TaskEntry] = {}


def register(entry: TaskEntry) -> TaskEntry:
    """Makes `entry_of` know a task by its config's type."""
    _REGISTERED[entry.config] = entry
    return entry


def entry_of(config: RunConfig) -> TaskEntry:
    """The registered entry of the task that a config is of.

    Raises:
      UserError: none.
    """
    if type(config.task) not in _REGISTERED:
        raise UserError(
            f"{type(config.task).__name__} is the config of no task: known are "
            f"{', '.join(entry.name for entry in _REGISTERED.values())}"
        )
    return _REGISTERED[type(config.task)]


class TaskEntry(NamedTuple):
    """What a task's file registers; all of it works without data.

    Attributes:
      name: as config.json and commands know it.
      config: the task's dataclass.
      kind: of the models that it trains, a key of `models.registry.MODELS`.
      recipes: by name, functions that give complete configs; their keywords are what other values
        follow from. A recipe's attribute `published`, if it has one, is a score of the literature.
      processor: its type.
      abstract_batch: from a config to {name: `jax.ShapeDtypeStruct`} of a full batch.
      objective: from a config and a model's config to the objective; checks across fields raise here.
      prepare: opens the data: (config, objective, mesh, stored, starts, note) -> task. `stored` are the files
        of the run that exists in the folder, or None.
      trained: makes a `Trained` with methods for what the task is for, from its fields.
      check_mesh: checks, without data, that batches can be sharded over a mesh (an `AbstractMesh` in a plan),
        or raises `UserError`; None checks nothing.
      files: names of the other files that a task of it may keep in a run folder.
      decodes: whether its models write texts, token by token, so that a plan compiles that too.
      models: of the kind, in place of the registry's; for models that are not in it.
    """

    name: str
    config: type
    kind: str
    recipes: Mapping[str, Callable[..., RunConfig]]
    processor: Any
    abstract_batch: Callable[[RunConfig], Mapping[str, jax.ShapeDtypeStruct]]
    objective: Callable[[RunConfig, Any], Objective]
    prepare: Callable[..., Task]
    trained: Callable[..., Trained]
    check_mesh: Callable[[RunConfig, Any], None] | None = None
    files: tuple[str, ...] = ()
    decodes: bool = False
    models: Mapping[str, Any] | None = None

    def configure(self, recipe: str, **values: Any) -> RunConfig:
        """The config of a recipe with some values changed.

        Args:
          recipe: its name.
          values: keywords of the recipe's function, from which other values follow, or any field of the config.

        Raises:
          UserError: an unknown recipe or name, or a value that cannot be.
        """
        choose("recipe", recipe, tuple(self.recipes))
        function = self.recipes[recipe]
        own = {name: values[name] for name in recipe_keywords(function) if name in values}
        try:
            config = function(**own)
        except ValueError as error:
            raise UserError(str(error)) from None
        # A keyword that is a field as well (`train`, `corpus`) has its value there.
        fields = config.names()
        return config.with_values(**{n: v for n, v in values.items() if n not in own or n in fields})


def recipe_keywords(recipe: Callable[..., RunConfig]) -> dict[str, inspect.Parameter]:
    """The keywords of a recipe's function."""
    return dict(inspect.signature(recipe, eval_str=True).parameters)


def shared_processor(kind: type[Kind], make: Callable[[], Kind]) -> Kind:
    """The processor that `make` gives in the first process, in every process.

    Raises:
      UserError: raised by `make`.
    """
    if jax.process_count() == 1:
        return make()

    def encoded() -> dict[str, str]:
        return {name: base64.b64encode(content).decode() for name, content in make().files().items()}

    files = broadcast_from_first(encoded)
    return kind.from_files({name: base64.b64decode(text) for name, text in files.items()})


def processor_of(starts: Sequence[OpenedStart], number: int = 0) -> Any:
    """The processor that a start folder brings, or None without a start."""
    return starts[number].processor if starts else None
