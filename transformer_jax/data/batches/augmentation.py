"""Changes of training images, each a pure function of the image and a random generator, over Pillow."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to one training image, in this order.

    Attributes:
      crop: smallest share of the area that a random part of the image has, which is then resized (Szegedy et
        al. 2015, section 6); 1 takes the complete image.
      padding: pixels of black around the image, out of which a part of its size is cut.
      flip: left and right change places, every second time.
      turn: largest angle in degrees that it is turned by.
      colour: strength of changes of brightness and contrast, a half of it saturation, a quarter hue.
      colour_rate: probability of these changes.
      operations, magnitude: number of RandAugment's operations, and how strong they are, of 10 (Cubuk et al.
        2020).
      grey, blur, solarise: probabilities of turning grey, of a Gaussian blur, and of inverting bright pixels
        (Grill et al. 2020, BYOL, appendix B).
      erase: probability of replacing a rectangle by noise (Zhong et al. 2020).
      largest_crop: largest share of the area that a random part has, of which `crop` is the smallest.
    """

    crop: float = 1.0
    padding: int = 0
    flip: bool = False
    turn: float = 0.0
    colour: float = 0.0
    colour_rate: float = 1.0
    operations: int = 0
    magnitude: float = 9.0
    grey: float = 0.0
    blur: float = 0.0
    solarise: float = 0.0
    erase: float = 0.0
    largest_crop: float = 1.0

    def __call__(self, pixels: np.ndarray, size: int, rng: Rng) -> np.ndarray:
        """Pixels (height, width, 3) uint8 -> (size, size, 3) uint8."""
        if self.crop < 1 or self.largest_crop < 1:
            pixels = random_crop(pixels, size, (self.crop, self.largest_crop), rng)
        elif pixels.shape[:2] != (size, size):
            pixels = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
        if self.padding:
            top, left = rng.integers(2 * self.padding + 1, size=2)
            around = ((self.padding, self.padding),) * 2 + ((0, 0),)
            pixels = np.pad(pixels, around)[top : top + size, left : left + size]
        if self.flip and rng.random() < 0.5:
            pixels = pixels[:, ::-1]
        if self.turn or self.colour or self.operations or self.grey or self.blur or self.solarise:
            image = Image.fromarray(np.ascontiguousarray(pixels))
            if self.turn:
                angle = rng.uniform(-self.turn, self.turn)
                image = image.rotate(angle, Image.Resampling.BILINEAR)
            if self.colour and (self.colour_rate == 1 or rng.random() < self.colour_rate):
                image = coloured(image, self.colour, rng)
            for _ in range(self.operations):
                image = rand_augment(image, self.magnitude, rng)
            if self.grey and rng.random() < self.grey:
                image = ImageOps.grayscale(image).convert("RGB")
            if self.blur and rng.random() < self.blur:
                # The paper's kernel has a tenth of the width of 224 pixels, and a deviation of 0.1 to 2.
                image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0) * max(size, 32) / 224))
            if self.solarise and rng.random() < self.solarise:
                image = ImageOps.solarize(image, 128)
            pixels = np.asarray(image)
        if self.erase and rng.random() < self.erase:
            pixels = erased(pixels, rng)
        return pixels


