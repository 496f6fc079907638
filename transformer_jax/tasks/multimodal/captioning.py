"""Captioning: training a decoder to describe images, and captioning with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.data.corpora.captioned_images import CaptionedImages
from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
from transformer_jax.decoding.captions import CaptionAttention, CaptionGenerator
from transformer_jax.distributed.mesh import place_batch
from transformer_jax.distributed.processes import on_every_process, on_first_then_every_process
from transformer_jax.errors import UserError
from transformer_jax.evaluation.captions import caption_scores, cider_d
from transformer_jax.layers.image_normalization import normalize_images
from transformer_jax.layers.losses import cross_entropy_in_parts
from transformer_jax.tasks.multimodal import data as captioned_data
from transformer_jax.tasks.multimodal.data import CaptionedDataConfig, CaptionedTask
from transformer_jax.tasks.row_sharding import check_mesh
from transformer_jax.tasks.vision.data import CIFAR, ProcessedImages
from transformer_jax.tasks.vision.trained import TrainedImageEncoder, check_image_list
from transformer_jax.training.config import FREE, Optimization, RunConfig, Start, check_at_least
from transformer_jax.training.objective import Objective
from transformer_jax.training.recipes import cosine_optimization, preset_config
from transformer_jax.training.starts import started_config
from transformer_jax.training.task import TaskEntry, shared_processor
from transformer_jax.training.totals import Totals

KIND = "captioner"
# Number of validation images to caption during training; the loss uses all.
_CAPTIONED_WHILE_TRAINING = 200
_VALIDATION_ROWS = 64


@dataclasses.dataclass(frozen=True)
class CaptioningConfig(CaptionedDataConfig):
    """The captioned images of a captioner's run, its loss and its search.

    Raises:
      UserError: A value is out of range.
    """

    decoder: str = ""
    """Folder of a trained or published GPT-2 to initialize the decoder from."""
    max_caption_length: int = 32
    """Maximum length of a caption in tokens with begin and end; longer captions are truncated and counted."""
    captions_per_image: int = 1
    """Number of captions of each image in a batch, drawn anew in each epoch; the image is encoded once."""
    label_smoothing: float = 0.1
    """Probability to spread over the vocabulary."""
    beam_size: int = dataclasses.field(default=3, metadata=FREE)
    """Number of beams of captions after training; 1 is greedy search."""
    length_penalty: float = dataclasses.field(default=0.6, metadata=FREE)
    """Exponent of the length penalty of beams; larger values prefer longer captions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, captions_per_image=1, max_caption_length=3, label_smoothing=0, beam_size=1)
        if self.label_smoothing >= 1:
            raise UserError(f"`label_smoothing` {self.label_smoothing} must be below 1")


def _optimization(steps: int, learning_rate: float) -> Optimization:
    return cosine_optimization(steps, b2=0.98, learning_rate=learning_rate)


def drawn(*, model: str = "captioner", preset: str = "mini", steps: int = 300) -> RunConfig:
    """Train on drawn scenes with captions, a few minutes on a CPU."""
    return RunConfig(
        task=CaptioningConfig(batch_size=64, captions_per_image=3, label_smoothing=0.0),
        model=preset_config(KIND, model, preset), optimization=_optimization(steps, 2e-3),
        recipe="drawn", preset=preset,
    )  # fmt: skip


def pairs(
    *,
    model: str = "captioner",
    preset: str = "small",
    steps: int = 2_000,
    encoder: str = "",
    decoder: str = "",
    freeze_encoder: bool = False,
) -> RunConfig:
    """Train on your own images with captions, from trained encoders and decoders if they are named.

    Args:
      model: Name of the model.
      preset: Name of the model's size.
      steps: Number of training steps.
      encoder: Folder of the image encoder to start from.
      decoder: Folder of the decoder to start from, a GPT-2.
      freeze_encoder: Do not train the image encoder.

    Raises:
      UserError: A folder holds another kind of model.
    """
    task = CaptioningConfig(batch_size=64, captions_per_image=5, crop=0.6, flip=True, color_jitter=0.2, **CIFAR)
    config = preset_config(KIND, model, preset)
    starts: tuple[Start, ...] = ()
    if decoder:
        name, gpt = started_config(decoder, "decoder", "decoder")
        if name != "gpt":
            raise UserError(f"`decoder` {decoder} holds a {name}: a captioner's decoder is a gpt")
        config = dataclasses.replace(
            config, vocab_size=gpt.vocab_size, decoder_width=gpt.width, decoder_layers=gpt.layers,
            decoder_heads=gpt.heads, decoder_feed_forward=gpt.feed_forward, tie=gpt.tie,
            max_length=min(gpt.max_length, config.max_length), decoder_activation=gpt.activation,
            decoder_epsilon=gpt.norm_epsilon,
        )  # fmt: skip
        task = dataclasses.replace(task, decoder=decoder)
        starts = (Start(decoder, into="decoder"),)
    run = RunConfig(
        task=task, model=config, optimization=_optimization(steps, 1e-3), recipe="pairs", preset=preset,
        start=starts,
    )  # fmt: skip
    return captioned_data.started_recipe(
        run, KIND, start=starts, encoder=encoder, into="encoder", freeze=freeze_encoder
    )


