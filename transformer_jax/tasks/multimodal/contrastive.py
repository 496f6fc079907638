"""Contrastive learning of image and text vectors, and retrieval and classification with them."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.corpora.captioned_images import CaptionedImages
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.distributed.mesh import replicated
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import ImageRunner
from transformer_jax.evaluation.retrieval import RANKS, retrieval_scores
from transformer_jax.layers.contrastive import pairwise_sigmoid_loss, symmetric_cross_entropy
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.tasks.encoders.trained_heads import Classified, classified
from transformer_jax.tasks.multimodal import data as captioned_data
from transformer_jax.tasks.multimodal.data import CaptionedDataConfig, CaptionedTask
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.tasks.vision.data import CIFAR
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training.config import Optimization, RunConfig
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization, preset_config
from transformer_jax.training.task import TaskEntry, shared_processor
from transformer_jax.training.totals import Totals

KIND = "image_text_encoder"
# Number of texts that are embedded at once.
_TEXTS_PER_BATCH = 256
# Largest factor of similarities in CLIP's training (section 2.5), a temperature of 0.01.
_MAX_SCALE = 100.0
# Templates of captions for labels, most of them from CLIP's code; "{}" stands for the label.
TEMPLATES = (
    "a photo of a {}.", "a blurry photo of a {}.", "a close-up photo of a {}.", "a photo of the {}.",
    "a picture of a {}.", "{}",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ContrastiveConfig(CaptionedDataConfig):
    """The captioned images of a contrastive run.

    Raises:
      UserError: A value is out of range, or a batch has one image.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 2:
            raise UserError(
                f"`batch_size` {self.batch_size}: each image is compared with the other texts of its batch, "
                "so a batch needs 2 images"
            )


def _optimization(steps: int, learning_rate: float) -> Optimization:
    # Adam's constants are those of CLIP's vision transformers (Radford et al. 2021, table 18).
    return cosine_optimization(steps, b2=0.98, epsilon=1e-6, weight_decay=0.1, learning_rate=learning_rate)


def drawn(*, model: str = "clip", preset: str = "mini", steps: int = 300) -> RunConfig:
    """Train on drawn scenes with captions, a few minutes on a CPU."""
    config = preset_config(KIND, model, preset)
    return RunConfig(
        task=ContrastiveConfig(batch_size=96), model=config, optimization=_optimization(steps, 1e-3),
        recipe="drawn", preset=preset,
    )  # fmt: skip


def pairs(
    *,
    model: str = "clip",
    preset: str = "small",
    steps: int = 2_000,
    encoder: str = "",
    freeze_encoder: bool = False,
) -> RunConfig:
    """Train on your own images with captions, with or without a trained image encoder.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
      encoder: Folder of the image encoder to start from.
      freeze_encoder: Do not train the image encoder.
    """
    config = preset_config(KIND, model, preset)
    task = ContrastiveConfig(batch_size=256, crop=0.4, flip=True, color_jitter=0.3, **CIFAR)
    config = dataclasses.replace(config, stochastic_depth=0.1, text_dropout=0.1)
    run = RunConfig(
        task=task, model=config, optimization=_optimization(steps, 1e-3), recipe="pairs", preset=preset
    )
    return captioned_data.started_recipe(
        run, KIND, start=(), encoder=encoder, into="image_encoder", freeze=freeze_encoder
    )


def fine_tune(*, start: tuple[str, ...] = (), model: str = "clip", steps: int = 1_000) -> RunConfig:
    """Fine-tune a trained or published CLIP or SigLIP on your own images with captions.

    Args:
      start: Folder of the model.
      model: Name of the model; the start determines the similarity.
      steps: Number of training steps.

    Raises:
      UserError: `start` is empty or holds another model.
    """
    if not start:
        raise UserError("the recipe fine_tune needs a `start`")
    config = preset_config(KIND, model, "mini")
    task = ContrastiveConfig(batch_size=64, crop=0.6, flip=True)
    run = RunConfig(task=task, model=config, optimization=_optimization(steps, 1e-5), recipe="fine_tune")
    return captioned_data.started_recipe(run, KIND, start=start, encoder="", into="image_encoder", freeze=False)


