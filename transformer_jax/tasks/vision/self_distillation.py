"""DINO (Caron et al. 2021): a student learns from parts of an image what its own moving average says of
others."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batches.augmentation import Augmentation
from transformer_jax.data.batches.image_batches import CropViews
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision import pretraining as image_pretraining
from transformer_jax.tasks.vision.data import CIFAR, normalised_images
from transformer_jax.tasks.vision.pretraining import ImagePretraining, ImagePretrainingConfig, recipe_config
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training.config import RunConfig, check_at_least, check_at_most_one, check_below_one
from transformer_jax.training.objective import Objective
from transformer_jax.training.task import TaskEntry
from transformer_jax.training.totals import Totals

KIND = "self_distillation"

# The teacher's temperature before it rises (the authors' code).
_FIRST_TEMPERATURE = 0.04
# Nats below which the outputs are said to have collapsed.
_COLLAPSED = 0.01


@dataclasses.dataclass(frozen=True)
class SelfDistillationConfig(ImagePretrainingConfig):
    """DINO's objective and the parts of images that it compares; defaults are the paper's.

    Raises:
      UserError: a value out of range.
    """

    parts: int = 8
    """Local parts of an image, beside two global ones."""
    part_size: int = 0
    """Height and width of local parts in pixels; 0 is half of the global ones'."""
    split_area: float = 0.4
    """Local parts have at most this share of the image's area, global ones at least."""
    smallest_area: float = 0.05
    """Local parts have at least this share."""
    flip: bool = True
    """Left and right change places, every second time."""
    colour: float = 0.4
    """Strength of changes of brightness, contrast, saturation and hue, of four parts in five."""
    grey: float = 0.2
    """Probability of turning grey."""
    blur: float = 1.0
    """Probability of a blur of the first global part; a half of it for local ones, a tenth for the second."""
    solarise: float = 0.2
    """Probability of inverting the bright pixels of the second global part."""
    teacher_decay: float = 0.996
    """Of the teacher towards the student, once a step (equation 2); it rises to 1 by a cosine."""
    centre_decay: float = 0.9
    """Of the mean of the teacher's outputs, which is subtracted from them (equation 4)."""
    student_temperature: float = 0.1
    """What the student's outputs are divided by."""
    teacher_temperature: float = 0.04
    """What the teacher's outputs are divided by."""
    temperature_warmup: int = 0
    """Steps over which `teacher_temperature` rises from 0.04 to its value (section 3.2); 0 for none."""
    frozen_steps: int = 0
    """Steps at the beginning in which the prototypes stay as they are; 0 is a hundredth of all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            self, parts=0, part_size=0, teacher_decay=0, centre_decay=0, frozen_steps=0, colour=0, grey=0,
            blur=0, solarise=0, temperature_warmup=0,
        )  # fmt: skip
        check_below_one(self, "teacher_decay", "centre_decay")
        check_at_most_one(self, "grey", "blur", "solarise")
        for name in ("student_temperature", "teacher_temperature", "smallest_area", "split_area"):
            if not getattr(self, name) > 0:
                raise UserError(f"`{name}` {getattr(self, name)} must be above 0")
        if not self.smallest_area < self.split_area <= 1:
            raise UserError(
                f"`smallest_area` {self.smallest_area} must be below `split_area` {self.split_area}, and "
                "that at most 1"
            )


def digits(*, model: str = "vit", preset: str = "mini", steps: int = 600) -> RunConfig:
    """scikit-learn's digits, a few minutes on a CPU: shapes alone tell them apart, and none is its mirror
    image."""
    task = SelfDistillationConfig(
        batch_size=64, parts=2, teacher_decay=0.98, split_area=0.85, smallest_area=0.5, flip=False, colour=0.0,
        grey=0.0, blur=0.0, solarise=0.0,
    )  # fmt: skip
    head: dict[str, Any] = dict(prototypes=256, projection_hidden=256, bottleneck=64)
    return _recipe(task, model, preset, steps, "digits", convolutions=1, **head)


def images(*, model: str = "vit", preset: str = "cct_2_3x2", steps: int = 5_000) -> RunConfig:
    """Small images such as CIFAR-10 on a CPU: few prototypes, and a teacher that follows quickly."""
    task = SelfDistillationConfig(batch_size=128, parts=2, teacher_decay=0.99, **CIFAR)
    head: dict[str, Any] = dict(prototypes=1_024, projection_hidden=512, bottleneck=128)
    return _recipe(task, model, preset, steps, "images", pooling="class", **head)


def paper(*, model: str = "vit", preset: str = "s16", steps: int = 125_000) -> RunConfig:
    """The paper's ViT-S/16 on ImageNet: 100 epochs of 1,024 images, for accelerators."""
    task = SelfDistillationConfig(
        batch_size=1_024, parts=8, part_size=96, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),
        teacher_temperature=0.07, temperature_warmup=3 * steps // 10,
    )  # fmt: skip
    config = _recipe(task, model, preset, steps, "paper", learning_rate=2e-3, stochastic_depth=0.1)
    return config.with_values(weight_decay=0.04, weight_decay_growth=10.0)


