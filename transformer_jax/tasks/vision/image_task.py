"""The base class of the image tasks, which opens training batches and the image sets for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from transformer_jax.data.batches.image_batches import Mixer, Pixels
from transformer_jax.data.batches.row_batches import RowBatches, Views
from transformer_jax.data.corpora.image_sets import ImageSet
from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.distributed.mesh import rows_here
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.data import ImagesInMemory, Splits
from transformer_jax.training.config import RunConfig
from transformer_jax.training.task import Files


class ImageTask:
    """An image task with its image datasets loaded, a `training.task.Task`.

    Args:
      config: Config of the run.
      splits: Image sets of the run.
      processor: Image processor of the run.
      mesh: Mesh that batches are sharded over, or None.
      note: Receives lines of text about the images.
      train: Training images to draw batches from.
      views: Augments a training image.
      evaluated: Image sets to compute scores on, by name.
      mixer: Mixes the images of a batch; None mixes nothing.

    Raises:
      UserError: An image cannot be read.
    """

    unit = "images"

    def __init__(
        self,
        config: RunConfig,
        splits: Splits,
        processor: ImageProcessor,
        mesh: Mesh | None,
        note: Callable[[str], None],
        *,
        train: Pixels,
        views: Views,
        evaluated: Mapping[str, ImageSet],
        mixer: Mixer | None = None,
    ):
        task = config.task
        self.processor, self._mesh, self._task, self._note = processor, mesh, task, note
        self.files: Files = {}
        self.fingerprint = image_data.splits_fingerprint(splits)
        batches = RowBatches(
            train, task.batch_size, config.seed, views=views, finish=mixer,
            workers=image_data.worker_count(task, train),
        )  # fmt: skip
        self.batches = batches.share(
            rows_here(task.batch_size, mesh, micro_batches=config.optimization.accumulation)
        )
        self._splits = evaluated
        self._images = {
            name: image_data.in_memory_if_small(images, processor) for name, images in evaluated.items()
        }
        sources = self._images | {"train": train}
        for name, images in {"train": splits.train, **evaluated}.items():
            if line := image_data.conversion_note(images, complete=isinstance(sources[name], ImagesInMemory)):
                note(line)
        epochs = config.optimization.steps / batches.batches_per_epoch
        self.about = f"{task.batch_size} images a batch, {epochs:.1f} epochs"
