"""Limits of what is read and configured, so that a file or a flag cannot exhaust time or memory.

Each limit is far above anything that is published or trained, and an environment variable raises it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Limit:
    """The largest value that is accepted of something.

    Attributes:
      name: Name in the environment variable TRANSFORMER_JAX_MAX_<name>.
      default: The value without the variable.
    """

    name: str
    default: int

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"TRANSFORMER_JAX_MAX_{self.name}"

    @property
    def value(self) -> int:
        """The limit.

        Raises:
          UserError: The environment variable is not a positive integer.
        """
        text = os.environ.get(self.variable, str(self.default))
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{self.variable} {text!r} is not a positive integer")
        return int(text)

    def check(self, value: float, what: str) -> None:
        """Check that a value is not above the limit.

        Args:
          value: The value.
          what: Name of the value and, for files, the path; the beginning of the error message.

        Raises:
          UserError: It is above the limit.
        """
        if value > self.value:
            raise UserError(
                f"{what} {value:,} is above the limit of {self.value:,}; set {self.variable} to raise it"
            )


# Published models have up to 126 layers (Llama 3.1 405B); tables of tensors are read layer by layer.
LAYERS = Limit("LAYERS", 2_000)
# Widths up to 53,248 are published (the feed-forward layers of Llama 3.1 405B).
WIDTH = Limit("WIDTH", 1_000_000)
# Vocabularies up to 256,000 tokens are published, and images have up to 21,843 classes (ImageNet-21k).
VOCABULARY = Limit("VOCABULARY", 10_000_000)
CLASSES = Limit("CLASSES", 1_000_000)
# Texts of up to 10 million tokens are published (Llama 4).
LENGTH = Limit("LENGTH", 100_000_000)
# Height and width of a model's images; 1,024 is the largest published.
IMAGE_SIDE = Limit("IMAGE_SIDE", 16_384)
# Rows, tokens or images of a batch over all devices.
BATCH = Limit("BATCH", 100_000_000)
# Prototypes of DINO: 262,144 in DINOv2.
PROTOTYPES = Limit("PROTOTYPES", 10_000_000)
# Samples per prompt, beams and hypotheses, all of which are decoded together.
SAMPLES = Limit("SAMPLES", 10_000)
# Pixels of an image file after decoding: a file of a few kilobytes can claim billions.
PIXELS = Limit("PIXELS", 100_000_000)
# Bytes of an image file: an archive of a few kilobytes can claim a terabyte.
IMAGE_BYTES = Limit("IMAGE_BYTES", 2**30)
# Samples of a sound file.
SAMPLES_OF_SOUND = Limit("SAMPLES_OF_SOUND", 2_000_000_000)
# Nodes of a graph; arrays of shortest paths grow with its square.
NODES = Limit("NODES", 2_048)
# Values of a feature of nodes or edges, each of which is a column of a one-hot vector; elements have 119.
FEATURE_VALUES = Limit("FEATURE_VALUES", 1_023)
# Processes that decode images.
WORKERS = Limit("WORKERS", 1_024)
# Bytes of a JSON file; the largest published ones are tokenizers of 35 MB.
JSON_BYTES = Limit("JSON_BYTES", 256 * 2**20)
# Bytes of a file of text or tables: twice the English Wikipedia.
FILE_BYTES = Limit("FILE_BYTES", 50 * 2**30)
# Bytes that a file unpacks to per byte; text compresses about 3 to 5 times, tables up to 50 times.
INFLATION = Limit("INFLATION", 200)
# Characters of a line, which is encoded as one text.
LINE_CHARACTERS = Limit("LINE_CHARACTERS", 10_000_000)
# Characters without white space; the time of byte-pair encoding is quadratic in the length of a word.
WORD_CHARACTERS = Limit("WORD_CHARACTERS", 100_000)

# The limit of each config field of this name.
FIELDS: Mapping[str, Limit] = {
    **dict.fromkeys(("layers", "encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(
        ("width", "hidden", "feed_forward", "heads", "kv_heads", "head_width", "embedding_width"), WIDTH
    ),
    **dict.fromkeys(("decoder_width", "decoder_heads", "projection_hidden", "bottleneck"), WIDTH),
    **dict.fromkeys(("vocab_size", "vocab_multiple", "token_types"), VOCABULARY),
    **dict.fromkeys(("max_length", "context", "max_answer_length", "stride"), LENGTH),
    **dict.fromkeys(("image_size", "size", "patch_size", "local_crop_size", "padding"), IMAGE_SIDE),
    **dict.fromkeys(("batch_size", "batch_tokens", "accumulation", "average", "buckets"), BATCH),
    **dict.fromkeys(("beam_size", "local_crops", "registers", "channels", "convolutions"), SAMPLES),
    "classes": CLASSES,
    **dict.fromkeys(("max_nodes", "max_degree", "max_distance", "edge_hops"), NODES),
    "state_width": WIDTH,
    "actions": CLASSES,
    "max_steps": LENGTH,
    "prototypes": PROTOTYPES,
    "workers": WORKERS,
}
# Counts that only take time, such as steps, must fit in the 32-bit integers of the training state.
_LARGEST_COUNT = 2**31 - 1


def check_seed(seed: int) -> None:
    """Check that a seed has 32 bits, because JAX would ignore further bits.

    Raises:
      UserError: It is negative or larger.
    """
    if not 0 <= seed < 2**32:
        raise UserError(f"`seed` {seed} must be at least 0 and below 2^32")


def check_values(config: Any) -> None:
    """Check that the numbers of a config dataclass are finite and within their limits.

    Raises:
      UserError: A number is NaN or infinite, or above its limit.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"`{field.name}` {value} is not a finite number")
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if field.name in FIELDS:
            FIELDS[field.name].check(value, f"`{field.name}`")
        elif abs(value) > _LARGEST_COUNT and field.name != "seed":
            raise UserError(f"`{field.name}` {value:,} does not fit in 32 bits")