def random_crop(pixels: np.ndarray, size: int, area: tuple[float, float], rng: Rng) -> np.ndarray:
    """A random part of an image with sides between 3:4 and 4:3, resized to size x size."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        pixels_kept = height * width * rng.uniform(*area)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(pixels_kept * ratio)), round(math.sqrt(pixels_kept / ratio))
        if 0 < across <= width and 0 < down <= height:
            break
    else:
        across = down = min(height, width)
    left, top = rng.integers(width - across + 1), rng.integers(height - down + 1)
    box = (int(left), int(top), int(left) + across, int(top) + down)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def coloured(image: Image.Image, strength: float, rng: Rng) -> Image.Image:
    """Brightness and contrast changed by up to `strength`, saturation by a half of it and hue by a quarter, in
    a random order (Grill et al. 2020, BYOL, appendix B)."""
    kinds: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, None]
    strengths = np.array([strength, strength, strength / 2])
    factors = rng.uniform(np.maximum(0.0, 1 - strengths), 1 + strengths)
    shift = round(255 * rng.uniform(-strength / 4, strength / 4))
    for number in rng.permutation(4):
        if number < 3:
            image = kinds[number](image).enhance(factors[number])
        elif shift:
            hue, *others = image.convert("HSV").split()
            hue = Image.fromarray((np.asarray(hue).astype(np.int16) + shift).astype(np.uint8))
            image = Image.merge("HSV", (hue, *others)).convert("RGB")
    return image


_GREY = (128, 128, 128)


def _shear(image: Image.Image, x: float, y: float) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, (1, x, 0, y, 1, 0), Image.Resampling.BILINEAR, fillcolor=_GREY
    )


def _shift(image: Image.Image, x: float, y: float) -> Image.Image:
    pixels = (1, 0, x * image.width, 0, 1, y * image.height)
    return image.transform(image.size, Image.Transform.AFFINE, pixels, fillcolor=_GREY)


# By name, an operation of an image and a signed strength between -1 and 1 (Cubuk et al. 2020, section 3.1;
# their ranges of AutoAugment, table 6).
OPERATIONS: dict[str, Any] = {
    "identity": lambda image, v: image,
    "autocontrast": lambda image, v: ImageOps.autocontrast(image),
    "equalise": lambda image, v: ImageOps.equalize(image),
    "turn": lambda image, v: image.rotate(30 * v, Image.Resampling.BILINEAR, fillcolor=_GREY),
    "solarise": lambda image, v: ImageOps.solarize(image, round(256 * (1 - abs(v)))),
    "posterise": lambda image, v: ImageOps.posterize(image, 8 - round(4 * abs(v))),
    "colour": lambda image, v: ImageEnhance.Color(image).enhance(1 + 0.9 * v),
    "contrast": lambda image, v: ImageEnhance.Contrast(image).enhance(1 + 0.9 * v),
    "brightness": lambda image, v: ImageEnhance.Brightness(image).enhance(1 + 0.9 * v),
    "sharpness": lambda image, v: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * v),
    "shear x": lambda image, v: _shear(image, 0.3 * v, 0),
    "shear y": lambda image, v: _shear(image, 0, 0.3 * v),
    "shift x": lambda image, v: _shift(image, 0.45 * v, 0),
    "shift y": lambda image, v: _shift(image, 0, 0.45 * v),
}


def rand_augment(image: Image.Image, magnitude: float, rng: Rng) -> Image.Image:
    """One of `OPERATIONS`, as strong as magnitude / 10, in either direction."""
    names = list(OPERATIONS)
    name = names[int(rng.integers(len(names)))]
    strength = magnitude / 10 * (1 if rng.random() < 0.5 else -1)
    return OPERATIONS[name](image, strength)


def erased(pixels: np.ndarray, rng: Rng) -> np.ndarray:
    """A rectangle of 2 to 33 % of the area, with sides between 3:10 and 10:3, replaced by noise."""
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 1 / 3)
        ratio = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        down, across = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < down < height and 0 < across < width:
            top, left = rng.integers(height - down + 1), rng.integers(width - across + 1)
            changed = pixels.copy()
            noise = rng.integers(256, size=(down, across, pixels.shape[2]), dtype=np.uint8)
            changed[top : top + down, left : left + across] = noise
            return changed
    return pixels


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Pairs of images in one, with both their labels.

    Attributes:
      mixup: parameter of the Beta distribution that the share of each image is drawn from; 0 for none (Zhang et
        al. 2018).
      cutmix: the same for the area of a rectangle of the other image (Yun et al. 2019).
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    @property
    def on(self) -> bool:
        """Whether images are mixed at all."""
        return bool(self.mixup or self.cutmix)

    def __call__(self, pixels: np.ndarray, other: np.ndarray, rng: Rng) -> tuple[np.ndarray, float]:
        """(an image of two, the share of the first), both (size, size, 3) uint8."""
        cut = bool(self.cutmix) and (not self.mixup or rng.random() < 0.5)
        strength = self.cutmix if cut else self.mixup
        share = float(rng.beta(strength, strength))
        if not cut:
            mixed = share * pixels.astype(np.float32) + (1 - share) * other
            return mixed.round().astype(np.uint8), share
        size = pixels.shape[0]
        side = round(size * math.sqrt(1 - share))
        middle = rng.integers(size, size=2)
        (top, left), (bottom, right) = np.clip([middle - side // 2, middle - side // 2 + side], 0, size)
        mixed = pixels.copy()
        mixed[top:bottom, left:right] = other[top:bottom, left:right]
        return mixed, 1 - (bottom - top) * (right - left) / size**2
