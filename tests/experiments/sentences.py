"""Flags of small translation runs."""

from tests.runs import write_pairs

# The smallest useful run: one bucket is one shape to compile.
SMALL = (
    "--preset", "mini", "--vocab-size", "270", "--batch-tokens", "256", "--max-length", "32", "--steps", "2",
    "--save-every", "1", "--evaluate-every", "2", "--average", "2", "--beam-size", "1", "--warmup", "2",
    "--buckets", "1",
)  # fmt: skip


def pair_flags(folder, test=5):
    """Write small files of pairs, and return the flags that name them."""
    files = write_pairs(folder, train=80, valid=5, test=test)
    return [part for split, paths in files.items() for part in (f"--{split}", *paths)]
