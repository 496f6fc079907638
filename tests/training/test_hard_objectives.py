"""Complex objectives: two networks with a loss term each, and a teacher with a running center."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.cases import others_long
from tests.tasks import toy_classification as toy
from transformer_jax import tasks
from transformer_jax.errors import UserError
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.models.decoders.gpt import GPT
from transformer_jax.models.registry import ModelEntry
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training import driver
from transformer_jax.training.objective import Objective
from transformer_jax.training.step import create_state, make_train_step

DECAY, CENTER_DECAY = 0.75, 0.9
GENERATOR = toy.ClassifierConfig(classes=toy.WORDS, width=4)
DISCRIMINATOR = toy.ClassifierConfig(classes=2, width=8)


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """Two networks of different widths."""

    generator: toy.ClassifierConfig = GENERATOR
    discriminator: toy.ClassifierConfig = DISCRIMINATOR
    classes: int = 0


class Pair(nnx.Module):
    children = ("generator", "discriminator")

    def __init__(self, config, *, rngs, compute=ComputeOptions()):
        self.config = config
        self.generator = GPT(config.generator.encoder, rngs=rngs, compute=compute)
        self.discriminator = toy.Classifier(config.discriminator, rngs=rngs, compute=compute)

    parameter_count = toy.Classifier.parameter_count


class TwoTerms(Objective):
    """The generator predicts the next token, the discriminator the parity of the last; rows are weighted."""

    def loss(self, model, extra, batch, key):
        logits = model.generator(batch["tokens"])[:, :-1]
        predicted = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        rows = batch["weight"].sum()
        # Each row counts once, whatever its number of tokens.
        generator = (predicted.mean(axis=1) * batch["weight"]).sum()
        logits = model.discriminator(batch["tokens"])
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        discriminator = (errors * batch["weight"]).sum()
        sums = {"loss": generator + 50 * discriminator, "generator": generator, "discriminator": discriminator}
        return sums, dict.fromkeys(sums, rows)

    def kept(self, model, extra):
        return model.discriminator


PAIR = toy.ENTRY._replace(
    name="pair",
    objective=lambda config, model_config: TwoTerms(),
    models={"pair": ModelEntry(PairConfig, Pair)},
    prepare=lambda config, objective, **_: PairTask(config, toy.Labels(["even", "odd"])),
)


class PairTask(toy.ToyTask):
    def validate(self, model, extra):
        yield from super().validate(getattr(model, "discriminator", model), extra)


def test_two_networks_train_together_and_one_is_kept(tmp_path):
    config = dataclasses.replace(toy.small(), model=PairConfig())
    results, _ = driver.train(PAIR, config, tmp_path)
    assert results["accuracy"] >= 0.75
    run = tasks.load(tmp_path, tasks={"pair": PAIR})
    assert isinstance(run.model, toy.Classifier)
    newest = tasks.load(tmp_path, tasks={"pair": PAIR}, weights="20")
    assert isinstance(newest.model, toy.Classifier)
    # The kept model is averaged over the last two checkpoints.
    before = named_leaves(tasks.load(tmp_path, tasks={"pair": PAIR}, weights="15").model)
    for name, leaf in named_leaves(run.model).items():
        mean = (np.asarray(before[name], np.float64) + np.asarray(named_leaves(newest.model)[name])) / 2
        np.testing.assert_allclose(leaf, mean, atol=1e-7, err_msg=name)


class Distillation(Objective):
    """The student learns from a teacher, its moving average; the center averages the teacher's outputs."""

    def initial_extra(self, model, key):
        return {"teacher": jax.tree.map(jnp.copy, model), "center": jnp.zeros(2)}

    def loss(self, model, extra, batch, key):
        taught = jax.lax.stop_gradient(extra["teacher"](batch["tokens"]))
        target = jax.nn.softmax(taught - extra["center"])
        noise = batch["label"][:, None] * 0.1
        errors = optax.softmax_cross_entropy(model(batch["tokens"]) + noise, target)
        weight = batch["weight"]
        sums = {"loss": (errors * weight).sum(), "center": (taught * weight[:, None]).sum(axis=0)}
        return sums, dict.fromkeys(sums, weight.sum())

    def after_update(self, model, extra, means, step):
        teacher = jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, extra["teacher"], model)
        center = CENTER_DECAY * extra["center"] + (1 - CENTER_DECAY) * means["center"]
        return {"teacher": teacher, "center": center}

    def kept(self, model, extra):
        return extra["teacher"]


