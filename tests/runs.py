"""Small runs for tests: a toy language, and training by flat values."""

import numpy as np

from transformer_jax import tasks
from transformer_jax.training.execution import Execution

WORDS = {"red": "rot", "dog": "hund", "sees": "sieht", "a": "ein", "cat": "katze", "big": "gross"}


def write_pairs(folder, **counts):
    """Writes pairs of a toy language, in which each word has one translation and the order is reversed; returns
    the files of each split."""
    rng, files = np.random.default_rng(0), {}
    for split, count in counts.items():
        rows = [rng.choice(list(WORDS), size=rng.integers(1, 6)) for _ in range(count)]
        lines = {"en": [" ".join(r) for r in rows], "de": [" ".join(WORDS[w] for w in r[::-1]) for r in rows]}
        for language, texts in lines.items():
            (folder / f"{split}.{language}").write_text("\n".join(texts) + "\n")
        files[split] = (str(folder / f"{split}.en"), str(folder / f"{split}.de"))
    return files


def train(config, folder, *, note=lambda line: None, **execution):
    """The results of a run; `execution` are fields of `Execution`."""
    return tasks.train(config, folder, execution=Execution(**execution), note=note)[0]
