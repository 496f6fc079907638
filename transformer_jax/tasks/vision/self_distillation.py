"""DINO (Caron et al. 2021): a student predicts its moving average's outputs for other crops of an image."""

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
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision import pretraining as image_pretraining
from transformer_jax.tasks.vision.data import CIFAR, IMAGENET
from transformer_jax.tasks.vision.pretraining import ImagePretraining, ImagePretrainingConfig
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training.config import RunConfig, check_at_least, check_at_most_one, check_below_one
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization
from transformer_jax.training.task import TaskEntry
from transformer_jax.training.totals import Totals

KIND = "self_distillation"

# Initial temperature of the teacher, as in the authors' code.
_INITIAL_TEMPERATURE = 0.04
# Prototype entropy minus teacher entropy is the mutual information of images and prototypes; outputs that have
# less than so many nats are reported as collapsed.
_COLLAPSED = 0.01


@dataclasses.dataclass(frozen=True)
class SelfDistillationConfig(ImagePretrainingConfig):
    """DINO's objective and image crops; the defaults are the paper's.

    Raises:
      UserError: A value is out of range.
    """

    local_crops: int = 8
    """Number of local crops of an image, in addition to two global crops."""
    local_crop_size: int = 0
    """Height and width of local crops in pixels; 0 uses half the size of global crops."""
    min_global_area: float = 0.4
    """Share of the image's area that local crops cover at most and global crops at least."""
    min_local_area: float = 0.05
    """Share of the image's area that local crops cover at least."""
    flip: bool = True
    """Mirror half of the crops horizontally."""
    color_jitter: float = 0.4
    """Strength of the jitter of brightness, contrast, saturation and hue, applied to 80 % of the crops."""
    grayscale: float = 0.2
    """Probability of converting a crop to grayscale."""
    blur: float = 1.0
    """Probability of blurring the first global crop; half as large for local crops, a tenth for the second
    global crop."""
    solarize: float = 0.2
    """Probability of solarizing the second global crop."""
    teacher_decay: float = 0.996
    """Initial decay of the teacher's moving average per step (equation 2); it rises to 1 along a cosine."""
    center_decay: float = 0.9
    """Decay of the moving mean of the teacher's outputs, which is subtracted from them (equation 4)."""
    student_temperature: float = 0.1
    """Temperature of the student's softmax."""
    teacher_temperature: float = 0.04
    """Temperature of the teacher's softmax."""
    temperature_warmup: int = 0
    """Steps over which `teacher_temperature` rises from 0.04 to its value (section 3.2); 0 for none."""
    frozen_prototype_steps: int = 0
    """Initial steps during which the prototypes are frozen; 0 freezes them for a hundredth of all steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(
            self, local_crops=0, local_crop_size=0, teacher_decay=0, center_decay=0, frozen_prototype_steps=0,
            color_jitter=0, grayscale=0, blur=0, solarize=0, temperature_warmup=0,
        )  # fmt: skip
        check_below_one(self, "teacher_decay", "center_decay")
        check_at_most_one(self, "grayscale", "blur", "solarize")
        for name in ("student_temperature", "teacher_temperature", "min_local_area", "min_global_area"):
            if not getattr(self, name) > 0:
                raise UserError(f"`{name}` {getattr(self, name)} must be above 0")
        if not self.min_local_area < self.min_global_area <= 1:
            raise UserError(
                f"`min_local_area` {self.min_local_area} must be below `min_global_area` "
                f"{self.min_global_area}, which must be at most 1"
            )


def digits(*, model: str = "vit", preset: str = "mini_cct", steps: int = 600) -> RunConfig:
    """Train on scikit-learn's digits, a few minutes on a CPU; the crops are neither mirrored nor recolored."""
    task = SelfDistillationConfig(
        batch_size=64, local_crops=2, teacher_decay=0.98, min_global_area=0.85, min_local_area=0.5, flip=False,
        color_jitter=0.0, grayscale=0.0, blur=0.0, solarize=0.0,
    )  # fmt: skip
    head: dict[str, Any] = dict(prototypes=256, projection_hidden=256, bottleneck=64)
    return _recipe("digits", task, model, preset, steps, "mini_cct", **head)


def images(*, model: str = "vit", preset: str = "cct_2_3x2", steps: int = 5_000) -> RunConfig:
    """Train on small images such as CIFAR-10 on a CPU, with few prototypes and a fast teacher."""
    task = SelfDistillationConfig(batch_size=128, local_crops=2, teacher_decay=0.99, **CIFAR)
    head: dict[str, Any] = dict(prototypes=1_024, projection_hidden=512, bottleneck=128)
    return _recipe("images", task, model, preset, steps, "cct_2_3x2", **head)


