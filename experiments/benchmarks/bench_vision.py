"""Compare vision transformers with `transformers` on torch, and measure the speed of the loader.

    python -m experiments.benchmarks.bench_vision [--rounds 5] [--onnx] [--json]

Training: ViT-Ti with patches of 4 on 64 images of 32 x 32 pixels, AdamW, from prepared arrays. Inference: ViT-B
with patches of 16 on 8 images of 224 x 224 pixels. All sides use float32 and all cores. Each side runs in a
separate process, and their measurements alternate. Ratios are this package's median throughput over the
other's. The loader alone makes batches of 128 augmented images of 32 x 32 pixels as in the recipe for CIFAR-10,
in one thread and in worker processes. During training, the share of a step's time is measured that is spent
waiting for the next batch: of small images in memory, of DINO's crops of them, and of photographs in JPEG files
that worker processes decode. Needs torch and transformers, and for `--onnx` onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.bench_encoder import OPTIMIZER
from experiments.benchmarks.training_step import our_stepper, torch_stepper
from transformer_jax.commands.interleaved_rounds import compare, print_rates, processor

ROWS, CLASSES = 64, 10
LARGE_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 5
    """Measurements per side."""
    onnx: bool = False
    """Measure ONNX Runtime as a third side of inference."""
    json: bool = False
    """Print a JSON object as the last line."""


def small_images() -> tuple[np.ndarray, np.ndarray]:
    """Return (images (ROWS, 32, 32, 3) uint8, labels (ROWS,))."""
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(ROWS, 32, 32, 3), dtype=np.uint8), rng.integers(CLASSES, size=ROWS)


def large_images() -> np.ndarray:
    """Return normalized images (LARGE_ROWS, 224, 224, 3) float32."""
    return np.random.default_rng(1).normal(size=(LARGE_ROWS, 224, 224, 3)).astype(np.float32)


def our_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """Return jobs that train for one step and compute the logits of the large images."""
    import jax
    import jax.numpy as jnp

    from transformer_jax import pretrained
    from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
    from transformer_jax.tasks.vision.image_classification import ImageClasses, ImageClassificationConfig
    from transformer_jax.training.trained_model import make_model

    images, labels = small_images()
    batch = {
        "images": images,
        "target": np.eye(CLASSES, dtype=np.float32)[labels],
        "weight": np.ones(ROWS, np.float32),
    }
    small = make_model(ViTClassifier, ViTConfig.preset("ti4", classes=CLASSES))
    step = our_stepper(small, ImageClasses(ImageClassificationConfig(label_smoothing=0.0)), **OPTIMIZER)
    model, large = pretrained.load(folder)[0].for_inference(), jnp.asarray(large_images())
    logits = jax.jit(lambda model, images: model(images))
    return {"training": lambda: step(batch), "inference": lambda: np.asarray(logits(model, large))}


def torch_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """Return jobs that train `transformers` for one step and compute the logits of the large images."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    images, labels = small_images()
    small_pixels = torch.tensor((images.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5, dtype=torch.float32)
    sizes: dict[str, Any] = dict(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=32,
        patch_size=4, num_labels=CLASSES,
    )  # fmt: skip
    config = ViTConfig(**sizes)
    step = torch_stepper(ViTForImageClassification(config), rate=OPTIMIZER["rate"])
    large = ViTForImageClassification.from_pretrained(folder).eval()
    pixels = torch.tensor(large_images().transpose(0, 3, 1, 2)).contiguous()

    def infer() -> np.ndarray:
        with torch.inference_mode():
            return large(pixel_values=pixels).logits.numpy()

    return {
        "training": lambda: step(pixel_values=small_pixels, labels=torch.tensor(labels)),
        "inference": infer,
    }


def onnx_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """Return a job that computes the logits of the large images with ONNX Runtime."""
    import onnxruntime
    import torch
    from transformers import ViTForImageClassification

    model = ViTForImageClassification.from_pretrained(folder, attn_implementation="eager").eval()
    pixels = large_images().transpose(0, 3, 1, 2).copy()
    path = pathlib.Path(tempfile.mkdtemp()) / "model.onnx"
    torch.onnx.export(model, (torch.tensor(pixels),), str(path), input_names=["pixel_values"], dynamo=True)
    session = onnxruntime.InferenceSession(str(path))
    return {"inference": lambda: session.run(None, {"pixel_values": pixels})[0]}


def write_weights(folder: str) -> None:
    """Write random weights of ViT-B/16 as a published folder."""
    from transformer_jax.data.tokenizers.image_processor import ImageProcessor
    from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    config = ViTConfig.preset("b16", classes=1_000)
    labels = tuple(str(number) for number in range(1_000))
    save(folder, make_model(ViTClassifier, config), ImageProcessor(224, labels=labels))


def loaded_per_second(workers: int, seconds: float = 10.0) -> float:
    """Measure the images per second of the loader for pixels in memory.

    Args:
      workers: Number of worker processes; 0 means one thread of this process.
      seconds: Duration of the measurement.
    """
    from transformer_jax.data.batches.image_batches import LabeledViews
    from transformer_jax.data.batches.row_batches import RowBatches
    from transformer_jax.tasks.vision.data import ImagesInMemory, augmentation_of
    from transformer_jax.tasks.vision.image_classification import images

    task = images().task
    pixels = np.random.default_rng(0).integers(256, size=(10_000, 32, 32, 3), dtype=np.uint8)
    labels = np.zeros(len(pixels), np.int32)
    views = LabeledViews(labels, CLASSES, size=32, augmentation=augmentation_of(task))
    batches = RowBatches(ImagesInMemory(pixels), task.batch_size, 0, views=views, workers=workers).from_step(0)
    for _ in range(20):
        next(batches)  # These batches were prepared before the measurement.
    start_time, count = time.perf_counter(), 0
    while time.perf_counter() - start_time < seconds:
        next(batches)
        count += task.batch_size
    return count / (time.perf_counter() - start_time)


# (task, whether the images are photographs, changes of the recipe for images) by name.
WAITING: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "small": ("image_classification", False, {}),
    "crops": ("self_distillation", False, dict(batch_size=64)),
    "photographs": ("image_classification", True, dict(preset="ti16", batch_size=32, crop=0.3, padding=0)),
}


