"""k-NN accuracy of any vision encoder's features: nothing is trained."""

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


def probe_by_neighbours(config: RunConfig, run_dir: pathlib.Path, *, neighbours: int = 20) -> list[str]:
    """Scores the start of a config by the votes of nearest training images, and writes `results.json`.

    Args:
      config: of image classification, with one start.
      run_dir: folder for `results.json`; it must hold nothing else.
      neighbours: that vote, see `knn_accuracy`.

    Returns:
      Lines that a command prints.

    Raises:
      UserError: a start that reads no images, images that cannot be read, or a folder with files in it.
    """
    began = time.perf_counter()
    check_free(run_dir, {"results.json"})
    trained = load(config.start[0].folder)
    if not isinstance(trained, TrainedImageEncoder):
        raise UserError(f"`start` {config.start[0].folder} holds a {type(trained.model).__name__}: no images")
    image_data.check(config, config.model)
    own = trained.processor.in_size(config.task.size or trained.processor.size)
    # The config's mean and deviation are the start's unless others were given.
    own = dataclasses.replace(own, mean=config.task.mean, std=config.task.std)
    trained = dataclasses.replace(trained, processor=own)
    splits = image_data.open_splits(config.task)
    tests = splits.tests or {"valid": splits.valid}
    known = trained.embed_images(splits.train)
    images, scores, spread = len(splits.train), {}, {}
    for name, own in tests.items():
        asked = trained.embed_images(own)
        images += len(own)
        votes = knn_votes(known, splits.train.labels, asked, len(own.classes), k=neighbours)
        scores[name] = dict(image_scores(votes, own.labels))
        spread[name] = feature_spread(asked)
    first = next(iter(tests))
    seconds = time.perf_counter() - began

    def of_tests(values: dict[str, float]) -> Any:
        return values if len(tests) > 1 else values[first]

    top1, top5 = ({name: own[metric] for name, own in scores.items()} for metric in ("top1", "top5"))
    results: dict[str, Any] = {
        "knn_accuracy": of_tests(top1),
        "top1": of_tests(top1),
        "top5": of_tests(top5),
        "feature_spread": of_tests(spread),
        "parameters": trained.encoder.parameter_count,
        "images_per_second": images / seconds,
        "seconds": seconds,
        "device": jax.devices()[0].device_kind,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "results.json", results)
    # What was not 8-bit RGB is known now that all were decoded.
    converted = [image_data.converted_note(own, complete=True) for own in (splits.train, *tests.values())]
    notes = [*converted, image_data.few_classes_note(len(splits.train.classes))]
    scored = [f"{name:<12} k-NN accuracy {top1[name]:.2f}" for name in tests]
    return [line for line in notes if line is not None] + scored