def paper(*, model: str = "vit", preset: str = "s16", steps: int = 125_000) -> RunConfig:
    """Train the paper's ViT-S/16 on ImageNet for 100 epochs with batches of 1,024 images, on accelerators."""
    task = SelfDistillationConfig(
        batch_size=1_024, local_crops=8, local_crop_size=96, teacher_temperature=0.07,
        temperature_warmup=3 * steps // 10, **IMAGENET,
    )  # fmt: skip
    config = _recipe("paper", task, model, preset, steps, "s16", learning_rate=2e-3, stochastic_depth=0.1)
    return config.with_values(weight_decay=0.04, weight_decay_growth=10.0)


def _recipe(
    recipe: str,
    task: SelfDistillationConfig,
    model: str,
    preset: str,
    steps: int,
    default_preset: str,
    *,
    learning_rate: float = 1e-3,
    stochastic_depth: float = 0.0,
    **model_values: Any,
) -> RunConfig:
    optimization = cosine_optimization(steps, b2=0.999, clip=3.0, learning_rate=learning_rate)
    # The teacher's output is that of a class token, whatever the preset's pooling.
    return image_data.new_run(
        task, KIND, model, preset, optimization, recipe, default_preset=default_preset,
        required={"pooling": "class"}, stochastic_depth=stochastic_depth, **model_values,
    )  # fmt: skip


class SelfDistillation(Objective):
    """Cross-entropy of the teacher's outputs for global crops and the student's for other crops (equation 3).

    The extra state is the teacher, the centre of its outputs, and the step.

    Args:
      config: Config of the task.
      steps: Number of training steps, the length of the schedules.
    """

    def __init__(self, config: SelfDistillationConfig, steps: int):
        self._config, self._steps = config, steps
        self._frozen_prototype_steps = config.frozen_prototype_steps or max(1, steps // 100)

    def initial_extra(self, model, key):
        """Return a teacher equal to the student, a centre of zeros, and step 0."""
        return {
            "teacher": jax.tree.map(jnp.copy, model),
            "centre": jnp.zeros(model.config.prototypes),
            "step": jnp.zeros((), jnp.int32),
        }

    def temperature(self, step: jax.Array) -> jax.Array | float:
        """Return the temperature of the teacher at a step."""
        config = self._config
        if not config.temperature_warmup:
            return config.teacher_temperature
        progress = jnp.minimum(step / config.temperature_warmup, 1.0)
        return _INITIAL_TEMPERATURE + progress * (config.teacher_temperature - _INITIAL_TEMPERATURE)

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss, the entropy of the teacher's outputs, and their mean."""
        config, weight = self._config, batch["weight"]
        global_crops = normalize_images(batch["global_crops"], config.mean, config.std)
        outputs = jax.lax.stop_gradient(_apply_to_crops(extra["teacher"], global_crops))
        targets = jax.nn.softmax((outputs - extra["centre"]) / self.temperature(extra["step"]))
        frozen, keys = extra["step"] < self._frozen_prototype_steps, jax.random.split(key)
        student = functools.partial(_apply_to_crops, model, frozen_prototypes=frozen)
        logits = student(global_crops, dropout_key=keys[0])
        if "local_crops" in batch:
            local_crops = normalize_images(batch["local_crops"], config.mean, config.std)
            logits = jnp.concatenate([logits, student(local_crops, dropout_key=keys[1])])
        log_probabilities = jax.nn.log_softmax(logits / config.student_temperature)
        # Each global crop of the teacher is paired with every other crop of the student.
        pair_losses = -jnp.einsum("tbk,sbk->tsb", targets, log_probabilities)
        is_pair = 1 - jnp.eye(len(targets), len(log_probabilities))
        losses = (pair_losses * is_pair[..., None]).sum(axis=(0, 1)) / is_pair.sum()
        entropy = -(targets * jnp.log(jnp.maximum(targets, 1e-30))).sum(axis=-1).mean(axis=0)
        sums = {
            "loss": (losses * weight).sum(),
            "teacher_entropy": (entropy * weight).sum(),
            "centre": (outputs.mean(axis=0) * weight[:, None]).sum(axis=0),
        }
        return sums, dict.fromkeys(sums, weight.sum())

    def after_update(self, model, extra, means, step):
        """Move the teacher towards the student, and the centre towards the mean output of the step."""
        progress = jnp.minimum(step / self._steps, 1.0)
        decay = 1 - (1 - self._config.teacher_decay) * (jnp.cos(math.pi * progress) + 1) / 2
        teacher = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, extra["teacher"], model)
        center_decay = self._config.center_decay
        return {
            "teacher": teacher,
            "centre": center_decay * extra["centre"] + (1 - center_decay) * means["centre"],
            "step": extra["step"] + 1,
        }

    def kept(self, model, extra):
        """Return the teacher."""
        return extra["teacher"]


