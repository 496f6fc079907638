"""Train small runs for tests, among them translators of a toy language."""

import numpy as np

from transformer_jax import tasks
from transformer_jax.training.execution import Execution

WORDS = {"red": "rot", "dog": "hund", "sees": "sieht", "a": "ein", "cat": "katze", "big": "gross"}


def write_pairs(folder, **counts):
    """Write pairs of a toy language and return the files of each split.

    Each word has one translation, and the order of the words is reversed.
    """
    rng, files = np.random.default_rng(0), {}
    for split, count in counts.items():
        rows = [rng.choice(list(WORDS), size=rng.integers(1, 6)) for _ in range(count)]
        lines = {"en": [" ".join(r) for r in rows], "de": [" ".join(WORDS[w] for w in r[::-1]) for r in rows]}
        for language, texts in lines.items():
            (folder / f"{split}.{language}").write_text("\n".join(texts) + "\n")
        files[split] = (str(folder / f"{split}.en"), str(folder / f"{split}.de"))
    return files


def train(config, folder, *, note=lambda line: None, **execution):
    """Train a run and return its results; `execution` holds fields of `Execution`."""
    return tasks.train(config, folder, execution=Execution(**execution), note=note)[0]


def tiny_runs(folder):
    """Train a translator and a decoder for one step, in the subfolders `translator` and `decoder`."""
    pairs = write_pairs(folder, train=40, valid=8, test=8)
    tiny = dict(steps=1, save_every=1, evaluate_every=1, dtype="bfloat16")
    changes = dict(preset="mini", vocab_size=300, max_length=64, encoder_layers=1, decoder_layers=1)
    train(
        tasks.configure("translation", "phrases", model="transformer", **pairs, **changes, **tiny),
        folder / "translator",
    )
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat\n" * 100)
    config = tasks.configure(
        "language_modeling", "text", text=(str(text),), tokenizer="char", context=64, layers=1, **tiny
    )
    train(config, folder / "decoder")
