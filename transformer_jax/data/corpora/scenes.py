"""Drawn scenes with captions, made at run time: two colored shapes, one left of or above the other."""

from __future__ import annotations

import functools
import itertools

import numpy as np
from PIL import Image, ImageDraw

from transformer_jax.data.corpora.captioned_images import CaptionedImages
from transformer_jax.data.corpora.image_sets import ImageSet

COLORS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40),
    "purple": (150, 60, 190), "orange": (245, 140, 30),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star")
# Relation of the first shape to the second, and of the second to the first, by arrangement.
RELATIONS = {"beside": ("left of", "right of"), "stacked": ("above", "below")}
SIZE = 32
# Scenes are drawn larger and reduced, which smooths their edges.
_SCALE = 4
_TEST_SHARE, _VALID_SHARE = 0.2, 0.1


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, center: np.ndarray, radius: float, color: str) -> None:
    x, y = center
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLORS[color])
    elif shape == "square":
        draw.rectangle((x - radius, y - radius, x + radius, y + radius), fill=COLORS[color])
    else:
        corners = 3 if shape == "triangle" else 10
        angles = 2 * np.pi * np.arange(corners) / corners - np.pi / 2
        radii = radius * np.where((np.arange(corners) % 2 == 1) & (shape == "star"), 0.45, 1.2)
        points = np.stack([x + radii * np.cos(angles), y + radii * np.sin(angles)], axis=1)
        draw.polygon([(float(px), float(py)) for px, py in points], fill=COLORS[color])


def draw_scene(
    objects: tuple[tuple[str, str], tuple[str, str]], arrangement: str, rng: np.random.Generator
) -> np.ndarray:
    """Draw two shapes on a light background.

    Args:
      objects: (color, shape) of the first and the second shape.
      arrangement: "beside" draws the first left of the second, "stacked" above it.
      rng: Random generator of the background, positions and sizes.

    Returns:
      (SIZE, SIZE, 3) uint8.
    """
    side = SIZE * _SCALE
    background = tuple(int(v) for v in rng.integers(225, 256, 3))
    image = Image.new("RGB", (side, side), background)
    draw = ImageDraw.Draw(image)
    for number, (color, shape) in enumerate(objects):
        along, across = side * (0.27 + 0.46 * number), side * 0.5
        jitter = rng.uniform(-0.06, 0.06, 2) * side + np.array([0, rng.uniform(-0.15, 0.15) * side])
        center = np.array([along, across]) + jitter
        radius = side * rng.uniform(0.11, 0.17)
        _draw_shape(draw, shape, center if arrangement == "beside" else center[::-1], radius, color)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def captions_of(objects: tuple[tuple[str, str], tuple[str, str]], arrangement: str) -> list[str]:
    """Return three captions of a scene, see `draw_scene`."""
    first, second = (" ".join(item) for item in objects)
    before, after = RELATIONS[arrangement]
    return [
        f"a {first} {before} a {second}".replace("a orange", "an orange"),
        f"there is a {second} {after} a {first}".replace("a orange", "an orange"),
        f"the {first} is {before} the {second}",
    ]


@functools.cache
def scenes(seed: int = 0) -> tuple[CaptionedImages, CaptionedImages, CaptionedImages]:
    """Draw (training, validation, test) scenes; each scene is in exactly one split.

    A scene is an ordered pair of shapes of different colors in one arrangement.

    Args:
      seed: Seed of the drawing and of the splits.
    """
    rng = np.random.default_rng(seed)
    objects = list(itertools.product(COLORS, SHAPES))
    layouts = [
        (pair, arrangement)
        for pair in itertools.permutations(objects, 2)
        for arrangement in RELATIONS
        if pair[0][0] != pair[1][0]
    ]
    layouts = [layouts[n] for n in rng.permutation(len(layouts))]
    images = np.stack([draw_scene(*scene, rng) for scene in layouts])
    names = ["-".join(" ".join(item) for item in pair) + f" {arrangement}" for pair, arrangement in layouts]
    complete = CaptionedImages(
        ImageSet("scenes", names, np.zeros(len(names)), [""], images),
        [captions_of(*scene) for scene in layouts],
    )
    test_count, valid_count = (round(share * len(layouts)) for share in (_TEST_SHARE, _VALID_SHARE))
    numbers = np.arange(len(layouts))
    return (
        complete.select(numbers[test_count + valid_count :]),
        complete.select(numbers[test_count : test_count + valid_count]),
        complete.select(numbers[:test_count]),
    )
