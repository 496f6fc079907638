"""The driver's interface to tasks: an entry that works without data, and the task with opened data."""

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
    """Conversion between examples and arrays: a tokenizer, labels, image settings.

    Attributes:
      FILES: The names of files that `files` may return.
    """

    FILES: ClassVar[tuple[str, ...]]

    def files(self) -> dict[str, bytes]:
        """Return the processor's files by name, as they are stored in a run folder."""
        ...

    @classmethod
    def from_files(cls, files: Files) -> Self:
        """Create the processor from the result of `files`."""
        ...


AnyProcessor = TypeVar("AnyProcessor", bound=Processor)


class Batches(Protocol):
    """Training batches; the examples of step n are a function of the data, the seed and n."""

    def from_step(self, step: int) -> Iterator[Batch]:
        """Yield the batches from step `step` on, counted from 0."""
        ...


class Task(Protocol):
    """A task with its data opened; it holds no parameters."""

    @property
    def model_config(self) -> Any:
        """The model's config, with the sizes of the data."""

    @property
    def processor(self) -> Any:
        """The processor, see `Processor`."""

    @property
    def files(self) -> Files:
        """Further files to store in the run folder, by name."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that determines the examples."""

    @property
    def batches(self) -> Batches:
        """Training batches with the rows of this process."""

    @property
    def best(self) -> tuple[str, Literal["min", "max"]]:
        """Name of the value that decides which evaluation is best, and its direction."""

    @property
    def unit(self) -> str:
        """Unit of the loss's weight: tokens, rows, images."""

    @property
    def about(self) -> str:
        """A line about the batches."""

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Score the model during training and yield (name, value)."""
        ...

    def score(self, final_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Return (the scores of the final model for `results.json`, lines for a command to print)."""
        ...


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model from a run or a published folder; the subclass of a task adds methods.

    Attributes:
      model: The module with its parameters.
      processor: See `Processor`.
      config: The run's config, or None for published weights.
      weights: Source of the parameters: "averaged", the step of a checkpoint, or "published".
    """

    model: Any
    processor: Any
    config: RunConfig | None = None
    weights: str = ""

    @property
    def tokenizer(self) -> Any:
        """The processor of a text model."""
        return self.processor


class OpenedStart(Protocol):
    """A start folder with its contents, see `training.starts`."""

    @property
    def processor(self) -> Any:
        """The folder's processor."""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that is read from the folder."""


_REGISTERED: dict[type, TaskEntry] = {}


def register(entry: TaskEntry) -> TaskEntry:
    """Register a task by the type of its config, for `entry_of`."""
    _REGISTERED[entry.config] = entry
    return entry


def entry_of(config: RunConfig) -> TaskEntry:
    """Return the registered entry of a config's task.

    Raises:
      UserError: No task with this config is registered.
    """
    if type(config.task) not in _REGISTERED:
        raise UserError(
            f"{type(config.task).__name__} is not the config of a registered task: known are "
            f"{', '.join(entry.name for entry in _REGISTERED.values())}"
        )
    return _REGISTERED[type(config.task)]


class TaskEntry(NamedTuple):
    """Everything that a task registers; it works without data.

    Attributes:
      name: Name of the task in config.json and commands.
      config: The task's dataclass.
      kind: Kind of the models that the task trains, a key of `models.registry.MODELS`.
      recipes: Functions by name that return complete configs; other values follow from their keywords. A
        recipe's attribute `published`, if present, is a score of the literature.
      processor: Type of the processor.
      abstract_batch: Function from a config to the {name: `jax.ShapeDtypeStruct`} of a full batch.
      objective: Function from a config and a model config to the objective; it checks fields against each
        other.
      prepare: Function (config, objective, mesh, stored, starts, note) -> task that opens the data; `stored`
        holds the files of an existing run, or None.
      trained: Subclass of `Trained` with the task's methods.
      check_mesh: Function that checks without data that batches can be sharded over a mesh (in a plan an
        `AbstractMesh`) and raises `UserError`; None checks nothing.
      files: Names of further files that the task may store in a run folder.
      decodes: True if its models generate text token by token, which plans then compile as well.
      models: Models that replace those of the registry, for models that are not registered.
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
        """Return the config of a recipe with some values changed.

        Args:
          recipe: Name of the recipe.
          **values: Keywords of the recipe's function, from which other values follow, or fields of the config.

        Raises:
          UserError: The recipe or a name is unknown, or a value is invalid.
        """
        choose("recipe", recipe, tuple(self.recipes))
        function = self.recipes[recipe]
        keywords = {name: values[name] for name in recipe_keywords(function) if name in values}
        try:
            config = function(**keywords)
        except ValueError as error:
            raise UserError(str(error)) from None
        # A keyword that is also a field (`train`, `corpus`) sets the field as well.
        fields = config.names()
        return config.with_values(**{n: v for n, v in values.items() if n not in keywords or n in fields})


def recipe_keywords(recipe: Callable[..., RunConfig]) -> dict[str, inspect.Parameter]:
    """Return the keywords of a recipe's function."""
    return dict(inspect.signature(recipe, eval_str=True).parameters)


def shared_processor(
    processor_type: type[AnyProcessor], make: Callable[[], AnyProcessor], stored: Files | None
) -> AnyProcessor:
    """Read or create a processor in the first process and return it in every process.

    Args:
      processor_type: Type of the processor.
      make: Function that creates it.
      stored: Files of an existing run to read it from, or None to create it.

    Raises:
      UserError: `make` raised it.
    """

    def read_or_make() -> AnyProcessor:
        return make() if stored is None else processor_type.from_files(stored)

    if jax.process_count() == 1:
        return read_or_make()

    def encoded() -> dict[str, str]:
        return {name: base64.b64encode(data).decode() for name, data in read_or_make().files().items()}

    files = broadcast_from_first(encoded)
    return processor_type.from_files({name: base64.b64decode(text) for name, text in files.items()})


def processor_of(starts: Sequence[OpenedStart], number: int = 0) -> Any:
    """Return the processor of a start folder, or None without a start."""
    return starts[number].processor if starts else None
