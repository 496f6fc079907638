"""Augmented images: pure functions of (images, seed, step, row), whoever makes them."""

import numpy as np
import pytest

from transformer_jax.data.batches.augmentation import OPERATIONS, Augmentation, Mixing, erased, rand_augment
from transformer_jax.data.batches.image_batches import CropViews, ImageBatches, LabelledViews, Mixer, OneView
from transformer_jax.tasks.vision.data import Kept


def pixels(count=7, size=12):
    return np.random.default_rng(0).integers(256, size=(count, size, size, 3), dtype=np.uint8)


NONE = Mixing()
EVERY = Augmentation(
    crop=0.5,
    padding=2,
    flip=True,
    turn=20,
    colour=0.4,
    operations=2,
    grey=0.2,
    blur=0.5,
    solarise=0.2,
    erase=0.5,
)


def batches(workers=0, seed=0, mixing=NONE, augmentation=EVERY):
    views = LabelledViews(np.arange(7) % 3, 3, size=8, augmentation=augmentation)
    finish = Mixer(mixing) if mixing.on else None
    return ImageBatches(Kept(pixels()), 4, seed, views=views, finish=finish, workers=workers)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_a_batch_is_a_function_of_seed_and_step():
    same(batches()[3], batches()[3])
    assert not np.array_equal(batches()[3]["images"], batches(seed=1)[3]["images"])
    assert not np.array_equal(batches()[3]["images"], batches()[4]["images"])
    found = batches()[3]
    assert (found["images"].shape, found["images"].dtype) == ((4, 8, 8, 3), np.uint8)
    np.testing.assert_array_equal(found["target"].sum(axis=1), 1)
    stream = batches().from_step(5)
    same(next(stream), batches()[5])
    same(next(stream), batches()[6])


@pytest.mark.long
def test_worker_processes_make_the_same():
    stream = batches(workers=2).from_step(2)
    for step in range(2, 6):
        same(next(stream), batches()[step])


def test_an_epoch_sees_every_image_once():
    plain = ImageBatches(Kept(pixels(8)), 4, 0, views=OneView(12, Augmentation()))
    seen = np.concatenate([plain[0]["images"], plain[1]["images"]])
    expected = pixels(8)
    assert {image.tobytes() for image in seen} == {image.tobytes() for image in expected}
    assert not np.array_equal(seen, np.concatenate([plain[2]["images"], plain[3]["images"]]))


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(mixup=0.5), Mixing(cutmix=1.0)])
def test_a_share_of_the_rows_is_that_of_all(mixing):
    here = np.array([False, True, True, False])
    whole, part = batches(mixing=mixing)[1], batches(mixing=mixing).share(here)[1]
    for name, value in whole.items():
        np.testing.assert_array_equal(part[name][here], value[here])
        np.testing.assert_array_equal(part[name][~here], 0)


def test_mixed_labels_are_the_shares_of_the_pixels():
    images = np.zeros((2, 10, 10, 3), np.uint8)
    images[1] = 200
    for mixing in (Mixing(mixup=1.0), Mixing(cutmix=1.0)):
        for seed in range(20):
            mixed, share = mixing(images[0], images[1], np.random.default_rng(seed))
            assert abs(mixed.mean() / 200 - (1 - share)) < 0.01
    cut, _ = Mixing(cutmix=1.0)(images[0], images[1], np.random.default_rng(1))
    assert set(np.unique(cut)) <= {0, 200}


def test_nothing_is_done_by_default():
    image = pixels(1)[0]
    np.testing.assert_array_equal(Augmentation()(image, 12, np.random.default_rng(0)), image)
    assert Augmentation()(image, 8, np.random.default_rng(0)).shape == (8, 8, 3)


def test_each_change_changes():
    image = pixels(1)[0]
    for changes in (
        dict(crop=0.5), dict(padding=3), dict(turn=30), dict(colour=0.8), dict(operations=3), dict(grey=1.0),
        dict(blur=1.0), dict(solarise=1.0), dict(erase=1.0),
    ):  # fmt: skip
        found = [Augmentation(**changes)(image, 12, np.random.default_rng(seed)) for seed in range(4)]
        assert all(x.shape == image.shape and x.dtype == np.uint8 for x in found)
        assert any(not np.array_equal(x, image) for x in found), changes
    rarely = [
        Augmentation(colour=0.8, colour_rate=0.25)(image, 12, np.random.default_rng(n)) for n in range(40)
    ]
    assert 3 < sum(not np.array_equal(x, image) for x in rarely) < 20
    flipped = {Augmentation(flip=True)(image, 12, np.random.default_rng(n)).tobytes() for n in range(9)}
    assert flipped == {image.tobytes(), np.ascontiguousarray(image[:, ::-1]).tobytes()}


def test_every_operation_keeps_size_and_mode():
    from PIL import Image

    image = Image.fromarray(pixels(1)[0])
    for name, operation in OPERATIONS.items():
        for strength in (-1.0, -0.5, 0.0, 0.5, 1.0):
            found = operation(image, strength)
            assert (found.size, found.mode) == (image.size, "RGB"), name
    assert rand_augment(image, 9, np.random.default_rng(0)).size == image.size


def test_an_erased_image_is_another_one():
    image = pixels(1)[0]
    kept = image.copy()
    Augmentation(erase=1.0)(image, 12, np.random.default_rng(0))
    np.testing.assert_array_equal(image, kept)


def test_every_row_and_column_can_be_erased():
    rng, image = np.random.default_rng(0), np.zeros((8, 8, 3), np.uint8)
    changed = np.any([erased(image, rng).any(axis=2) for _ in range(200)], axis=0)
    assert changed.all()


def test_parts_are_smaller_than_wholes():
    grey = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], 64, axis=0).repeat(3, axis=2)
    whole, part = Augmentation(crop=0.4), Augmentation(crop=0.05, largest_crop=0.4)
    views = CropViews(16, 8, (whole, whole), part, 5)
    found = [views(Kept(grey[None]), 0, np.random.default_rng(seed)) for seed in range(20)]
    assert (found[0]["wholes"].shape, found[0]["parts"].shape) == ((2, 16, 16, 3), (5, 8, 8, 3))

    def spans(name):
        # The range of grey says how much of the width a part has.
        return np.array([np.ptp(x.astype(int), axis=(1, 2, 3)) / 255 for one in found for x in [one[name]]])

    assert spans("wholes").mean() > spans("parts").mean() + 0.2
    assert (spans("parts") ** 2).max() < 0.4 * 4 / 3 + 0.05
