import numpy as np


class ListedExamples:
    """Translation examples from two lists of token ids."""

    def __init__(self, sources, targets):
        self.pairs = list(zip(sources, targets, strict=True))
        self.lengths = np.array([(len(s), len(t)) for s, t in self.pairs])

    def read(self, rows, room, rng):
        return [[self.pairs[i] for i in row] for row in rows]