def classifier():
    return toy.Classifier(toy.ClassifierConfig(classes=2), rngs=nnx.Rngs(0))


def batch(rows=8):
    return toy.Rows(toy.ToyConfig(rows=rows))[0]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_teacher_is_updated_once_per_step(accumulation):
    """Teacher and center follow their recurrences for any number of micro-batches."""
    optimizer, objective = optax.sgd(0.5), Distillation()
    state = jax.jit(lambda: create_state(classifier(), optimizer, jax.random.key(0), objective=objective))()
    teacher = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(state.model).items()}
    center = np.zeros(2)
    step = make_train_step(objective, optimizer, accumulation=accumulation)
    for number in range(3):
        data = toy.Rows(toy.ToyConfig())[number]
        data["weight"][-2:] = 0  # padding has no effect, also not on the center
        outputs = np.asarray(state.extra["teacher"](jnp.asarray(data["tokens"])), np.float64)
        center = CENTER_DECAY * center + (1 - CENTER_DECAY) * outputs[:-2].mean(axis=0)
        state, metrics = step(state, data)
        assert "center" not in metrics, "only scalars are logged"
        for name, leaf in named_leaves(state.model).items():
            teacher[name] = DECAY * teacher[name] + (1 - DECAY) * np.asarray(leaf, np.float64)
    np.testing.assert_allclose(state.extra["center"], center, atol=1e-6)
    for name, leaf in named_leaves(state.extra["teacher"]).items():
        np.testing.assert_allclose(leaf, teacher[name], atol=1e-6, err_msg=name)


def test_a_skipped_step_keeps_the_teacher():
    optimizer, objective = optax.sgd(0.5), Distillation()
    state = jax.jit(lambda: create_state(classifier(), optimizer, jax.random.key(0), objective=objective))()
    before = jax.tree.map(np.asarray, state.extra)
    data = batch()
    data["weight"][0] = np.nan
    state, metrics = make_train_step(objective, optimizer)(state, data)
    assert float(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.extra, before)


DISTILLED = toy.ENTRY._replace(objective=lambda config, model_config: Distillation())


@pytest.mark.parametrize("mesh", others_long([None, "data=2,fsdp=2,tensor=2"], None))
def test_a_run_with_a_teacher_resumes_and_keeps_the_teacher(tmp_path, mesh):
    config, execution = toy.small(steps=10), driver.Execution(mesh=mesh)
    driver.train(DISTILLED, config, tmp_path / "uninterrupted", execution=execution)
    driver.train(DISTILLED, config.with_values(steps=6), tmp_path / "resumed", execution=execution)
    driver.train(DISTILLED, config, tmp_path / "resumed", execution=execution)
    options = dict(tasks={DISTILLED.name: DISTILLED})
    expected, resumed = (
        named_leaves(tasks.load(tmp_path / name, **options).model) for name in ("uninterrupted", "resumed")
    )
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)
    newest = named_leaves(tasks.load(tmp_path / "uninterrupted", **options, weights="10").model)
    assert any((leaf != expected[name]).any() for name, leaf in newest.items())


class Contrastive(toy.CrossEntropy):
    additive = False


def test_a_loss_that_is_not_additive_refuses_micro_batches(tmp_path):
    entry = toy.ENTRY._replace(objective=lambda config, model_config: Contrastive())
    with pytest.raises(UserError, match="`accumulation` 2: this loss compares the rows"):
        driver.train(entry, toy.small().with_values(accumulation=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="does not divide its 6 rows"):
        driver.train(
            entry, toy.small(rows=6).with_values(steps=1), tmp_path / "run",
            execution=driver.Execution(mesh="data=4"),
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