def fine_tune(*, start: tuple[str, ...] = (), model: str = "captioner", steps: int = 1_000) -> RunConfig:
    """Fine-tune a trained or published captioner on your own images with captions.

    Args:
      start: Folder of the model.
      model: Name of the model.
      steps: Number of training steps.

    Raises:
      UserError: `start` is empty or holds another model.
    """
    if not start:
        raise UserError("the recipe fine_tune needs a `start`")
    task = CaptioningConfig(batch_size=32, captions_per_image=2, crop=0.8, flip=True)
    config = preset_config(KIND, model, "mini")
    run = RunConfig(task=task, model=config, optimization=_optimization(steps, 5e-5), recipe="fine_tune")
    return captioned_data.started_recipe(run, KIND, start=start, encoder="", into="encoder", freeze=False)


def caption_loss(
    model: Any, images: jax.Array, batch: dict[str, jax.Array], smoothing: float, *, dropout_key=None
):
    """Return sums over a batch: smoothed loss, negative log-likelihood, and number of predicted tokens.

    Args:
      model: A captioner.
      images: (B, height, width, 3) normalized.
      batch: `tokens` (B, C, T), captions between start and end token; `lengths` (B, C); `weight` (B,).
      smoothing: Probability to spread over the vocabulary.
      dropout_key: Key for dropout; None disables it.
    """
    B, C, T = batch["tokens"].shape
    tokens, lengths = batch["tokens"].reshape(B * C, T), batch["lengths"].reshape(B * C)
    weights = (jnp.arange(T - 1) < lengths[:, None] - 1) * jnp.repeat(batch["weight"], C)[:, None]
    states = model.hidden_states(images, tokens[:, :-1], dropout_key=dropout_key)
    parts = model.compute.loss_parts_of(B * C, T - 1, model.config.vocab_size)
    return cross_entropy_in_parts(model.logits, states, tokens[:, 1:], weights, smoothing, parts=parts)


class CaptionLoss(Objective):
    """Smoothed cross-entropy of each token of a caption, given the image and the tokens before.

    Args:
      config: Config of the task.
    """

    def __init__(self, config: CaptioningConfig):
        self._config = config

    def loss(self, model, extra, batch, key):
        """Return sums and weights of the loss and the negative log-likelihood."""
        config = self._config
        images = normalize_images(batch["images"], config.mean, config.std)
        total, likelihood, weight = caption_loss(model, images, batch, config.label_smoothing, dropout_key=key)
        return {"loss": total, "nll": likelihood}, {"loss": weight, "nll": weight}


def objective(config: RunConfig, model_config: Any) -> Objective:
    """Return the objective of a config.

    Raises:
      UserError: Values contradict each other.
    """
    captioned_data.check(config, model_config, "encoder")
    length = config.task.max_caption_length
    if length > model_config.max_length:
        raise UserError(
            f"`max_caption_length` {length} is above the model's `max_length` {model_config.max_length}"
        )
    return CaptionLoss(config.task)