def limited(scale: jax.Array) -> jax.Array:
    """Limit a scale to 100, above which CLIP's training is unstable; its gradient is not limited."""
    return scale + jax.lax.stop_gradient(jnp.minimum(scale, _MAX_SCALE) - scale)


class Contrastive(Objective):
    """CLIP's or SigLIP's loss over the batch of all devices, by the model's `similarity`.

    Args:
      mean: Mean of each channel of the images.
      std: Standard deviation of each channel.
    """

    additive = False

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        self._mean, self._std = mean, std

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss and of the scale of similarities, the inverse temperature."""
        image_key, text_key = jax.random.split(key)
        images = model.embed_images(
            normalize_images(batch["images"], self._mean, self._std), dropout_key=image_key
        )
        texts = model.embed_texts(batch["tokens"][:, 0], batch["lengths"][:, 0], dropout_key=text_key)
        rows = len(images)
        parts = model.compute.loss_parts_of(1, rows, rows)
        if model.config.similarity == "softmax":
            total = symmetric_cross_entropy(images, texts, limited(model.scale), parts=parts)
        else:
            total = pairwise_sigmoid_loss(images, texts, model.scale, model.bias, parts=parts)
        count = jnp.asarray(rows, jnp.float32)
        return {"loss": total, "scale": model.scale * count}, {"loss": count, "scale": count}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    captioned_data.check(config, model_config, "image_encoder")
    return Contrastive(config.task.mean, config.task.std)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    return captioned_data.abstract_batch(config, 1, config.model.max_length)


@jax.jit
def _embed_texts(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return replicated(model.embed_texts(tokens, lengths))


def embed_texts(model: Any, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Compute the vectors (N, E) of padded texts (N, T), some at a time."""
    vectors = []
    rows = _TEXTS_PER_BATCH if len(tokens) > 8 else 8
    for first in range(0, len(tokens), rows):
        part = slice(first, first + rows)
        # The last part is padded, so that one shape is compiled.
        padded = np.resize(tokens[part], (rows, tokens.shape[1]))
        vectors.append(np.asarray(_embed_texts(model, padded, np.resize(lengths[part], rows))))
    return np.concatenate(vectors)[: len(tokens)]


class ContrastiveTask(CaptionedTask):
    """A contrastive task with its data loaded, a `training.task.Task`."""

    best: tuple[str, Literal["min", "max"]] = ("valid_recall_at_10", "max")

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[CaptionedImages],
        processor: ImageTextProcessor,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        super().__init__(config, splits, processor, mesh, note, captions=1, to_generate=False)
        images = processor.images

        def vectors(model: Any, pixels: jax.Array) -> jax.Array:
            return model.embed_images(normalize_images(pixels, images.mean, images.std))

        self._runner = ImageRunner(vectors, mesh=mesh)
        self._encoded = self.of_splits(
            lambda split: captioned_data.encode_captions(split, processor, note, split="scores")
        )

    def scores(self, model: Any, split: str) -> dict[str, float]:
        """Return the retrieval scores of "valid" or "test"."""
        captioned, encoded = self._valid if split == "valid" else self._test, self._encoded[split]
        images = self._runner(self._runner.prepare(model), self._pixels[split])
        texts = embed_texts(model, encoded.tokens, encoded.lengths)
        return dict(retrieval_scores(images, texts, captioned_data.images_of_captions(captioned)))

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the recalls of the validation images, and the mean of both directions at 10."""
        scores = self.scores(model, "valid")
        for name, value in scores.items():
            yield f"valid_{name}", value
        recalls = (scores[f"{direction}_recall_at_10"] for direction in ("image_to_text", "text_to_image"))
        yield "valid_recall_at_10", sum(recalls) / 2

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model on the test images."""
        results: dict[str, Any] = self.scores(kept_model, "test")
        lines = [
            f"{direction.replace('_', ' '):<14} "
            + ", ".join(f"R@{k} {results[f'{direction}_recall_at_{k}']:.1f} %" for k in RANKS)
            for direction in ("image_to_text", "text_to_image")
        ]
        lines.append(f"of {len(self._test):,} images with {sum(map(len, self._test.captions)):,} captions")
        results |= {
            "images_per_second": totals.weight / max(totals.seconds, 1e-9),
            "test_images": len(self._test),
        }
        return results, lines


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the data, train or read the tokenizer, and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: captioned_data.open_splits(config, note))
    processor = shared_processor(
        ImageTextProcessor,
        lambda: captioned_data.make_processor(config, splits[0], starts, config.model.max_length),
        stored,
    )
    return on_every_process(lambda: ContrastiveTask(config, splits, processor, mesh, note))


