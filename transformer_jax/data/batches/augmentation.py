"""Augmentation of training images with Pillow, as pure functions of the image and a random generator."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Augment one training image, in the order of the fields.

    Attributes:
      crop: Minimum area of a random crop, as a fraction of the image (Szegedy et al. 2015, section 6); 1
        disables it.
      padding: Black pixels added around the image before it is cropped to its size at a random position.
      flip: Flip the image horizontally with probability 1/2.
      rotation: Maximum angle of a random rotation in degrees.
      color_jitter: Strength of random changes of brightness and contrast; saturation has half of it, hue a
        quarter.
      color_jitter_rate: Probability of these changes.
      randaugment: Number of RandAugment operations (Cubuk et al. 2020).
      magnitude: Magnitude of these operations, 0 to 10.
      grayscale: Probability of a conversion to grayscale (Grill et al. 2020, BYOL, appendix B).
      blur: Probability of a Gaussian blur (BYOL, appendix B).
      solarize: Probability of inverting bright pixels (BYOL, appendix B).
      erasing: Probability of replacing a rectangle by noise (Zhong et al. 2020).
      max_crop: Maximum area of a random crop.
    """

    crop: float = 1.0
    padding: int = 0
    flip: bool = False
    rotation: float = 0.0
    color_jitter: float = 0.0
    color_jitter_rate: float = 1.0
    randaugment: int = 0
    magnitude: float = 9.0
    grayscale: float = 0.0
    blur: float = 0.0
    solarize: float = 0.0
    erasing: float = 0.0
    max_crop: float = 1.0

    def __call__(self, pixels: np.ndarray, size: int, rng: Rng) -> np.ndarray:
        """Augment pixels (height, width, 3) uint8 and return (size, size, 3) uint8."""
        if self.crop < 1 or self.max_crop < 1:
            pixels = random_crop(pixels, size, (self.crop, self.max_crop), rng)
        elif pixels.shape[:2] != (size, size):
            pixels = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
        if self.padding:
            top, left = rng.integers(2 * self.padding + 1, size=2)
            border = ((self.padding, self.padding),) * 2 + ((0, 0),)
            pixels = np.pad(pixels, border)[top : top + size, left : left + size]
        if self.flip and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        if (
            self.rotation or self.color_jitter or self.randaugment or self.grayscale or self.blur
            or self.solarize
        ):  # fmt: skip
            image = Image.fromarray(np.ascontiguousarray(pixels))
            if self.rotation:
                angle = rng.uniform(-self.rotation, self.rotation)
                image = image.rotate(angle, Image.Resampling.BILINEAR)
            if self.color_jitter and (self.color_jitter_rate == 1 or rng.random() < self.color_jitter_rate):
                image = jitter_colors(image, self.color_jitter, rng)
            for _ in range(self.randaugment):
                image = rand_augment(image, self.magnitude, rng)
            if self.grayscale and rng.random() < self.grayscale:
                image = ImageOps.grayscale(image).convert("RGB")
            if self.blur and rng.random() < self.blur:
                # The paper's kernel is a tenth of 224 pixels wide, with a standard deviation of 0.1 to 2.
                image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0) * max(size, 32) / 224))
            if self.solarize and rng.random() < self.solarize:
                image = ImageOps.solarize(image, 128)
            pixels = np.asarray(image)
        if self.erasing and rng.random() < self.erasing:
            pixels = erase(pixels, rng)
        return pixels


def random_crop(pixels: np.ndarray, size: int, area: tuple[float, float], rng: Rng) -> np.ndarray:
    """Crop a random part with an aspect ratio between 3:4 and 4:3 and resize it to size x size.

    Args:
      pixels: (height, width, 3) uint8.
      size: Height and width of the result.
      area: Minimum and maximum area of the crop, as fractions of the image.
      rng: Random generator.
    """
    height, width = pixels.shape[:2]
    for _ in range(10):
        crop_area = height * width * rng.uniform(*area)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(crop_area * ratio)), round(math.sqrt(crop_area / ratio))
        if 0 < across <= width and 0 < down <= height:
            break
    else:
        across = down = min(height, width)
    left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
    box = (int(left), int(top), int(left) + across, int(top) + down)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def jitter_colors(image: Image.Image, strength: float, rng: Rng) -> Image.Image:
    """Change brightness, contrast, saturation and hue at random (Grill et al. 2020, BYOL, appendix B).

    Args:
      image: The image.
      strength: Maximum change of brightness and contrast; saturation has half of it, hue a quarter.
      rng: Random generator, also of the order of the changes.
    """
    enhancers: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, None]
    strengths = np.array([strength, strength, strength / 2])
    factors = rng.uniform(np.maximum(0.0, 1 - strengths), 1 + strengths)
    shift = round(255 * rng.uniform(-strength / 4, strength / 4))
    for number in rng.permutation(4):
        if number < 3:
            image = enhancers[number](image).enhance(factors[number])
        elif shift:
            hue, saturation, value = image.convert("HSV").split()
            hue = Image.fromarray((np.asarray(hue).astype(np.int16) + shift).astype(np.uint8))
            image = Image.merge("HSV", (hue, saturation, value)).convert("RGB")
    return image