def abstract_batch(config: RunConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    task: CaptioningConfig = config.task
    return captioned_data.abstract_batch(config, task.captions_per_image, task.max_caption_length)


class CaptioningTask(CaptionedTask):
    """A captioning task with its data loaded, a `training.task.Task`."""

    best: tuple[str, Literal["min", "max"]] = ("valid_cider", "max")
    unit = "tokens"

    def __init__(
        self,
        config: RunConfig,
        splits: Sequence[CaptionedImages],
        processor: ImageTextProcessor,
        mesh: Mesh | None,
        note: Callable[[str], None],
    ):
        task: CaptioningConfig = config.task
        super().__init__(
            config, splits, processor, mesh, note, captions=task.captions_per_image, to_generate=True
        )
        self._settings = task
        mean, std = processor.images.mean, processor.images.std

        def loss(model: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return caption_loss(model, normalize_images(batch["images"], mean, std), batch, 0.0)[1:]

        self._loss = jax.jit(loss)

    def _validation_batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield batches of the validation images with the first caption of each."""
        texts = [texts[0] for texts in self._valid.captions]
        encoded = self.processor.encode(texts, to_generate=True)
        pixels = self._pixels["valid"]
        for first in range(0, len(texts), _VALIDATION_ROWS):
            numbers = np.arange(first, first + _VALIDATION_ROWS)
            rows = np.minimum(numbers, len(texts) - 1)
            yield {
                "images": np.stack([pixels[int(n)] for n in rows]),
                "tokens": encoded.tokens[rows][:, None],
                "lengths": encoded.lengths[rows][:, None],
                "weight": (numbers < len(texts)).astype(np.float32),
            }

    def validate(self, model: Any, extra: Any) -> Iterator[tuple[str, float]]:
        """Yield the loss of the validation images, and the scores of greedy captions of some."""
        totals = [self._loss(model, place_batch(batch, self._mesh)) for batch in self._validation_batches()]
        loss = sum(float(total) for total, _ in totals) / max(1.0, sum(float(weight) for _, weight in totals))
        yield "valid_loss", loss
        count = min(len(self._valid), _CAPTIONED_WHILE_TRAINING)
        pixels = [self._pixels["valid"][n] for n in range(count)]
        captions = CaptionGenerator(model, self.processor, beam_size=1)(pixels)
        for name, value in caption_scores(captions, self._valid.captions[:count]):
            yield f"valid_{name}", value
        self._note("sample: " + captions[0])

    def score(self, kept_model: Any, totals: Totals) -> tuple[dict[str, Any], list[str]]:
        """Score the kept model's captions on the test images, and as a baseline on those of other images."""
        task = self._settings
        generate = CaptionGenerator(
            kept_model, self.processor, beam_size=task.beam_size, alpha=task.length_penalty
        )
        captions, references = generate(self._pixels["test"]), self._test.captions
        results: dict[str, Any] = dict(caption_scores(captions, references))
        # Captions that ignore the image score equally well against another image's references.
        order = np.roll(np.random.default_rng(0).permutation(len(captions)), 1)
        partners = np.empty(len(captions), int)
        partners[np.roll(order, -1)] = order
        results["cider_shuffled"] = cider_d(captions, [references[n] for n in partners])
        results |= {
            "tokens_per_second": totals.weight / max(totals.seconds, 1e-9),
            "test_images": len(captions),
            "different_captions": len(set(captions)),
        }
        lines: list[str] = []
        for number in range(0, len(captions), max(1, len(captions) // 6)):
            lines += ["", f"caption    {captions[number]}", f"reference  {references[number][0]}"]
        lines += [
            "",
            "BLEU-1 to 4 " + ", ".join(f"{results[f'bleu{order}']:.1f}" for order in range(1, 5)),
            f"CIDEr-D {results['cider']:.3f}, with shuffled images {results['cider_shuffled']:.3f}",
            f"{results['different_captions']:,} different captions of {len(captions):,} images",
        ]
        return results, lines


def prepare(config, objective, *, mesh, stored, starts, note):
    """Open the data, train or read the tokenizer, and make batches; see `TaskEntry.prepare`."""
    splits = on_first_then_every_process(lambda: captioned_data.open_splits(config, note))
    processor = shared_processor(
        ImageTextProcessor,
        lambda: captioned_data.make_processor(config, splits[0], starts, config.task.max_caption_length),
        stored,
    )
    return on_every_process(lambda: CaptioningTask(config, splits, processor, mesh, note))


@dataclasses.dataclass(frozen=True)
class TrainedCaptioner(TrainedImageEncoder):
    """A captioner from a run or a published folder."""

    @functools.cached_property
    def _generators(self) -> dict[tuple[int, float], CaptionGenerator]:
        return {}

    def generator(self, *, beam_size: int | None = None, alpha: float | None = None) -> CaptionGenerator:
        """Return a `CaptionGenerator` for this model.

        Args:
          beam_size: See `beam_search`; None uses the run's.
          alpha: See `beam_search`; None uses the run's.
        """
        task = CaptioningConfig() if self.config is None else self.config.task
        beam_size = task.beam_size if beam_size is None else beam_size
        alpha = task.length_penalty if alpha is None else alpha
        if (beam_size, alpha) not in self._generators:
            self._generators[beam_size, alpha] = CaptionGenerator(
                self.model, self.processor, beam_size=beam_size, alpha=alpha
            )
        return self._generators[beam_size, alpha]

    def caption(
        self, images: Sequence[Any], *, beam_size: int | None = None, alpha: float | None = None
    ) -> list[str]:
        """Return a caption of each image.

        Args:
          images: List of paths, Pillow images or uint8 arrays.
          beam_size: See `generator`.
          alpha: See `generator`.

        Raises:
          UserError: `images` is empty or a single image, or an image cannot be read.
        """
        check_image_list(images)
        generate = self.generator(beam_size=beam_size, alpha=alpha)
        return generate(ProcessedImages(images, self.image_processor))

    def align(
        self, image: Any, *, beam_size: int | None = None, alpha: float | None = None
    ) -> CaptionAttention:
        """Return the caption of an image, with the patches that each word attends to; see `CaptionAttention`.

        Args:
          image: Path, Pillow image or uint8 array.
          beam_size: See `generator`.
          alpha: See `generator`.

        Raises:
          UserError: The image cannot be read.
        """
        return self.generator(beam_size=beam_size, alpha=alpha).align(self.image_processor.pixels(image))


ENTRY = TaskEntry(
    "captioning",
    CaptioningConfig,
    KIND,
    {"drawn": drawn, "pairs": pairs, "fine_tune": fine_tune},
    ImageTextProcessor,
    abstract_batch,
    objective,
    prepare,
    TrainedCaptioner,
    check_mesh=check_mesh,
)
