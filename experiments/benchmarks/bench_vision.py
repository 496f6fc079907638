"""Vision transformers here and in `transformers` on torch: training and inference, interleaved; and the loader.

    python -m experiments.benchmarks.bench_vision [--rounds 5] [--onnx] [--json]

Training: ViT-Ti with patches of 4 on 64 images of 32 x 32 pixels, AdamW, from arrays that are ready. Inference:
ViT-B with patches of 16 on 8 images of 224 x 224. All in float32 with all cores. Each side has a process of its
own, and their measurements alternate; medians are compared, and every ratio is this package's throughput over
the peer's. The loader makes batches of 128 changed images of 32 x 32 pixels as the recipe for CIFAR-10 does, in
one thread and in worker processes, with nothing else at work. Beside training it is measured what share of a
step's time is spent waiting for the next batch: of small images in memory, of DINO's crops of them, and of
photographs in JPEG files that are decoded by worker processes. Needs torch and transformers, and for `--onnx`
onnx, onnxscript and onnxruntime.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # the processes of both sides inherit it

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

from experiments.benchmarks.bench_encoder import our_stepper, torch_stepper
from experiments.benchmarks.interleaved_rounds import compare, processor

ROWS, CLASSES = 64, 10
LARGE_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Images a second of this package over those of transformers on torch at the same sizes."""

    rounds: int = 5
    """Measurements of each side."""
    onnx: bool = False
    """ONNX Runtime as a third side of inference."""
    json: bool = False
    """Print one JSON object last on standard output."""


def small_images() -> tuple[np.ndarray, np.ndarray]:
    """(images (ROWS, 32, 32, 3) uint8, labels (ROWS,))."""
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(ROWS, 32, 32, 3), dtype=np.uint8), rng.integers(CLASSES, size=ROWS)


def large_images() -> np.ndarray:
    """(LARGE_ROWS, 224, 224, 3) float32, normalised."""
    return np.random.default_rng(1).normal(size=(LARGE_ROWS, 224, 224, 3)).astype(np.float32)


def our_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """One step of training, and logits of the large images."""
    import jax
    import jax.numpy as jnp

    from transformer_jax import pretrained
    from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
    from transformer_jax.tasks.vision.image_classification import ImageClasses, ImageClassificationConfig

    images, labels = small_images()
    batch = {
        "images": images,
        "target": np.eye(CLASSES, dtype=np.float32)[labels],
        "weight": np.ones(ROWS, np.float32),
    }
    config = ViTConfig.preset("ti4", classes=CLASSES)
    step = our_stepper(ViTClassifier, config, ImageClasses(ImageClassificationConfig(smoothing=0.0)))
    model, large = pretrained.load(folder)[0].for_inference(), jnp.asarray(large_images())
    logits = jax.jit(lambda model, images: model(images))
    return {"training": lambda: step(batch), "inference": lambda: np.asarray(logits(model, large))}


