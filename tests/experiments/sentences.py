"""Small files of sentence pairs for experiments that train translators."""

import numpy as np

# Flags of the smallest useful run: one bucket is one shape to compile.
SMALL = (
    "--vocab-size", "270", "--batch-tokens", "256", "--max-length", "32", "--steps", "2", "--save-every", "1",
    "--evaluate-every", "2", "--average", "2", "--beam-size", "1", "--warmup", "2", "--buckets", "1",
)  # fmt: skip


def write_pairs(folder, test=5):
    """The flags of the files that it writes: pairs that are equal on both sides."""
    rng = np.random.default_rng(0)
    flags = []
    for split, count in (("train", 80), ("valid", 5), ("test", test)):
        lines = [" ".join(rng.choice(["red", "dog", "cat"], rng.integers(2, 7))) + "\n" for _ in range(count)]
        for side in ("en", "de"):
            (folder / f"{split}.{side}").write_text("".join(lines))
        flags += [f"--{split}", str(folder / f"{split}.en"), str(folder / f"{split}.de")]
    return flags
