"""Parameters that a start copies: the encoder, and the head if the classes have the same names."""

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
from transformer_jax.training.starts import OpenedStart, start_model


def test_forms_of_starts():
    first, second = Start("a", into="encoder"), Start("b")
    for starts in (("a,into=encoder", "b"), [first, "b"], (first, second)):
        assert Start.parse_all(starts) == (first, second)
    assert Start.parse_all("b") == Start.parse_all(second) == (second,)


def classifier(classes, seed):
    config = BertConfig(vocab_size=20, width=8, layers=1, heads=1, feed_forward=8, classes=classes)
    return jax.jit(lambda: BertClassifier(config, rngs=nnx.Rngs(seed)))()


@pytest.mark.parametrize(
    ("source_labels", "labels", "copied"),
    [
        (("no", "yes"), ("no", "yes"), True),
        (("yes", "no"), ("no", "yes"), False),
        (("0", "1"), ("no", "yes"), False),
        (("LABEL_0", "LABEL_1"), ("no", "yes"), True),  # a published folder without names
        ((), ("no", "yes"), True),
        (("a", "b", "c"), ("no", "yes"), False),
        (("0", "1"), (), True),
    ],
)
def test_a_head_is_copied_for_the_same_classes(source_labels, labels, copied):
    source, target = classifier(max(2, len(source_labels)), 1), classifier(2, 2)
    opened = OpenedStart(Start("folder"), source, types.SimpleNamespace(labels=source_labels), "")
    model = start_model(target, [opened], labels)
    assert opened.has_other_classes(target, labels) == (not copied)
    encoder, expected = (x.encoder.blocks.self_attention.query.kernel[...] for x in (model, source))
    np.testing.assert_array_equal(encoder, expected)
    np.testing.assert_array_equal(model.head.kernel[...], (source if copied else target).head.kernel[...])


def test_a_pooler_that_the_start_lacks_keeps_its_initialization():
    sizes = dict(vocab_size=20, width=8, layers=1, heads=1, feed_forward=8)
    source, target = (BertMaskedLM(BertConfig(**sizes, pooler=p), rngs=nnx.Rngs(0)) for p in (False, True))
    model = start_model(target, [OpenedStart(Start("folder"), source, types.SimpleNamespace(), "")])
    for name, leaf in named_leaves(model).items():
        expected = named_leaves(source).get(name, named_leaves(target)[name])
        np.testing.assert_array_equal(leaf, expected, err_msg=name)


@pytest.mark.parametrize("module", [Electra, ElectraDiscriminator, ElectraTagger])
def test_an_electra_encoder_initializes_the_discriminator(module):
    sizes = dict(vocab_size=20, width=8, embedding_width=8, layers=1, heads=2, feed_forward=8)
    source = module(ElectraConfig(**sizes, generator_size=1.0, classes=3), rngs=nnx.Rngs(0))
    target = ElectraPretraining(ElectraConfig(**sizes, generator_size=0.5), rngs=nnx.Rngs(1))
    opened = OpenedStart(Start("folder"), source, types.SimpleNamespace(), "")
    leaves = named_leaves(start_model(target, [opened]))
    for name, leaf in named_leaves(getattr(source, "encoder", source)).items():
        np.testing.assert_array_equal(leaves[f"discriminator/encoder/{name}"], leaf, err_msg=name)
    expected = source.head.kernel if module is ElectraDiscriminator else target.discriminator.head.kernel
    np.testing.assert_array_equal(leaves["discriminator/head/kernel"], expected[...])
    for name, leaf in named_leaves(target.generator).items():
        np.testing.assert_array_equal(leaves[f"generator/{name}"], leaf, err_msg=name)
