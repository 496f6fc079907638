"""What a start brings: the head of the same classes, by their names where it has some, and its encoder."""

import types

import jax
import numpy as np
import pytest
from flax import nnx

from transformer_jax.models.encoders.bert import BertClassifier, BertConfig, BertMaskedLM
from transformer_jax.models.encoders.electra import (
    Electra,
    ElectraConfig,
    ElectraDiscriminator,
    ElectraPretraining,
    ElectraTagger,
)
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.config import Start
from transformer_jax.training.starts import OpenedStart, started


def test_starts_of_every_form():
    one, other = Start("a", into="encoder"), Start("b")
    for given in (("a,into=encoder", "b"), [one, "b"], (one, other)):
        assert Start.every(given) == (one, other)
    assert Start.every("b") == Start.every(other) == (other,)


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


def test_a_pooler_that_the_start_lacks_begins_fresh():
    sizes = dict(vocab_size=20, width=8, layers=1, heads=1, feed_forward=8)
    old, new = (BertMaskedLM(BertConfig(**sizes, pooler=own), rngs=nnx.Rngs(0)) for own in (False, True))
    model = started(new, [OpenedStart(Start("folder"), old, types.SimpleNamespace(), "")])
    for name, leaf in named_leaves(model).items():
        expected = named_leaves(old).get(name, named_leaves(new)[name])
        np.testing.assert_array_equal(leaf, expected, err_msg=name)


@pytest.mark.parametrize("kind", [Electra, ElectraDiscriminator, ElectraTagger])
def test_one_network_of_electra_begins_the_discriminator(kind):
    sizes = dict(vocab_size=20, width=8, embedding_width=8, layers=1, heads=2, feed_forward=8)
    old = kind(ElectraConfig(**sizes, generator_size=1.0, classes=3), rngs=nnx.Rngs(0))
    new = ElectraPretraining(ElectraConfig(**sizes, generator_size=0.5), rngs=nnx.Rngs(1))
    found = named_leaves(started(new, [OpenedStart(Start("folder"), old, types.SimpleNamespace(), "")]))
    body = named_leaves(getattr(old, "encoder", old))
    for name, leaf in body.items():
        np.testing.assert_array_equal(found[f"discriminator/encoder/{name}"], leaf, err_msg=name)
    expected = old.head.kernel if kind is ElectraDiscriminator else new.discriminator.head.kernel
    np.testing.assert_array_equal(found["discriminator/head/kernel"], expected[...])
    for name, leaf in named_leaves(new.generator).items():
        np.testing.assert_array_equal(found[f"generator/{name}"], leaf, err_msg=name)