@dataclasses.dataclass(frozen=True)
class TrainedClip(TrainedImageEncoder):
    """A model of image and text vectors from a run or a published folder."""

    @property
    def encoder(self) -> Any:
        """The image encoder."""
        return self.model.image_encoder

    @functools.cached_property
    def _inference_model(self) -> Any:
        return self.model.for_inference()

    def embed_images(self, images: Any) -> np.ndarray:
        """Compute the vectors (N, E) float32 of length 1 of images.

        Args:
          images: List of paths, Pillow images or uint8 arrays.

        Raises:
          UserError: See `run`.
        """
        return self.run("embed", lambda model, pixels: model.embed_images(pixels), images)

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Compute the vectors (N, E) float32 of length 1 of texts; long texts are truncated with a warning.

        Raises:
          UserError: `texts` is empty or a single string, or a text is empty.
        """
        if isinstance(texts, str) or not len(texts):
            raise UserError("give a list of one or more texts")
        encoded = self.processor.encode(texts)
        if encoded.truncated:
            warnings.warn(
                f"{encoded.truncated} of {len(texts)} texts are truncated to {self.processor.max_length} "
                "tokens",
                stacklevel=2,
            )
        return embed_texts(self._inference_model, encoded.tokens, encoded.lengths)

    def similarity(self, images: Any, texts: Sequence[str]) -> np.ndarray:
        """Compute the cosine similarities (N, M) of images and texts.

        Raises:
          UserError: See `embed_images` and `embed_texts`.
        """
        return self.embed_images(images) @ self.embed_texts(texts).T

    def classify(
        self, images: Any, labels: Sequence[str], *, templates: Sequence[str] = TEMPLATES
    ) -> list[Classified]:
        """Classify images zero-shot among labels in words (Radford et al. 2021, section 3.1).

        A label's vector is the mean of those of its captions, one for each template.

        Args:
          images: List of paths, Pillow images or uint8 arrays.
          labels: Names of the classes.
          templates: Captions with "{}" for the label.

        Returns:
          For each image its label, and the probability of each label.

        Raises:
          UserError: There are fewer than two labels, a template lacks "{}", or see `embed_images`.
        """
        if isinstance(labels, str) or len(labels) < 2:
            raise UserError("give a list of two or more labels")
        for number, label in enumerate(labels):
            if not label.strip():
                raise UserError(f"label {number + 1} is empty")
            if label in labels[:number]:
                raise UserError(f"label {label!r} is listed twice")
        if isinstance(templates, str) or not templates or not all("{}" in template for template in templates):
            raise UserError(f"templates {templates!r}: each needs {{}} in the place of the label")
        texts = [template.replace("{}", label) for label in labels for template in templates]
        vectors = self.embed_texts(texts).reshape(len(labels), len(templates), -1).mean(axis=1)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        logits = self.embed_images(images) @ vectors.T * float(self.model.scale)
        return [classified(row, labels, "label") for row in logits]


ENTRY = TaskEntry(
    "contrastive",
    ContrastiveConfig,
    KIND,
    {"drawn": drawn, "pairs": pairs, "fine_tune": fine_tune},
    ImageTextProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedClip,
    check_mesh=check_mesh,
)
