"""Which head a start brings: that of the same classes, by their names where it has some."""

import types

import jax
import numpy as np
import pytest
from flax import nnx

from transformer_jax.models.bert import BertClassifier, BertConfig
from transformer_jax.training.config import Start
from transformer_jax.training.starts import OpenedStart, started


def classifier(classes, seed):
    config = BertConfig(vocab_size=20, width=8, layers=1, heads=1, feed_forward=8, classes=classes)
    return jax.jit(lambda: BertClassifier(config, rngs=nnx.Rngs(seed)))()


@pytest.mark.parametrize(
    ("there", "here", "copied"),
    [
        (("no", "yes"), ("no", "yes"), True),
        (("yes", "no"), ("no", "yes"), False),
        (("0", "1"), ("no", "yes"), False),
        (("LABEL_0", "LABEL_1"), ("no", "yes"), True),  # a published folder that names none
        ((), ("no", "yes"), True),
        (("a", "b", "c"), ("no", "yes"), False),
        (("0", "1"), (), True),
    ],
)
def test_a_head_goes_on_for_the_same_classes(there, here, copied):
    old, new = classifier(max(2, len(there)), 1), classifier(2, 2)
    opened = OpenedStart(Start("folder"), old, types.SimpleNamespace(labels=there), "")
    model = started(new, [opened], here)
    assert opened.of_other_classes(new, here) == (not copied)
    encoder, expected = (x.encoder.blocks.self_attention.query.kernel[...] for x in (model, old))
    np.testing.assert_array_equal(encoder, expected)
    np.testing.assert_array_equal(model.head.kernel[...], (old if copied else new).head.kernel[...])
