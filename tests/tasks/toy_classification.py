"""A task in one file, as a user would add it: classify rows by the parity of the last token.

Its model combines an existing stack under a prefix (`encoder/...`) and a head.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders.gpt import GPT, GPTConfig
from transformer_jax.models.registry import ModelEntry
from transformer_jax.training.config import Optimization, RunConfig
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry, Trained, processor_of, shared_processor

LENGTH, WORDS = 5, 11


@dataclasses.dataclass(frozen=True)
class ClassifierConfig:
    classes: int = 0  # set from the data
    width: int = 8

    @property
    def encoder(self):
        return GPTConfig(
            vocab_size=WORDS, width=self.width, layers=2, heads=2, kv_heads=2, feed_forward=16,
            max_length=LENGTH, vocab_multiple=2, use_bias=False,
        )  # fmt: skip


class Classifier(nnx.Module):
    children = ("encoder",)

    def __init__(self, config, *, rngs, compute=ComputeOptions()):
        self.config = config
        self.encoder = GPT(config.encoder, rngs=rngs, compute=compute)
        self.head = nnx.Linear(WORDS, max(1, config.classes), rngs=rngs)

    @property
    def parameter_count(self):
        return sum(leaf.size for leaf in jax.tree.leaves(self))

    def __call__(self, tokens, *, dropout_key=None):
        return self.head(self.encoder(tokens, dropout_key=dropout_key)[:, -1])


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    rows: int = 8
    data_seed: int = 0


class Labels:
    FILES = ("labels.json",)

    def __init__(self, names):
        self.names = names

    def files(self):
        return {"labels.json": ",".join(self.names).encode()}

    @classmethod
    def from_files(cls, files):
        return cls(files["labels.json"].decode().split(","))


class CrossEntropy(Objective):
    def loss(self, model, extra, batch, key):
        logits = model(batch["tokens"], dropout_key=key).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, batch["label"][:, None], axis=1)[:, 0]
        losses = (jax.nn.logsumexp(logits, axis=1) - chosen) * batch["weight"]
        return {"loss": losses.sum()}, {"loss": batch["weight"].sum()}


class Rows:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, step):
        rng = np.random.default_rng([self.config.data_seed, step])
        tokens = rng.integers(0, WORDS, (self.config.rows, LENGTH)).astype(np.int32)
        label = (tokens[:, -1] % 2).astype(np.int32)
        return {"tokens": tokens, "label": label, "weight": np.ones(self.config.rows, np.float32)}

    def from_step(self, step):
        while True:
            yield self[step]
            step += 1


class ToyTask:
    best, unit, files, about = ("accuracy", "max"), "rows", {}, "toy rows"

    def __init__(self, config, processor):
        self.processor = processor
        self.model_config = dataclasses.replace(config.model, classes=len(processor.names))
        self.fingerprint = f"toy-{config.task.data_seed}"
        self.batches = Rows(config.task)
        self._predict = jax.jit(lambda model, tokens: model(tokens).argmax(-1))

    def validate(self, model, extra):
        batch = self.batches[10_000]
        yield "accuracy", float((np.asarray(self._predict(model, batch["tokens"])) == batch["label"]).mean())

    def score(self, kept_model, totals):
        accuracy = dict(self.validate(kept_model, None))["accuracy"]
        return {"accuracy": accuracy, "rows": totals.weight}, [f"accuracy {accuracy:.3f}"]


def prepare(config, objective, *, mesh, stored, starts, note):
    def make():
        return processor_of(starts) or Labels(["even", "odd"])

    return ToyTask(config, shared_processor(Labels, make, stored))


class TrainedClassifier(Trained):
    def classify(self, tokens):
        return [self.processor.names[i] for i in np.asarray(self.model(jnp.asarray(tokens)).argmax(-1))]


def small(*, steps=20, rows=8):
    """A tiny classifier."""
    return RunConfig(
        task=ToyConfig(rows=rows),
        model=ClassifierConfig(),
        optimization=Optimization(
            steps=steps, learning_rate=0.03, schedule="constant", warmup=1, save_every=5, evaluate_every=10,
            average=2,
        ),
        recipe="small",
    )  # fmt: skip


def abstract_batch(config):
    rows = config.task.rows
    return {
        "tokens": jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32),
        "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        "weight": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }


ENTRY = TaskEntry(
    name="toy_classification",
    config=ToyConfig,
    kind="classifier",
    recipes={"small": small},
    processor=Labels,
    abstract_batch=abstract_batch,
    objective=lambda config, model_config: CrossEntropy(),
    prepare=prepare,
    trained=TrainedClassifier,
    models={"classifier": ModelEntry(ClassifierConfig, Classifier)},
)
