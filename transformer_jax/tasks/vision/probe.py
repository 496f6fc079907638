"""k-NN accuracy of the features of a vision encoder, without training."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import jax

from transformer_jax.errors import UserError
from transformer_jax.evaluation.images import feature_spread, image_scores, knn_votes
from transformer_jax.tasks import load
from transformer_jax.tasks.vision import data as image_data
from transformer_jax.tasks.vision.trained import TrainedImageEncoder
from transformer_jax.training.config import RunConfig
from transformer_jax.training.run_folder import check_free, write_json


def probe_by_neighbors(config: RunConfig, run_dir: pathlib.Path, *, neighbors: int = 20) -> list[str]:
    """Score the start of a config by k-NN classification, and write `results.json`.

    Args:
      config: Config of image classification with one start.
      run_dir: Folder for `results.json`; it must contain no other file.
      neighbors: Number of nearest training images that vote, see `knn_votes`.

    Returns:
      Lines for a command to print.

    Raises:
      UserError: The start is not a vision model, an image cannot be read, or the folder contains other files.
    """
    start_time = time.perf_counter()
    check_free(run_dir, {"results.json"})
    trained = load(config.start[0].folder)
    if not isinstance(trained, TrainedImageEncoder):
        raise UserError(
            f"`start` {config.start[0].folder} holds a {type(trained.model).__name__}, which reads no images"
        )
    image_data.check(config, config.model)
    processor = trained.processor.at_size(config.task.size or trained.processor.size)
    # The recipe copies mean and standard deviation from the start, so these differ only if the user set them.
    processor = dataclasses.replace(processor, mean=config.task.mean, std=config.task.std)
    trained = dataclasses.replace(trained, processor=processor)
    splits = image_data.open_splits(config.task)
    tests = splits.tests or {"valid": splits.valid}
    train_vectors = trained.embed_images(splits.train)
    image_count, top1, top5, spread = len(splits.train), {}, {}, {}
    for name, images in tests.items():
        vectors = trained.embed_images(images)
        image_count += len(images)
        votes = knn_votes(train_vectors, splits.train.labels, vectors, len(images.classes), k=neighbors)
        scores = dict(image_scores(votes, images.labels))
        top1[name], top5[name] = scores["top1"], scores["top5"]
        spread[name] = feature_spread(vectors)
    seconds = time.perf_counter() - start_time
    results: dict[str, Any] = {
        "knn_accuracy": image_data.only_or_all(top1),
        "top1": image_data.only_or_all(top1),
        "top5": image_data.only_or_all(top5),
        "feature_spread": image_data.only_or_all(spread),
        "parameters": trained.encoder.parameter_count,
        "images_per_second": image_count / seconds,
        "seconds": seconds,
        "device": jax.devices()[0].device_kind,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "results.json", results)
    # Conversions are counted while decoding, so the notes come after all images were read.
    image_sets = (splits.train, *tests.values())
    notes = [image_data.conversion_note(images, complete=True) for images in image_sets]
    notes.append(image_data.few_classes_note(len(splits.train.classes)))
    lines = [f"{name:<12} k-NN accuracy {accuracy:.2f}" for name, accuracy in top1.items()]
    return [line for line in notes if line is not None] + lines