def torch_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """The same in `transformers`."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    images, labels = small_images()
    given = torch.tensor((images.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5, dtype=torch.float32)
    sizes: dict[str, Any] = dict(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=32,
        patch_size=4, num_labels=CLASSES,
    )  # fmt: skip
    config = ViTConfig(**sizes)
    step = torch_stepper(ViTForImageClassification(config))
    large = ViTForImageClassification.from_pretrained(folder).eval()
    pixels = torch.tensor(large_images().transpose(0, 3, 1, 2)).contiguous()

    def infer() -> np.ndarray:
        with torch.inference_mode():
            return large(pixel_values=pixels).logits.numpy()

    return {"training": lambda: step(pixel_values=given, labels=torch.tensor(labels)), "inference": infer}


def onnx_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """Inference by ONNX Runtime."""
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
    """Random weights of ViT-B/16 as a published folder."""
    from transformer_jax.data.tokenizers.image_processor import ImageProcessor
    from transformer_jax.models.vision.vit import ViTClassifier, ViTConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    config = ViTConfig.preset("b16", classes=1_000)
    labels = tuple(str(number) for number in range(1_000))
    save(folder, make_model(ViTClassifier, config), ImageProcessor(224, labels=labels))


def loaded_per_second(workers: int, seconds: float = 10.0) -> float:
    """Images a second that the loader makes of pixels in memory."""
    from transformer_jax.data.batches.image_batches import ImageBatches, LabelledViews
    from transformer_jax.tasks.vision.data import Kept, changed
    from transformer_jax.tasks.vision.image_classification import images

    task = images().task
    pixels = np.random.default_rng(0).integers(256, size=(10_000, 32, 32, 3), dtype=np.uint8)
    labels = np.zeros(len(pixels), np.int32)
    views = LabelledViews(labels, CLASSES, size=32, augmentation=changed(task))
    batches = ImageBatches(Kept(pixels), task.batch_size, 0, views=views, workers=workers).from_step(0)
    for _ in range(20):
        next(batches)  # what was made ahead of time
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(batches)
        count += task.batch_size
    return count / (time.perf_counter() - began)


# By name: the task, whether images are photographs, and what differs from the recipe for images.
WAITING: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "small": ("image_classification", False, {}),
    "crops": ("self_distillation", False, dict(batch_size=64)),
    "photographs": ("image_classification", True, dict(preset="ti16", batch_size=32, crop=0.3, padding=0)),
}


def write_images(folder: pathlib.Path, photographs: bool) -> None:
    """Random images in two classes: 400 of 32 x 32 pixels, or 256 in JPEG files of 320 x 256."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(256 if photographs else 400):
        pixels = rng.integers(256, size=(8, 10, 3) if photographs else (32, 32, 3), dtype=np.uint8)
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(pixels)
        if photographs:
            image.resize((320, 256), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)
        else:
            image.save(place / f"{number}.png")


def share_waited(name: str, steps: int = 20, first: int = 30) -> float:
    """The share of a run's time in which it waits for batches.

    Args:
      name: in `WAITING`.
      steps: that are measured.
      first: steps in front of them: what is made ahead of time while the step is compiled is used up in these.
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
        waited = worked = 0.0
        for step in range(first + steps):
            began = time.perf_counter()
            batch = next(batches)
            given = time.perf_counter()
            state, metrics = train_step(state, batch)
            jax.block_until_ready(metrics)
            if step >= first:
                waited += given - began
                worked += time.perf_counter() - given
        batches.close()  # before the files go
    return waited / (waited + worked)


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    found: dict[str, Any] = {"processor": processor()}
    with tempfile.TemporaryDirectory() as folder:
        write_weights(f"{folder}/weights")
        sides: dict[str, Callable] = {"ours": our_jobs, "torch": torch_jobs}
        report = compare({"training": 2}, sides, f"{folder}/weights", arguments.rounds)
        if arguments.onnx:
            sides["onnx"] = onnx_jobs
        report |= compare({"inference": 1}, sides, f"{folder}/weights", arguments.rounds)
    for job, count in {"training": ROWS, "inference": LARGE_ROWS}.items():
        for side, own in report[job].items():
            if side != "results":
                rate = found[f"{job}_{side}"] = count / own["seconds"]
                print(f"{job:<10} {side:<6} {rate:9.1f} images/s, peak {own['peak'] / 2**30:.2f} GiB")
        found[f"{job}_ratio"] = found[f"{job}_ours"] / found[f"{job}_torch"]
        print(f"{job:<10} ratio to torch {found[f'{job}_ratio']:.2f}")
    if arguments.onnx:
        found["inference_onnx_ratio"] = found["inference_ours"] / found["inference_onnx"]
        print(f"inference  ratio to ONNX Runtime {found['inference_onnx_ratio']:.2f}")
    logits = report["inference"]["results"]
    found["largest_difference"] = float(np.abs(logits["ours"] - logits["torch"]).max())
    for workers in (0, os.cpu_count() or 1):
        found[f"loaded_{workers}"] = loaded_per_second(workers)
        print(f"loader     {workers} worker processes {found[f'loaded_{workers}']:9.1f} images/s")
    for name in WAITING:
        found[f"waited_{name}"] = share_waited(name)
        print(f"waiting    {name:<12} {100 * found[f'waited_{name}']:5.2f} % of a step")
    print(f"largest difference of a logit: {found['largest_difference']:.1e}; {found['processor']}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
