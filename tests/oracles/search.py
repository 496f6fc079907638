"""Beam search in plain Python, and the best sequence by exhaustive search."""

import itertools
import math


def penalty(length, alpha):
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(log_probabilities, *, begin, end, max_length, beam_size, alpha):
    """Return the best (score, tokens); `log_probabilities` maps a prefix to a list over V."""
    open_beams = [(0.0, ())]
    finished = []
    for _ in range(max_length):
        candidates = []
        for total, tokens in open_beams:
            for token, value in enumerate(log_probabilities((begin, *tokens))):
                candidates.append((total + float(value), (*tokens, token)))
        candidates.sort(key=lambda c: -c[0])
        open_beams = []
        for total, tokens in candidates[: 2 * beam_size]:
            if tokens[-1] == end:
                finished.append((total / penalty(len(tokens), alpha), tokens))
            elif len(open_beams) < beam_size:
                open_beams.append((total, tokens))
    if finished:
        return max(finished)
    return max((total / penalty(max_length, alpha), tokens) for total, tokens in open_beams)


def best_of_all(log_probabilities, *, begin, end, vocabulary, max_length, alpha):
    """Return the best (score, tokens) among all sequences that end within `max_length` tokens."""
    best = (-math.inf, ())
    words = [v for v in range(vocabulary) if v != end]
    for length in range(max_length):
        for body in itertools.product(words, repeat=length):
            tokens = (*body, end)
            total = sum(float(log_probabilities((begin, *tokens[:i]))[token]) for i, token in enumerate(tokens))
            best = max(best, (total / penalty(len(tokens), alpha), tokens))
    return best
