"""Losses of fine-tuning and of image classes against NumPy, for fixed logits."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.tasks.encoders.question_answering import Spans
from transformer_jax.tasks.encoders.sentence_embedding import InBatchNegatives
from transformer_jax.tasks.encoders.sequence_classification import Classes
from transformer_jax.tasks.encoders.token_classification import Tags
from transformer_jax.tasks.vision.image_classification import ImageClasses, ImageClassificationConfig


class FixedModel:
    """A model that returns a fixed result."""

    config = types.SimpleNamespace(token_types=2)

    def __init__(self, result):
        self.result = jnp.asarray(result, jnp.float32)

    def __call__(self, *args, **kwargs):
        return self.result


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def batch_of(rows, length, **arrays):
    """Rows of `length` real tokens, where the last row has no weight."""
    inputs = {name: np.ones((rows, length), np.int32) for name in ("tokens", "types", "segments")}
    weight = np.array([1.0] * (rows - 1) + [0.0], np.float32)
    return {name: jnp.asarray(x) for name, x in (inputs | {"weight": weight} | arrays).items()}


def loss_of(objective, result, batch):
    """Return (sum, weight) of an objective."""
    sums, weights = objective.loss(FixedModel(result), None, batch, None)
    return float(sums["loss"]), float(weights["loss"])


def test_one_label(rng):
    logits, target = rng.normal(size=(4, 3)), np.array([2, 0, 1, 1])
    expected = -sum(log_softmax(logits)[row, target[row]] for row in range(3))
    loss = loss_of(Classes(), logits, batch_of(4, 5, target=target))
    assert loss == (pytest.approx(expected, rel=1e-5), 3.0)


def test_several_labels(rng):
    logits, target = 3 * rng.normal(size=(4, 3)), rng.integers(0, 2, (4, 3)).astype(np.float32)
    chance = 1 / (1 + np.exp(-logits))
    label_losses = -np.log(np.where(target == 1, chance, 1 - chance))
    loss = loss_of(Classes(), logits, batch_of(4, 5, target=target))
    assert loss == (pytest.approx(label_losses[:3].mean(axis=1).sum(), rel=1e-5), 3.0)


def test_a_score(rng):
    outputs, target = rng.normal(size=(4, 1)), rng.normal(size=4).astype(np.float32)
    loss = loss_of(Classes(), outputs, batch_of(4, 5, target=target))
    assert loss == (pytest.approx(((outputs[:3, 0] - target[:3]) ** 2).sum(), rel=1e-5), 3.0)


def test_tags_count_where_a_word_begins(rng):
    logits = rng.normal(size=(3, 4, 5))
    target = np.array([[-1, 4, 0, -1], [-1, 2, -1, -1], [-1, 1, 1, -1]])
    expected = -sum(log_softmax(logits)[place][target[place]] for place in ((0, 1), (0, 2), (1, 1)))
    loss = loss_of(Tags(), logits, batch_of(3, 4, target=target))
    assert loss == (pytest.approx(expected, rel=1e-5), 3.0)


def test_an_answer_begins_and_ends_among_real_tokens(rng):
    logits, target = rng.normal(size=(3, 6, 2)), np.array([[1, 3], [0, 0], [2, 2]])
    batch = batch_of(3, 6, target=target)
    batch["segments"] = batch["segments"].at[0, 4:].set(0)
    row_losses = []
    for row, length in ((0, 4), (1, 6)):
        likelihood = log_softmax(logits[row, :length].T)
        row_losses.append(-(likelihood[0, target[row, 0]] + likelihood[1, target[row, 1]]) / 2)
    assert loss_of(Spans(), logits, batch) == (pytest.approx(sum(row_losses), rel=1e-5), 2.0)


def cosines_of(first, second):
    """Return (B, B) cosines of the means of states (B, T, D), divided by a temperature of 0.1."""
    means = [states.mean(axis=1) for states in (first, second)]
    rows, columns = (mean / np.linalg.norm(mean, axis=1, keepdims=True) for mean in means)
    return rows @ columns.T / 0.1


def partners_loss(first, second, texts, texts_2):
    """Return (sum, weight) of the loss of pairs with these states and numbers of texts."""
    rows, length = first.shape[:2]
    batch = batch_of(rows, length, weight=np.ones(rows, np.float32), text_id=np.array(texts))
    batch |= {f"{name}_2": 2 * batch[name] for name in ("tokens", "types", "segments")}
    batch["text_id_2"] = jnp.array(texts_2)

    class Encoder:
        config = types.SimpleNamespace(token_types=2)

        def hidden_states(self, tokens, **options):
            return jnp.where(tokens[..., None] == 1, jnp.asarray(first), jnp.asarray(second))

    sums, weights = InBatchNegatives("mean", 0.1).loss(Encoder(), None, batch, jax.random.key(0))
    return float(sums["loss"]), float(weights["loss"])


def test_partners_among_all_texts_of_the_batch(rng):
    """Each of three pairs is contrasted with the two others, in both directions; vectors have length 1."""
    first, second = (rng.normal(size=(3, 2, 4)) for _ in range(2))
    expected = -(
        np.diag(log_softmax(cosines_of(first, second))) + np.diag(log_softmax(cosines_of(second, first)))
    )
    loss = partners_loss(first, second, [0, 1, 2], [3, 4, 5])
    assert loss == (pytest.approx(expected.sum() / 2, rel=1e-5), 3)


@pytest.mark.parametrize(
    ("texts", "texts_2", "alike"),
    [
        ([0, 1, 0, 2], [3, 4, 5, 6], [(0, 2), (2, 0)]),  # one text with two partners
        ([0, 1, 2, 3], [4, 5, 5, 6], [(1, 2), (2, 1)]),  # and as a second text
        ([0, 1, 2, 3], [4, 5, 0, 6], [(0, 2)]),  # a text of one pair is the second of another
        ([0, 2, 1, 4], [1, 0, 3, 5], [(0, 1), (2, 0), (2, 1)]),  # and pair 0 the other way round
        ([0, 0, 1, 4], [2, 3, 2, 5], [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)]),  # and pair 0 by its two texts
    ],
)
def test_texts_that_belong_together_are_no_negatives(rng, texts, texts_2, alike):
    first, second = (rng.normal(size=(4, 2, 4)) for _ in range(2))
    cosines = cosines_of(first, second)
    for place in alike:
        cosines[place] = -np.inf
    with np.errstate(divide="ignore"):
        expected = -(np.diag(log_softmax(cosines)) + np.diag(log_softmax(cosines.T))).sum() / 2
    assert partners_loss(first, second, texts, texts_2)[0] == pytest.approx(expected, rel=1e-5)


def test_classes_of_images_are_smoothed(rng):
    """Mixed images have a distribution as target (Szegedy et al. 2016, section 7)."""
    logits = rng.normal(size=(3, 4))
    target = np.array([[1, 0, 0, 0], [0.3, 0, 0.7, 0], [0, 0, 0, 1]], np.float32)
    batch = {
        "images": jnp.zeros((3, 8, 8, 3), jnp.uint8), "target": jnp.asarray(target),
        "weight": jnp.array([1.0, 1.0, 0.0]),
    }  # fmt: skip
    expected = -((0.8 * target + 0.2 / 4) * log_softmax(logits))[:2].sum()
    loss = loss_of(ImageClasses(ImageClassificationConfig(label_smoothing=0.2)), logits, batch)
    assert loss == (pytest.approx(expected, rel=1e-5), 2.0)
