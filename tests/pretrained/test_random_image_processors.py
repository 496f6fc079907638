"""Random files of image processors give the pixels of `transformers`, or are refused in one line."""

import json
import random

import numpy as np
import pytest
from PIL import Image

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError

CLASSES = ["ViTImageProcessor", "DeiTImageProcessor", "BitImageProcessor", "CLIPImageProcessor",
           "SiglipImageProcessor", "ViTFeatureExtractor", "DeiTFeatureExtractor", "ViTImageProcessorFast",
           "CLIPFeatureExtractor", None, "PoolFormerImageProcessor", "MyImageProcessor"]  # fmt: skip
SIZES = [32, 40, [32, 32], {"height": 32, "width": 32}, {"height": 40, "width": 40}, {"shortest_edge": 32},
         {"shortest_edge": 40}, {"shortest_edge": 24}, {"height": 32, "width": 40},
         {"shortest_edge": 32, "longest_edge": 64}]  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    return pytest.importorskip("transformers", reason="parity needs transformers")


def write_folder(folder, seed):
    """Write a random folder and return its model type and number of channels."""
    draw = random.Random(seed)
    config, channels = {}, 1 if draw.random() < 0.1 else 3

    def maybe(name, *values, chance=0.5):
        if draw.random() < chance:
            config[name] = draw.choice(values)

    name = draw.choice(CLASSES)
    if name is not None:
        config["feature_extractor_type" if "Feature" in name else "image_processor_type"] = name
    maybe("size", *SIZES, chance=0.9)
    maybe("crop_size", 32, {"height": 32, "width": 32}, [32, 32], {"height": 48, "width": 48}, chance=0.6)
    maybe("do_center_crop", True, False, None)
    maybe("do_resize", True, True, False, None)
    maybe("do_normalize", True, True, False)
    maybe("do_rescale", True, True, False)
    maybe("rescale_factor", 1 / 255, 0.00392156862745098, 1 / 127.5, chance=0.3)
    maybe("resample", 0, 2, 3)
    maybe("image_mean", 0.45, [0.4] * channels, [0.1, 0.2, 0.3])
    maybe("image_std", 0.3, [0.2] * channels, [0.2, 0.3, 0.4])
    model_type = draw.choice(["vit", "deit", "dinov2"])
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return model_type, channels


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_random_processors_equal_transformers_or_are_refused(transformers, first, tmp_path):
    outcomes = []
    for seed in range(first, first + 100):
        (folder := tmp_path / str(seed)).mkdir()
        model_type, channels = write_folder(folder, seed)
        pixels = np.random.default_rng(seed).integers(0, 256, (12, 20, channels), np.uint8)
        small = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
        for image in (small.resize((80, 48)), small.resize((37, 61)), small.resize((32, 32))):
            try:
                ours = ImageProcessor.open(folder, size=32, channels=channels, model_type=model_type)
                values = (ours.pixels(image) / 255 - np.array(ours.mean)) / np.array(ours.std)
            except UserError as error:
                outcomes.append(str(error))
                continue
            theirs = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            expected = np.asarray(theirs(image, return_tensors="np")["pixel_values"][0]).transpose(1, 2, 0)
            assert values.shape == expected.shape, f"seed {seed}"
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")
            outcomes.append("equal")
    assert outcomes.count("equal") >= 100
    assert not any("\n" in text for text in outcomes)
