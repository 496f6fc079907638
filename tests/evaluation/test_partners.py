"""Partners among all texts, for vectors in a plane."""

import numpy as np
import pytest

from transformer_jax.evaluation.partners import partner_scores


def vectors(*degrees):
    return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], axis=1)


@pytest.mark.parametrize(
    ("texts", "texts_2", "first", "second", "correct"),
    [
        # x, at 50 degrees, is nearer to b, at 20, than to its partner a, at 0; a is nearest to itself, then c.
        ("axad", "bacd", (0, 50, 0, 90), (20, 0, 10, 90), 3),
        # a is nearest to c, which is its partner only in the pair (c, a).
        ("acd", "bac", (0, 10, 80), (30, 0, 10), 2),
    ],
)
def test_a_partner_is_the_nearest_other_text(texts, texts_2, first, second, correct):
    scores = dict(partner_scores(vectors(*first), vectors(*second), list(texts), list(texts_2)))
    assert scores == {"accuracy": pytest.approx(100 * correct / len(texts))}