def write_images(folder: pathlib.Path, photographs: bool) -> None:
    """Write random images in two classes: 400 of 32 x 32 pixels, or 256 JPEG files of 320 x 256 pixels."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(256 if photographs else 400):
        pixels = rng.integers(256, size=(8, 10, 3) if photographs else (32, 32, 3), dtype=np.uint8)
        class_folder = folder / "ab"[number % 2]
        class_folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels)
        if photographs:
            image.resize((320, 256), Image.Resampling.BICUBIC).save(class_folder / f"{number}.jpg", quality=90)
        else:
            image.save(class_folder / f"{number}.png")


def share_waited(name: str, steps: int = 20, first: int = 30) -> float:
    """Measure the share of a run's time in which it waits for batches.

    Args:
      name: Name in `WAITING`.
      steps: Number of measured steps.
      first: Number of steps before the measurement, which use up the batches prepared during compilation.
    """
    import jax

    from transformer_jax import configure
    from transformer_jax.training.driver import begin
    from transformer_jax.training.step import make_train_step
    from transformer_jax.training.task import entry_of
    from transformer_jax.training.trained_model import make_model, module_of

    task_name, photographs, changes = WAITING[name]
    with tempfile.TemporaryDirectory() as folder:
        write_images(pathlib.Path(folder), photographs)
        config = configure(task_name, "images", data=folder, **changes)
        entry = entry_of(config)
        objective = entry.objective(config, config.model)
        task: Any = entry.prepare(config, objective, mesh=None, stored=None, starts=(), note=lambda line: None)
        model = make_model(module_of(entry, task.model_config), task.model_config)
        state, optimizer, _ = begin(objective, config, model, None)
        train_step = make_train_step(objective, optimizer)
        batches = task.batches.from_step(0)
        waiting = training = 0.0
        for step in range(first + steps):
            start_time = time.perf_counter()
            batch = next(batches)
            batch_time = time.perf_counter()
            state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
            if step >= first:
                waiting += batch_time - start_time
                training += time.perf_counter() - batch_time
        batches.close()  # The workers must stop before the folder is deleted.
    return waiting / (waiting + training)


def main() -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        write_weights(f"{folder}/weights")
        sides: dict[str, Callable] = {"ours": our_jobs, "torch": torch_jobs}
        report = compare({"training": 2}, sides, f"{folder}/weights", arguments.rounds)
        if arguments.onnx:
            sides["onnx"] = onnx_jobs
        report |= compare({"inference": 1}, sides, f"{folder}/weights", arguments.rounds)
    amounts = {"training": ROWS, "inference": LARGE_ROWS}
    summary: dict[str, Any] = {"processor": processor(), **print_rates(report, amounts, "images")}
    logits = report["inference"]["results"]
    summary["largest_difference"] = float(np.abs(logits["ours"] - logits["torch"]).max())
    for workers in (0, os.cpu_count() or 1):
        summary[f"loaded_{workers}"] = loaded_per_second(workers)
        print(f"loader       {workers} worker processes {summary[f'loaded_{workers}']:9.1f} images/s")
    for name in WAITING:
        summary[f"waited_{name}"] = share_waited(name)
        print(f"waiting      {name:<12} {100 * summary[f'waited_{name}']:5.2f} % of a step")
    print(f"largest difference of the logits: {summary['largest_difference']:.1e}; {summary['processor']}")
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
