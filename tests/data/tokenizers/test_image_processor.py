"""Images resized for a model against the Pillow processors of `transformers`."""

import numpy as np
import pytest
from PIL import Image

from transformer_jax.data.tokenizers.image_processor import ImageProcessor
from transformer_jax.errors import UserError

SETTINGS = {
    "ViTImageProcessorPil": {"size": {"height": 23, "width": 23}},
    "DeiTImageProcessorPil": {"size": {"height": 31, "width": 31}, "crop_size": 23, "do_center_crop": True},
    "BitImageProcessorPil": {"size": {"shortest_edge": 31}, "crop_size": 23, "do_center_crop": True},
}


def picture(height, width):
    rng = np.random.default_rng(height * width)
    small = rng.integers(256, size=(9, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shape", [(40, 40), (55, 110), (61, 37), (24, 90)])
def test_parity(name, shape):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    theirs = getattr(transformers, name)(**SETTINGS[name])
    config = theirs.to_dict()
    ours = ImageProcessor.of(config)
    image = picture(*shape)
    expected = theirs(Image.fromarray(image), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    pixels = ours.pixels(image)
    normalized = (pixels / 255 - np.array(ours.mean)) / np.array(ours.std)
    np.testing.assert_allclose(normalized, expected, atol=1e-5)


def test_the_center_crop_follows_either_resizing():
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 50:] = 255
    square = ImageProcessor(20, resize="square", resized=40, resampling="nearest")
    shortest = ImageProcessor(20, resize="shortest", resized=40, resampling="nearest")
    # Squashed to 40 columns, the last 15 are white and 10 are cropped on each side; otherwise columns 30 to 50
    # of 80 remain.
    assert square.pixels(wide)[0, :, 0].tolist() == [0] * 15 + [255] * 5
    assert shortest.pixels(wide)[0, :, 0].tolist() == [0] * 20
    for processor in (square, shortest):
        assert ImageProcessor.of(processor.config()) == processor


def test_only_the_center_of_a_strip_is_resized():
    """Resizing the complete strip would give 15 million columns."""
    strip = np.zeros((1, 60_000, 3), np.uint8)
    strip[:, 29_990:30_010] = 255
    processor = ImageProcessor(224, resize="shortest", resized=256)
    assert processor.pixels(strip).min() == processor.pixels(strip.transpose(1, 0, 2)).min() == 255


def test_another_size_keeps_the_ratio_of_crop_and_resizing():
    processor = ImageProcessor(224, resize="shortest", resized=256).at_size(448)
    assert (processor.size, processor.resized) == (448, 512)
    assert ImageProcessor(224).at_size(32).resized == 0


@pytest.mark.parametrize(
    ("kind", "resize"), [("ViTFeatureExtractor", "square"), ("BitImageProcessor", "shortest"), ("", "square")]
)
def test_the_meaning_of_a_numeric_size_depends_on_the_processor(kind, resize):
    config = {"size": 256, "crop_size": 224, "do_center_crop": True, "feature_extractor_type": kind}
    assert ImageProcessor.of(config).resize == resize


def test_a_missing_field_is_that_of_the_class():
    crop = ImageProcessor.of({"image_processor_type": "BitImageProcessor"})
    assert (crop.resize, crop.resized, crop.size, crop.crop) == ("shortest", 224, 224, True)
    assert crop.mean == (0.48145466, 0.4578275, 0.40821073)
    assert ImageProcessor.of({"feature_extractor_type": "DeiTFeatureExtractor"}).resized == 256
    assert ImageProcessor.of({}, model_type="dinov2") == crop
    assert ImageProcessor.of({}).resampling == "bilinear"
    with pytest.raises(
        UserError, match='image processor "MyImageProcessor" is not supported; choose one of ViT'
    ):
        ImageProcessor.of({"image_processor_type": "MyImageProcessor"})


def test_images_that_are_not_resized_must_have_the_size_of_the_model(rng):
    processor = ImageProcessor.of({"do_resize": False}, size=8)
    image = rng.integers(0, 256, (8, 8, 3), np.uint8)
    np.testing.assert_array_equal(processor.pixels(image), image)
    with pytest.raises(
        UserError, match="an image of 8 x 6 pixels is 8 x 6 after resizing, but the model needs 8 x 8"
    ):
        processor.pixels(image[:, :6])
    loaded = ImageProcessor.from_files(processor.files())
    assert loaded == processor


def test_a_crop_larger_than_the_image_is_filled_with_black():
    processor = ImageProcessor(5, resize="none")
    pixels = processor.pixels(np.full((2, 3, 3), 9, np.uint8))
    expected = np.zeros((5, 5, 3), np.uint8)
    expected[2:4, 1:4] = 9
    np.testing.assert_array_equal(pixels, expected)


def test_gray_images_for_a_model_with_one_channel(rng):
    processor = ImageProcessor.of({"image_mean": 0.4, "image_std": [0.2], "size": 8}, channels=1)
    gray = rng.integers(0, 256, (8, 8), np.uint8)
    np.testing.assert_array_equal(processor.pixels(gray), gray[..., None])
    assert processor.batch([gray, gray]).shape == (2, 8, 8, 1)
    with pytest.raises(UserError, match="image_mean has 3 values, but the images have 1 channel"):
        ImageProcessor.of({}, channels=1)


def test_values_that_are_rescaled_by_another_factor():
    processor = ImageProcessor.of({"do_rescale": False, "image_mean": 127.5, "image_std": 51.0})
    np.testing.assert_allclose(processor.mean, 0.5)
    np.testing.assert_allclose(processor.std, 0.2)
