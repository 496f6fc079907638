"""Augmented images are pure functions of images, seed, step and row, in every process."""

import numpy as np
import pytest

from transformer_jax.data.batches.augmentation import OPERATIONS, Augmentation, Mixing, erase, rand_augment
from transformer_jax.data.batches.image_batches import CropViews, LabeledViews, Mixer, OneView
from transformer_jax.data.batches.row_batches import RowBatches
from transformer_jax.tasks.vision.data import ImagesInMemory


def pixels(count=7, size=12):
    return np.random.default_rng(0).integers(256, size=(count, size, size, 3), dtype=np.uint8)


NO_MIXING = Mixing()
ALL_AUGMENTATIONS = Augmentation(
    crop=0.5,
    padding=2,
    flip=True,
    rotation=20,
    color_jitter=0.4,
    randaugment=2,
    grayscale=0.2,
    blur=0.5,
    solarize=0.2,
    erasing=0.5,
)


def batches(workers=0, seed=0, mixing=NO_MIXING, augmentation=ALL_AUGMENTATIONS):
    views = LabeledViews(np.arange(7) % 3, 3, size=8, augmentation=augmentation)
    finish = Mixer(mixing) if mixing.on else None
    return RowBatches(ImagesInMemory(pixels()), 4, seed, views=views, finish=finish, workers=workers)


def assert_equal(batch, expected):
    assert batch.keys() == expected.keys()
    for name, value in batch.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_batch_is_a_function_of_seed_and_step():
    assert_equal(batches()[3], batches()[3])
    assert not np.array_equal(batches()[3]["images"], batches(seed=1)[3]["images"])
    assert not np.array_equal(batches()[3]["images"], batches()[4]["images"])
    batch = batches()[3]
    assert (batch["images"].shape, batch["images"].dtype) == ((4, 8, 8, 3), np.uint8)
    np.testing.assert_array_equal(batch["target"].sum(axis=1), 1)
    stream = batches().from_step(5)
    assert_equal(next(stream), batches()[5])
    assert_equal(next(stream), batches()[6])


@pytest.mark.long
def test_worker_processes_make_the_same_batches():
    stream = batches(workers=2).from_step(2)
    for step in range(2, 6):
        assert_equal(next(stream), batches()[step])


def test_an_epoch_sees_every_image_once():
    unaugmented = RowBatches(ImagesInMemory(pixels(8)), 4, 0, views=OneView(12, Augmentation()))
    seen = np.concatenate([unaugmented[0]["images"], unaugmented[1]["images"]])
    expected = pixels(8)
    assert {image.tobytes() for image in seen} == {image.tobytes() for image in expected}
    assert not np.array_equal(seen, np.concatenate([unaugmented[2]["images"], unaugmented[3]["images"]]))


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(mixup=0.5), Mixing(cutmix=1.0)])
def test_a_share_holds_its_rows_of_the_batch(mixing):
    rows = np.array([False, True, True, False])
    batch, share = batches(mixing=mixing)[1], batches(mixing=mixing).share(rows)[1]
    for name, value in batch.items():
        np.testing.assert_array_equal(share[name][rows], value[rows])
        np.testing.assert_array_equal(share[name][~rows], 0)


def test_mixed_labels_are_weighted_by_the_share_of_pixels():
    images = np.zeros((2, 10, 10, 3), np.uint8)
    images[1] = 200
    for mixing in (Mixing(mixup=1.0), Mixing(cutmix=1.0)):
        for seed in range(20):
            mixed, share = mixing(images[0], images[1], np.random.default_rng(seed))
            assert abs(mixed.mean() / 200 - (1 - share)) < 0.01
    mixed, _ = Mixing(cutmix=1.0)(images[0], images[1], np.random.default_rng(1))
    assert set(np.unique(mixed)) <= {0, 200}


def test_the_default_augmentation_only_resizes():
    image = pixels(1)[0]
    np.testing.assert_array_equal(Augmentation()(image, 12, np.random.default_rng(0)), image)
    assert Augmentation()(image, 8, np.random.default_rng(0)).shape == (8, 8, 3)


def test_each_augmentation_changes_the_image():
    image = pixels(1)[0]
    for options in (
        dict(crop=0.5), dict(padding=3), dict(rotation=30), dict(color_jitter=0.8), dict(randaugment=3),
        dict(grayscale=1.0), dict(blur=1.0), dict(solarize=1.0), dict(erasing=1.0),
    ):  # fmt: skip
        augmented = [Augmentation(**options)(image, 12, np.random.default_rng(seed)) for seed in range(4)]
        assert all(x.shape == image.shape and x.dtype == np.uint8 for x in augmented)
        assert any(not np.array_equal(x, image) for x in augmented), options
    rarely_augmented = [
        Augmentation(color_jitter=0.8, color_jitter_rate=0.25)(image, 12, np.random.default_rng(n))
        for n in range(40)
    ]
    assert 3 < sum(not np.array_equal(x, image) for x in rarely_augmented) < 20
    flipped = {Augmentation(flip=True)(image, 12, np.random.default_rng(n)).tobytes() for n in range(9)}
    assert flipped == {image.tobytes(), np.ascontiguousarray(image[:, ::-1]).tobytes()}


def test_every_operation_keeps_size_and_mode():
    from PIL import Image

    image = Image.fromarray(pixels(1)[0])
    for name, operation in OPERATIONS.items():
        for strength in (-1.0, -0.5, 0.0, 0.5, 1.0):
            output = operation(image, strength)
            assert (output.size, output.mode) == (image.size, "RGB"), name
    assert rand_augment(image, 9, np.random.default_rng(0)).size == image.size


def test_erasing_leaves_the_input_unchanged():
    image = pixels(1)[0]
    original = image.copy()
    Augmentation(erasing=1.0)(image, 12, np.random.default_rng(0))
    np.testing.assert_array_equal(image, original)


def test_every_pixel_can_be_erased():
    rng, image = np.random.default_rng(0), np.zeros((8, 8, 3), np.uint8)
    changed = np.any([erase(image, rng).any(axis=2) for _ in range(200)], axis=0)
    assert changed.all()


def test_local_crops_are_smaller_than_global_crops():
    gradient = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    global_crop, local_crop = Augmentation(crop=0.4), Augmentation(crop=0.05, max_crop=0.4)
    views = CropViews(16, 8, (global_crop, global_crop), local_crop, 5)
    crops = [views(ImagesInMemory(gradient[None]), 0, np.random.default_rng(seed)) for seed in range(20)]
    assert (crops[0]["global_crops"].shape, crops[0]["local_crops"].shape) == ((2, 16, 16, 3), (5, 8, 8, 3))

    def spans(name):
        # The image is a horizontal gradient, so that the range of gray values is the width of a crop.
        return np.array([np.ptp(crop[name].astype(int), axis=(1, 2, 3)) / 255 for crop in crops])

    assert spans("global_crops").mean() > spans("local_crops").mean() + 0.2
    assert (spans("local_crops") ** 2).max() < 0.4 * 4 / 3 + 0.05