def _apply_to_crops(model: Any, crops: jax.Array, **options: Any) -> jax.Array:
    """Apply the model to crops (B, N, height, width, 3) in one call; return its outputs (N, B, K)."""
    B, N = crops.shape[:2]
    outputs = model(crops.reshape(B * N, *crops.shape[2:]), **options)
    return outputs.reshape(B, N, -1).swapaxes(0, 1)


def _crop_sizes(config: RunConfig) -> tuple[int, int]:
    """Return the height and width in pixels of global crops and of local crops."""
    size = image_data.image_size(config)
    if config.task.local_crop_size:
        return size, config.task.local_crop_size
    step = 2**config.model.convolutions if config.model.convolutions else config.model.patch_size
    return size, max(step, size // 2 // step * step)


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    image_data.check(config, model_config)
    image_data.check_patches(_crop_sizes(config)[1], model_config, "local_crop_size")
    return SelfDistillation(config.task, config.optimization.steps)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    global_size, local_size = _crop_sizes(config)
    shapes = {"global_crops": (2, global_size, global_size, 3)}
    if config.task.local_crops:
        shapes["local_crops"] = (config.task.local_crops, local_size, local_size, 3)
    return image_pretraining.abstract_images(config, **shapes)


class SelfDistillationTask(ImagePretraining):
    """The task with its images opened."""

    def views(self, config: RunConfig) -> CropViews:
        """Return the function that makes two global crops and the local crops of an image."""
        global_size, local_size = _crop_sizes(config)
        task: SelfDistillationConfig = config.task
        # The paper uses the augmentations of BYOL (Grill et al. 2020, appendix B).
        common: dict[str, Any] = dict(
            flip=task.flip, color_jitter=task.color_jitter, color_jitter_rate=0.8, grayscale=task.grayscale
        )
        global_crop = Augmentation(crop=task.min_global_area, **common)
        first = dataclasses.replace(global_crop, blur=task.blur)
        second = dataclasses.replace(global_crop, blur=0.1 * task.blur, solarize=task.solarize)
        local_crop = Augmentation(
            crop=task.min_local_area, max_crop=task.min_global_area, blur=0.5 * task.blur, **common
        )
        return CropViews(global_size, local_size, (first, second), local_crop, task.local_crops)

    @functools.cached_property
    def _prototypes(self) -> ImageRunner:
        processor = self.processor
        return ImageRunner(lambda m, x: m(normalize_images(x, processor.mean, processor.std)), mesh=self._mesh)

    def extra_scores(self, kept: Any, name: str) -> Iterator[tuple[str, float]]:
        """Yield two entropies in nats of the teacher's outputs on a split, after centering and sharpening.

        `teacher_entropy` is the mean entropy of the outputs, `prototype_entropy` the entropy of their mean.
        They are equal if all images have the same output, which is collapse.
        """
        task: SelfDistillationConfig = self._task
        images, count = self._images[name], len(self._images[name])

        def entropy(p: np.ndarray) -> np.ndarray:
            return -(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1)

        # Outputs have tens of thousands of numbers per image, so they are computed twice instead of stored.
        centre = sum(outputs.sum(axis=0) for outputs in self._prototypes.batches(kept, images)) / count
        total_entropy, mean_output = 0.0, np.zeros_like(centre)
        for outputs in self._prototypes.batches(kept, images):
            probabilities = np.asarray(jax.nn.softmax((outputs - centre) / task.teacher_temperature))
            total_entropy += float(entropy(probabilities).sum())
            mean_output += probabilities.sum(axis=0) / count
        yield "teacher_entropy", total_entropy / count
        yield "prototype_entropy", float(entropy(mean_output))

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the scores of `ImagePretraining.validate`, and note a collapse."""
        scores = dict(super().validate(model, extra))
        if scores["valid_prototype_entropy"] - scores["valid_teacher_entropy"] < _COLLAPSED:
            self._note(f"step {int(extra['step'])}: collapsed, the teacher's output is the same for all images")
        yield from scores.items()

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score as `ImagePretraining` does, with a line on the outputs' information for each test set."""
        results, lines = super().score(kept_model, totals)
        prototype_entropies, teacher_entropies = (
            values if isinstance(values, dict) else {"": values}
            for values in (results["prototype_entropy"], results["teacher_entropy"])
        )
        for name, entropy in prototype_entropies.items():
            information = entropy - teacher_entropies[name]
            line = f"{name + ': ' if name else ''}{information:.3f} nats about an image in the teacher's output"
            if information < _COLLAPSED:
                line += ": collapsed, it is the same for all images"
            lines.append(line)
        return results, lines


ENTRY = TaskEntry(
    "self_distillation",
    SelfDistillationConfig,
    KIND,
    {"digits": digits, "images": images, "paper": paper},
    ImageProcessor,
    abstract_batch,
    objective,
    functools.partial(image_pretraining.prepare, SelfDistillationTask),
    TrainedImageEncoder,
    check_mesh=check_mesh,
)
