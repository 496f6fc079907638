"""Compare a captioner with `VisionEncoderDecoderModel` of `transformers` on torch.

    python -m experiments.benchmarks.bench_caption [--rounds 5] [--json]

A ViT of 6 layers of width 384 on 32 images of 112 pixels in patches of 16, under a GPT-2 of 4 layers of width
384 with a vocabulary of 8,192. Training: a step with AdamW on one caption of 24 tokens for each image.
Captions: beam search with 3 beams and 24 tokens, the end token disabled, so that both sides decode as many
steps. All sides use float32 and all cores. Each side runs in a separate process, and their measurements
alternate. Ratios are this package's median throughput over the other's. Needs torch and transformers.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()  # The processes of both sides inherit the settings.

import dataclasses
import json
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from experiments.benchmarks.bench_encoder import OPTIMIZER
from experiments.benchmarks.training_step import our_stepper, torch_stepper
from transformer_jax.commands.interleaved_rounds import compare, print_rates, processor

ROWS, LENGTH, BEAMS, SIZE, VOCAB_SIZE = 32, 24, 3, 112, 8_192


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Flags of this benchmark."""

    rounds: int = 5
    """Measurements per side."""
    json: bool = False
    """Print a JSON object as the last line."""


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Return (images (ROWS, SIZE, SIZE, 3) uint8, tokens (ROWS, LENGTH + 1))."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(ROWS, SIZE, SIZE, 3), dtype=np.uint8)
    return images, rng.integers(1, VOCAB_SIZE, size=(ROWS, LENGTH + 1))


def write_weights(folder: str) -> None:
    """Write random weights of the captioner as a published folder."""
    from transformer_jax.data.tokenizers.image_processor import ImageProcessor
    from transformer_jax.data.tokenizers.image_text_processor import ImageTextProcessor
    from transformer_jax.models.multimodal.captioner import Captioner, CaptionerConfig
    from transformer_jax.pretrained import save
    from transformer_jax.training.trained_model import make_model

    processor = ImageTextProcessor.train(ImageProcessor(SIZE), ["a"], 257, LENGTH)
    config = CaptionerConfig(
        image_size=SIZE, patch_size=16, width=384, layers=6, heads=6, feed_forward=1_536, vocab_size=VOCAB_SIZE,
        max_length=64, decoder_width=384, decoder_layers=4, decoder_heads=6, decoder_feed_forward=1_536,
    )  # fmt: skip
    save(folder, make_model(Captioner, config), processor)


def our_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """Return jobs that train for one step and caption the images."""
    import functools

    import jax

    from transformer_jax import pretrained
    from transformer_jax.decoding.search import search_sequences
    from transformer_jax.layers.image_normalization import normalize_images
    from transformer_jax.tasks.multimodal.captioning import CaptioningConfig, CaptionLoss

    images, tokens = inputs()
    batch = {
        "images": images,
        "tokens": tokens[:, None].astype(np.int32),
        "lengths": np.full((ROWS, 1), LENGTH + 1, np.int32),
        "weight": np.ones(ROWS, np.float32),
    }
    model, _ = pretrained.load(folder)
    step = our_stepper(model, CaptionLoss(CaptioningConfig(label_smoothing=0.0)), **OPTIMIZER)
    prepared = pretrained.load(folder)[0].for_inference()

    @functools.partial(jax.jit, static_argnames="end")
    def search(model: Any, images: Any, end: int) -> Any:
        cache = model.start(normalize_images(images, (0.5,) * 3, (0.5,) * 3), max_length=LENGTH)
        return search_sequences(
            model, cache, batch=ROWS, begin=0, end=end, max_length=LENGTH, beam_size=BEAMS, alpha=1.0
        ).tokens[:, 0]

    # The end token is outside the vocabulary, so that no hypothesis ends.
    return {
        "training": lambda: step(batch),
        "caption": lambda: np.asarray(search(prepared, images, VOCAB_SIZE)),
    }


def torch_jobs(folder: str) -> dict[str, Callable[[], Any]]:
    """Return jobs that train `transformers` for one step and caption the images."""
    import torch
    from transformers import VisionEncoderDecoderModel

    images, tokens = inputs()
    pixels = torch.tensor((images.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5, dtype=torch.float32)
    ids = torch.tensor(tokens)
    step = torch_stepper(VisionEncoderDecoderModel.from_pretrained(folder), rate=OPTIMIZER["rate"])
    model = VisionEncoderDecoderModel.from_pretrained(folder).eval()

    def caption() -> np.ndarray:
        with torch.inference_mode():
            output = model.generate(
                pixels, num_beams=BEAMS, do_sample=False, max_new_tokens=LENGTH, min_new_tokens=LENGTH,
                eos_token_id=None, pad_token_id=0, decoder_start_token_id=0,
            )  # fmt: skip
        return output[:, 1:].numpy()

    return {
        "training": lambda: step(pixel_values=pixels, decoder_input_ids=ids[:, :-1], labels=ids[:, 1:]),
        "caption": caption,
    }


def main() -> None:
    """Run the benchmark and print the results."""
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        write_weights(f"{folder}/weights")
        sides: dict[str, Callable] = {"ours": our_jobs, "torch": torch_jobs}
        report = compare({"training": 2, "caption": 1}, sides, f"{folder}/weights", arguments.rounds)
    summary: dict[str, Any] = {
        "processor": processor(),
        **print_rates(report, {"training": ROWS, "caption": ROWS}, "images"),
    }
    captions = report["caption"]["results"]
    summary["equal_tokens"] = float((captions["ours"] == captions["torch"]).mean())
    print(f"equal tokens of the captions: {summary['equal_tokens']:.1%}; {summary['processor']}")
    if arguments.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