def _recipe(
    task: SelfDistillationConfig, model: str, preset: str, steps: int, recipe: str, *,
    learning_rate: float = 1e-3, **head: Any,
) -> RunConfig:  # fmt: skip
    return recipe_config(
        task, KIND, model, preset, steps, recipe, {"stochastic_depth": 0.0} | head, b2=0.999, clip=3.0,
        learning_rate=learning_rate,
    )  # fmt: skip


class SelfDistillation(Objective):
    """Cross-entropy between what the teacher says of two global parts of an image and the student of all others
    (equation 3). The extra state is the teacher, the centre of its outputs, and the step.

    Args:
      config: of the task.
      steps: of the run, which the schedules run over.
    """

    def __init__(self, config: SelfDistillationConfig, steps: int):
        self._config, self._steps = config, steps
        self._frozen = config.frozen_steps or max(1, steps // 100)

    def initial_extra(self, model, key):
        return {
            "teacher": jax.tree.map(jnp.copy, model),
            "centre": jnp.zeros(model.config.prototypes),
            "step": jnp.zeros((), jnp.int32),
        }

    def taught(self, extra: Any, wholes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the teacher's outputs, and the probabilities that they are sharpened to, (views, B, K))."""
        outputs = jax.lax.stop_gradient(_of_views(extra["teacher"], wholes))
        return outputs, jax.nn.softmax((outputs - extra["centre"]) / self.temperature(extra["step"]))

    def temperature(self, step: jax.Array) -> jax.Array | float:
        """Of the teacher at a step."""
        own = self._config
        if not own.temperature_warmup:
            return own.teacher_temperature
        share = jnp.minimum(step / own.temperature_warmup, 1.0)
        return _FIRST_TEMPERATURE + share * (own.teacher_temperature - _FIRST_TEMPERATURE)

    def loss(self, model, extra, batch, key):
        own, weight = self._config, batch["weight"]
        wholes = normalised_images(batch["wholes"], own.mean, own.std)
        outputs, targets = self.taught(extra, wholes)
        frozen, keys = extra["step"] < self._frozen, jax.random.split(key)
        apply = functools.partial(_of_views, model, frozen_prototypes=frozen)
        learned = apply(wholes, dropout_key=keys[0])
        if "parts" in batch:
            parts = normalised_images(batch["parts"], own.mean, own.std)
            learned = jnp.concatenate([learned, apply(parts, dropout_key=keys[1])])
        logs = jax.nn.log_softmax(learned / own.student_temperature)
        # Every pair of a global view of the teacher and another view of the student.
        pairs = -jnp.einsum("tbk,sbk->tsb", targets, logs)
        others = 1 - jnp.eye(len(targets), len(logs))
        losses = (pairs * others[..., None]).sum(axis=(0, 1)) / others.sum()
        entropy = -(targets * jnp.log(jnp.maximum(targets, 1e-30))).sum(axis=-1).mean(axis=0)
        sums = {
            "loss": (losses * weight).sum(),
            "teacher_entropy": (entropy * weight).sum(),
            "centre": (outputs.mean(axis=0) * weight[:, None]).sum(axis=0),
        }
        return sums, dict.fromkeys(sums, weight.sum())

    def after_update(self, model, extra, means, step):
        share = jnp.minimum(step / self._steps, 1.0)
        decay = 1 - (1 - self._config.teacher_decay) * (jnp.cos(math.pi * share) + 1) / 2
        teacher = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, extra["teacher"], model)
        kept = self._config.centre_decay
        return {
            "teacher": teacher,
            "centre": kept * extra["centre"] + (1 - kept) * means["centre"],
            "step": extra["step"] + 1,
        }

    def kept(self, model, extra):
        return extra["teacher"]


def _of_views(model: Any, views: jax.Array, **how: Any) -> jax.Array:
    """Outputs (V, B, K) of views (B, V, height, width, 3), in one call."""
    B, V = views.shape[:2]
    outputs = model(views.reshape(B * V, *views.shape[2:]), **how)
    return outputs.reshape(B, V, -1).swapaxes(0, 1)


def _sizes(config: RunConfig) -> tuple[int, int]:
    """(height and width of global parts, of local parts)."""
    size = image_data.image_size(config)
    if config.task.part_size:
        return size, config.task.part_size
    step = 2**config.model.convolutions if config.model.convolutions else config.model.patch_size
    return size, max(step, size // 2 // step * step)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """The loss of a config.

    Raises:
      UserError: values that contradict each other.
    """
    image_data.check(config, model_config)
    _, small = _sizes(config)
    if not model_config.convolutions and small % model_config.patch_size:
        raise UserError(f"`part_size` {small} is no multiple of `patch_size` {model_config.patch_size}")
    return SelfDistillation(config.task, config.optimization.steps)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Every batch of a run."""
    size, small = _sizes(config)
    shapes = {"wholes": (2, size, size, 3)}
    if config.task.parts:
        shapes["parts"] = (config.task.parts, small, small, 3)
    return image_pretraining.abstract_images(config, **shapes)


def _information(of_all: float, of_each: float) -> tuple[float, bool]:
    """(mutual information in nats of an image and the prototype that it is given, whether that is collapse).

    Args:
      of_all: entropy of the mean output.
      of_each: mean entropy of the outputs.
    """
    return of_all - of_each, of_all - of_each < _COLLAPSED


class SelfDistillationTask(ImagePretraining):
    """The task with its images opened."""

    def views(self, config: RunConfig) -> CropViews:
        size, small = _sizes(config)
        task: SelfDistillationConfig = config.task
        # BYOL's changes (Grill et al. 2020, appendix B), as the paper takes them over.
        common: dict[str, Any] = dict(flip=task.flip, colour=task.colour, colour_rate=0.8, grey=task.grey)
        whole = Augmentation(crop=task.split_area, **common)
        first = dataclasses.replace(whole, blur=task.blur)
        second = dataclasses.replace(whole, blur=0.1 * task.blur, solarise=task.solarise)
        part = Augmentation(
            crop=task.smallest_area, largest_crop=task.split_area, blur=0.5 * task.blur, **common
        )
        return CropViews(size, small, (first, second), part, task.parts)

    @functools.cached_property
    def _prototypes(self) -> ImageRunner:
        processor = self.processor
        return ImageRunner(lambda m, x: m(normalised_images(x, processor.mean, processor.std)), mesh=self._mesh)

    def further(self, kept: Any, name: str) -> Iterator[tuple[str, float]]:
        """The entropy in nats of the teacher's outputs for a split's images, centred by their mean and
        sharpened: its mean over the images, and that of the mean output.

        The two are the same where all images have the same output, which is collapse.
        """
        task = self._task
        assert isinstance(task, SelfDistillationConfig)
        images, count = self._images[name], len(self._images[name])

        def entropy(p: np.ndarray) -> np.ndarray:
            return -(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1)

        # Twice over the images: the outputs of all, tens of thousands of numbers each, are never held.
        mean = sum(outputs.sum(axis=0) for outputs in self._prototypes.parts(kept, images)) / count
        entropies, shares = 0.0, np.zeros_like(mean)
        for outputs in self._prototypes.parts(kept, images):
            own = np.asarray(jax.nn.softmax((outputs - mean) / task.teacher_temperature))
            entropies += float(entropy(own).sum())
            shares += own.sum(axis=0) / count
        yield "teacher_entropy", entropies / count
        yield "prototype_entropy", float(entropy(shares))

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        found = dict(super().validate(model, extra))
        if _information(found["valid_prototype_entropy"], found["valid_teacher_entropy"])[1]:
            self.note(f"step {int(extra['step'])}: collapsed, the teacher's output is the same for all images")
        yield from found.items()

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        results, shown = super().score(kept_model, totals)
        named = [results[kind] for kind in ("prototype_entropy", "teacher_entropy")]
        of_all, of_each = (own if isinstance(own, dict) else {"": own} for own in named)
        for name, entropy in of_all.items():
            information, collapsed = _information(entropy, of_each[name])
            line = f"{name + ': ' if name else ''}{information:.3f} nats of an image in the teacher's output"
            if collapsed:
                line += ": collapsed, it is the same for all images"
            shown.append(line)
        return results, shown


def prepare(config, objective, **options):
    """Opens the images and makes batches; see `TaskEntry.prepare`."""
    return image_pretraining.prepare(SelfDistillationTask, config, objective, **options)


ENTRY = TaskEntry(
    "self_distillation",
    SelfDistillationConfig,
    KIND,
    {"digits": digits, "images": images, "paper": paper},
    ImageProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedImageEncoder,
    check_mesh=image_data.check_mesh,
)