_GRAY = (128, 128, 128)


def _shear(image: Image.Image, x: float, y: float) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, (1, x, 0, y, 1, 0), Image.Resampling.BILINEAR, fillcolor=_GRAY
    )


def _shift(image: Image.Image, x: float, y: float) -> Image.Image:
    pixels = (1, 0, x * image.width, 0, 1, y * image.height)
    return image.transform(image.size, Image.Transform.AFFINE, pixels, fillcolor=_GRAY)


# Operations by name, functions of an image and a signed strength between -1 and 1 (Cubuk et al. 2020, section
# 3.1; with the ranges of AutoAugment, table 6).
OPERATIONS: dict[str, Any] = {
    "identity": lambda image, v: image,
    "autocontrast": lambda image, v: ImageOps.autocontrast(image),
    "equalize": lambda image, v: ImageOps.equalize(image),
    "rotate": lambda image, v: image.rotate(30 * v, Image.Resampling.BILINEAR, fillcolor=_GRAY),
    "solarize": lambda image, v: ImageOps.solarize(image, round(256 * (1 - abs(v)))),
    "posterize": lambda image, v: ImageOps.posterize(image, 8 - round(4 * abs(v))),
    "color": lambda image, v: ImageEnhance.Color(image).enhance(1 + 0.9 * v),
    "contrast": lambda image, v: ImageEnhance.Contrast(image).enhance(1 + 0.9 * v),
    "brightness": lambda image, v: ImageEnhance.Brightness(image).enhance(1 + 0.9 * v),
    "sharpness": lambda image, v: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * v),
    "shear x": lambda image, v: _shear(image, 0.3 * v, 0),
    "shear y": lambda image, v: _shear(image, 0, 0.3 * v),
    "shift x": lambda image, v: _shift(image, 0.45 * v, 0),
    "shift y": lambda image, v: _shift(image, 0, 0.45 * v),
}


def rand_augment(image: Image.Image, magnitude: float, rng: Rng) -> Image.Image:
    """Apply a random operation of `OPERATIONS` with strength magnitude / 10, in either direction."""
    names = list(OPERATIONS)
    name = names[int(rng.integers(len(names)))]
    strength = magnitude / 10 * (1 if rng.random() < 0.5 else -1)
    return OPERATIONS[name](image, strength)


def erase(pixels: np.ndarray, rng: Rng) -> np.ndarray:
    """Replace a rectangle of 2 to 33 % of the area, with an aspect ratio between 3:10 and 10:3, by noise."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 1 / 3)
        ratio = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        down, across = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < down < height and 0 < across < width:
            top, left = rng.integers(height - down + 1), rng.integers(width - across + 1)
            pixels = pixels.copy()
            noise = rng.integers(256, size=(down, across, pixels.shape[2]), dtype=np.uint8)
            pixels[top : top + down, left : left + across] = noise
            return pixels
    return pixels


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Mix two images into one.

    Attributes:
      mixup: Parameter of the Beta distribution of the images' weights (Zhang et al. 2018); 0 disables it.
      cutmix: Parameter of the Beta distribution of the area of a rectangle of the second image (Yun et al.
        2019); 0 disables it.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def on(self) -> bool:
        """True if images are mixed."""
        return bool(self.mixup or self.cutmix)

    def __call__(self, first: np.ndarray, second: np.ndarray, rng: Rng) -> tuple[np.ndarray, float]:
        """Return (the mixed image, the weight of the first), for images (size, size, 3) uint8."""
        use_cutmix = bool(self.cutmix) and (not self.mixup or rng.random() < 0.5)
        strength = self.cutmix if use_cutmix else self.mixup
        weight = float(rng.beta(strength, strength))
        if not use_cutmix:
            mixed = weight * first.astype(np.float32) + (1 - weight) * second
            return mixed.round().astype(np.uint8), weight
        size = first.shape[0]
        side = round(size * math.sqrt(1 - weight))
        center = rng.integers(size, size=2)
        (top, left), (bottom, right) = np.clip([center - side // 2, center - side // 2 + side], 0, size)
        mixed = first.copy()
        mixed[top:bottom, left:right] = second[top:bottom, left:right]
        return mixed, 1 - (bottom - top) * (right - left) / size**2
