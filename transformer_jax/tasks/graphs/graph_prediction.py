"""Prediction of a class or a number for each graph, such as a property of a molecule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.batches.graph_batches import GraphRows, padded_size
from transformer_jax.data.batches.row_batches import RowBatches
from transformer_jax.data.corpora.graphs import GraphSet
from transformer_jax.data.corpora.tables import fingerprint
from transformer_jax.data.corpora.targets import positive_label
from transformer_jax.data.tokenizers.graph_processor import GraphProcessor
from transformer_jax.distributed.mesh import place_batch, replicated, rows_here
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.classification import class_scores, error_scores, probability_scores
from transformer_jax.layers.losses import cross_entropy
from transformer_jax.tasks.graphs.data import GraphPredictionConfig, open_splits
from transformer_jax.tasks.graphs.trained import TrainedGraphModel, inputs_of
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.training.config import RunConfig, check_accumulation
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization, fine_tuned_start, preset_config
from transformer_jax.training.task import Files, TaskEntry, processor_of, shared_processor
from transformer_jax.training.totals import Totals

KIND = "graph_predictor"
# Number of nodes of a row in a plan without data.
_PLANNED_NODES = 32


def _config_of(
    task: GraphPredictionConfig,
    model: str,
    preset: str,
    steps: int,
    recipe: str,
    *,
    model_fields: Mapping[str, Any] = {},
    **optimization: Any,
) -> RunConfig:
    return RunConfig(
        task=task,
        model=preset_config(KIND, model, preset, **model_fields),
        optimization=cosine_optimization(steps, **optimization),
        recipe=recipe,
        preset=preset,
    )


def drawn(*, model: str = "graphormer", preset: str = "mini", steps: int = 1_500) -> RunConfig:
    """Learn the number of triangles or the diameter of random graphs, three minutes on two CPU cores.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
    """
    # With initial biases of 0.02, 600 steps do not learn to count triangles (docs/measurements/graphs.md).
    model_fields = dict(distance_std=1.5)
    task = GraphPredictionConfig()
    return _config_of(task, model, preset, steps, "drawn", model_fields=model_fields)


def graphs(*, model: str = "graphormer", preset: str = "mini", steps: int = 5_000) -> RunConfig:
    """Train on your own graphs or molecules.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
    """
    return _config_of(GraphPredictionConfig(), model, preset, steps, "graphs", keep="best")


def fine_tune(*, start: tuple[str, ...] = (), steps: int = 1_000) -> RunConfig:
    """Continue to train a model on other graphs with the same features.

    Args:
      start: Folder of the run.
      steps: Number of training steps.

    Raises:
      UserError: `start` is empty or holds another model.
    """
    starts, _, model = fine_tuned_start(start, KIND)
    optimization = cosine_optimization(steps, learning_rate=2e-4, keep="best")
    return RunConfig(
        task=GraphPredictionConfig(), model=model, optimization=optimization, recipe="fine_tune", start=starts
    )


class PredictionLoss(Objective):
    """Cross-entropy of classes, or the squared or absolute error of normalized numbers.

    Args:
      loss: "squared" or "absolute".
    """

    def __init__(self, loss: str):
        self._loss = loss

    def row_losses(self, predictions: jax.Array, target: jax.Array) -> jax.Array:
        """Return the loss (B,) of each graph; the type of the target (B,) tells classes from numbers."""
        if jnp.issubdtype(target.dtype, jnp.integer):
            return cross_entropy(predictions, target)
        error = predictions[:, 0] - target
        return jnp.square(error) if self._loss == "squared" else jnp.abs(error)

    def loss(self, model, extra, batch, key):
        """Return the sum of the losses and the number of graphs."""
        predictions = model(**inputs_of(batch), dropout_key=key)
        losses = self.row_losses(predictions, batch["target"])
        return {"loss": (losses * batch["weight"]).sum()}, {"loss": batch["weight"].sum()}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    check_accumulation(config.task.batch_size, config.optimization)
    return PredictionLoss(config.task.loss)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    task, model = config.task, config.model
    B, N = task.batch_size, padded_size(task.max_nodes or _PLANNED_NODES)
    node_features, edge_features = len(model.node_values or (1,)), len(model.edge_values or (1,))
    shapes = {
        "nodes": ((B, N, node_features), jnp.int32),
        "degrees": ((B, N), jnp.int32),
        "distances": ((B, N, N), jnp.int16),
        "paths": ((B, N, N, model.edge_hops, edge_features), jnp.int16),
        "is_node": ((B, N), jnp.bool_),
        "target": ((B,), jnp.int32 if model.classes > 1 else jnp.float32),
        "weight": ((B,), jnp.float32),
    }
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}


class GraphPrediction:
    """A task on graphs, a `training.task.Task`."""

    best: tuple[str, Literal["min", "max"]] = ("valid_loss", "min")
    unit = "graphs"

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[GraphSet],
        processor: GraphProcessor,
        loss: PredictionLoss,
        mesh: Mesh | None,
    ):
        task: GraphPredictionConfig = config.task
        self._settings, self._mesh, self.processor = task, mesh, processor
        settings = processor.settings
        sizes = {
            "node_values": settings.node_values,
            "edge_values": settings.edge_values,
            "classes": len(settings.labels),
        }
        self._check_sizes(config, sizes)
        self.model_config = dataclasses.replace(config.model, **sizes)
        self.files: Files = {}
        self.fingerprint = fingerprint([split.fingerprint() for split in splits])
        nodes = padded_size(task.max_nodes or max(len(graph) for split in splits for graph in split.graphs))
        train = splits[0]
        self._train, self._valid, self._test = (self._rows(split, nodes) for split in splits)
        batches = RowBatches(range(len(self._train)), task.batch_size, config.seed, views=self._train)
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        epochs = config.optimization.steps / batches.batches_per_epoch
        padding = 1 - sum(map(len, train.graphs)) / (nodes * len(train))
        self.about = (
            f"{task.batch_size} graphs per batch, padded to {nodes} nodes ({100 * padding:.0f} % padding), "
            f"{epochs:.1f} epochs"
        )

        @jax.jit
        def evaluate(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            predictions = model(**inputs_of(batch))
            return replicated((predictions, loss.row_losses(predictions, batch["target"])))

        self._evaluate = evaluate

    def _check_sizes(self, config: RunConfig, sizes: dict[str, Any]) -> None:
        for name in ("node_values", "edge_values"):
            stored = getattr(config.model, name)
            if stored and tuple(stored) != tuple(sizes[name]):
                raise UserError(
                    f"`{name}` of the model are {', '.join(map(str, stored))}, but those of the data are "
                    f"{', '.join(map(str, sizes[name]))}"
                )
        classes = config.model.classes
        if classes and classes != sizes["classes"] and not config.start:
            raise UserError(f"`classes` is {classes}, but the data needs {sizes['classes']}; remove `classes`")
        if sizes["classes"] > 1 and self._settings.loss != "squared":
            raise UserError(
                f"`loss` {self._settings.loss} applies only to scores, but the data has labels; remove it"
            )

    def _rows(self, split: GraphSet, nodes: int) -> GraphRows:
        """Convert a split to arrays.

        Raises:
          UserError: A feature or a target does not fit the training data.
        """
        for row, graph in enumerate(split.graphs):
            self.processor.check(graph, split.table.location(row))
        arrays = [self.processor.arrays(graph, self.model_config.edge_hops) for graph in split.graphs]
        return GraphRows(arrays, self.processor.targets(split), nodes)

    def _predictions(self, model: Any, rows: GraphRows) -> tuple[np.ndarray, np.ndarray, float]:
        """Return predictions (n, C), targets (n,) and the mean loss of a split."""
        outputs, targets, losses = [], [], []
        for batch in rows.batches(self._settings.batch_size):
            predictions, row_losses = self._evaluate(model, place_batch(batch, self._mesh))
            real = batch["weight"] > 0
            outputs.append(np.asarray(predictions)[real])
            targets.append(batch["target"][real])
            losses.append(np.asarray(row_losses)[real])
        return np.concatenate(outputs), np.concatenate(targets), float(np.concatenate(losses).mean())

    def _scores(self, model: Any, rows: GraphRows) -> Iterator[tuple[str, float]]:
        predictions, targets, loss = self._predictions(model, rows)
        yield "loss", loss
        if self.processor.target == "score":
            to_scores = self.processor.to_scores
            yield from error_scores(to_scores(predictions[:, 0]), to_scores(targets))
            return
        labels, classes = self.processor.labels, predictions.argmax(axis=1).tolist()
        positive = labels.index(positive_label(labels))
        yield from class_scores(classes, targets.tolist(), len(labels), positive=positive)
        yield from probability_scores(np.asarray(jax.nn.softmax(predictions, axis=1)), targets)

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the loss and the scores of the validation graphs."""
        for name, value in self._scores(model, self._valid):
            yield f"valid_{name}", value

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on the test graphs."""
        results: dict[str, Any] = dict(self._scores(kept_model, self._test))
        results["test_loss"] = results.pop("loss")
        if self.processor.target == "score":
            # The error of predicting the mean of the training graphs.
            targets = self.processor.to_scores(self._test.targets)
            baseline = dict(error_scores(np.full(len(targets), self.processor.settings.mean), targets))
            results |= {f"mean_{name}": value for name, value in baseline.items()}
        results["graphs_per_second"] = totals.weight / max(totals.seconds, 1e-9)
        lines = [", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in results.items())]
        return results, lines


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the graphs, compute the scale of scores, and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: open_splits(config, note))

    def make() -> GraphProcessor:
        train, *others = splits
        same_file = [split for split in others if split.table.path == train.table.path]
        processor = GraphProcessor.of(train, config.task.target, held_out=same_file)
        return processor if not starts else processor.with_features_of(processor_of(starts))

    processor = shared_processor(GraphProcessor, make, stored)
    return on_every_process(lambda: GraphPrediction(config, splits, processor, objective, mesh))


ENTRY = TaskEntry(
    "graph_prediction",
    GraphPredictionConfig,
    KIND,
    {"drawn": drawn, "graphs": graphs, "fine_tune": fine_tune},
    GraphProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedGraphModel,
    check_mesh=check_mesh,
)
