"""Greedy and beam search against plain Python, with a table as the model and with translators."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.oracles import search as oracle
from transformer_jax.decoding.beam import beam_search
from transformer_jax.decoding.greedy import greedy_search
from transformer_jax.decoding.hypotheses import length_penalty
from transformer_jax.models.step import StepOutput
from transformer_jax.models.translators.bahdanau import Bahdanau, BahdanauConfig
from transformer_jax.models.translators.luong import Luong, LuongConfig
from transformer_jax.models.translators.seq2seq import Seq2Seq, Seq2SeqConfig
from transformer_jax.models.translators.transformer import Transformer, TransformerConfig

BEGIN, END, V, T, B = 1, 2, 5, 4, 3


@flax.struct.dataclass
class History:
    """A cache that keeps all tokens, so that every prefix has its own distribution."""

    sentence: jax.Array
    tokens: jax.Array
    length: jax.Array

    def repeat(self, times):
        return self.replace(
            sentence=jnp.repeat(self.sentence, times), tokens=jnp.repeat(self.tokens, times, axis=0)
        )

    def reorder(self, rows):
        return self.replace(sentence=self.sentence[rows], tokens=self.tokens[rows])


def table_model(seed, sharpness=2.0):
    """Return a step with random logits for each sentence and prefix, its cache, and the log probabilities."""
    table = jnp.asarray(np.random.default_rng(seed).normal(size=(B, V ** (T + 1), V)) * sharpness, jnp.float32)

    def code(tokens, length):
        digits = jnp.where(jnp.arange(T + 1) < length, tokens, 0)
        return (digits * V ** jnp.arange(T + 1)).sum(-1)

    def step(cache, tokens):
        history = jax.lax.dynamic_update_slice_in_dim(cache.tokens, tokens, cache.length, axis=1)
        logits = table[cache.sentence, code(history, cache.length + 1)]
        weights = jax.nn.softmax(logits)[:, None, None, None, :]  # in the shape of attention weights
        return StepOutput(logits[:, None], weights), cache.replace(tokens=history, length=cache.length + 1)

    def log_probabilities(sentence):
        def compute(prefix):
            padded = jnp.array([*prefix, *[0] * (T + 1 - len(prefix))])
            return np.asarray(jax.nn.log_softmax(table[sentence, code(padded, len(prefix))]))

        cache = {}
        return lambda prefix: cache.setdefault(prefix, compute(prefix))

    start = History(jnp.arange(B), jnp.zeros((B, T + 1), jnp.int32), jnp.zeros((), jnp.int32))
    return step, start, log_probabilities


OPTIONS = dict(batch=B, begin=BEGIN, end=END, max_length=T)


def tokens_of(hypotheses, b, rank=0):
    size = int(hypotheses.lengths[b, rank])
    return tuple(hypotheses.tokens[b, rank, :size].tolist())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_a_wide_beam_finds_the_best_of_all_sequences(seed, alpha):
    step, cache, log_probabilities = table_model(seed)
    hypotheses = beam_search(step, cache, beam_size=V**T, alpha=alpha, **OPTIONS)
    for b in range(B):
        score, tokens = oracle.best_of_all(
            log_probabilities(b), begin=BEGIN, end=END, vocabulary=V, max_length=T, alpha=alpha
        )
        assert tokens_of(hypotheses, b) == tokens
        np.testing.assert_allclose(hypotheses.scores[b, 0], score, rtol=1e-5)


@pytest.mark.parametrize(
    ("seed", "alpha", "beam_size"),
    [(0, 0.0, 1), (1, 1.5, 1), (0, -0.5, 2), (1, 1.5, 2), (0, 1.5, 7), (1, 0.0, 7)],
)
def test_beam_search_equals_plain_python(seed, alpha, beam_size):
    step, cache, log_probabilities = table_model(seed, sharpness=1.0)
    hypotheses = beam_search(step, cache, beam_size=beam_size, alpha=alpha, **OPTIONS)
    for b in range(B):
        score, tokens = oracle.beam_search(
            log_probabilities(b), begin=BEGIN, end=END, max_length=T, beam_size=beam_size, alpha=alpha
        )
        np.testing.assert_allclose(hypotheses.scores[b, 0], score, rtol=1e-5)
        assert tokens_of(hypotheses, b) == tokens


def test_n_best_hypotheses_are_sorted_distinct_and_scored_by_their_tokens():
    step, cache, log_probabilities = table_model(0)
    hypotheses = beam_search(step, cache, beam_size=6, n_best=4, alpha=0.6, **OPTIONS)
    scores = np.asarray(hypotheses.scores)
    assert (np.diff(scores, axis=1) <= 0).all()
    for b in range(B):
        sequences = [tokens_of(hypotheses, b, rank) for rank in range(4)]
        assert len(set(sequences)) == 4
        for tokens, score in zip(sequences, scores[b], strict=True):
            total = sum(log_probabilities(b)((BEGIN, *tokens[:i]))[t] for i, t in enumerate(tokens))
            np.testing.assert_allclose(score, total / oracle.penalty(len(tokens), 0.6), rtol=1e-5)


def test_weights_belong_to_the_best_hypothesis():
    step, cache, log_probabilities = table_model(2)
    hypotheses = beam_search(step, cache, beam_size=3, alpha=0.6, return_weights=True, **OPTIONS)
    for b in range(B):
        tokens = tokens_of(hypotheses, b)
        for i in range(len(tokens)):
            expected = np.exp(log_probabilities(b)((BEGIN, *tokens[:i])))
            np.testing.assert_allclose(hypotheses.weights[b, 0, 0, 0, i], expected, rtol=1e-5)


def test_greedy_equals_a_plain_loop():
    step, cache, log_probabilities = table_model(1)
    hypotheses = greedy_search(step, cache, **OPTIONS)
    for b in range(B):
        tokens, total = [], 0.0
        while len(tokens) < T and END not in tokens:
            values = log_probabilities(b)((BEGIN, *tokens))
            tokens.append(int(values.argmax()))
            total += values.max()
        assert tokens_of(hypotheses, b) == tuple(tokens)
        np.testing.assert_allclose(hypotheses.scores[b, 0], total, rtol=1e-5)


def test_greedy_weights_belong_to_each_step():
    step, cache, log_probabilities = table_model(1)
    hypotheses = greedy_search(step, cache, return_weights=True, **OPTIONS)
    assert hypotheses.tokens.tolist() == greedy_search(step, cache, **OPTIONS).tokens.tolist()
    for b in range(B):
        tokens = tokens_of(hypotheses, b)
        for i in range(len(tokens)):
            expected = np.exp(log_probabilities(b)((BEGIN, *tokens[:i])))
            np.testing.assert_allclose(hypotheses.weights[b, 0, 0, 0, i], expected, rtol=1e-5)


def test_n_best_is_at_most_the_beam_size():
    step, cache, _ = table_model(0)
    with pytest.raises(ValueError, match="n_best=3 must be between 1 and the beam size 2"):
        beam_search(step, cache, beam_size=2, n_best=3, **OPTIONS)


def test_length_penalty_equals_the_published_formula():
    np.testing.assert_allclose(length_penalty(7, 0.6), (12 / 6) ** 0.6)
    assert length_penalty(7, 0.0) == 1.0


SIZES = dict(vocab_size=V, width=12, dropout=0.0)
CELLS = dict(hidden=9, layers=1, **SIZES)
MODELS = {
    "transformer": (
        Transformer,
        TransformerConfig(
            feed_forward=19, heads=3, kv_heads=3, encoder_layers=1, decoder_layers=2, norm="pre", **SIZES
        ),
    ),
    "lstm": (Seq2Seq, Seq2SeqConfig(**CELLS)),
    "bahdanau": (Bahdanau, BahdanauConfig(alignment=7, **CELLS)),
    "luong": (Luong, LuongConfig(**CELLS)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    module, config = MODELS[request.param]
    model = module(config, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(scale=0.4, size=x.shape), jnp.float32), model)


SOURCE = jnp.array([[3, 4, 3, 2], [4, 2, 0, 0], [3, 3, 2, 0]])


def model_log_probabilities(model):
    """Return for each sentence a function from a prefix to log probabilities, computed without a cache."""
    forward = jax.jit(lambda tokens: jax.nn.log_softmax(model(SOURCE, tokens, source_mask=SOURCE != 0)))

    @functools.cache
    def last_step(prefix):
        tokens = jnp.array([[*prefix, *[0] * (T + 1 - len(prefix))]] * B)
        return np.asarray(forward(tokens)[:, len(prefix) - 1])

    return [lambda prefix, b=b: last_step(prefix)[b] for b in range(B)]


@pytest.mark.long
@pytest.mark.parametrize("beam_size", others_soak([2, 4], 4))
def test_beam_search_with_a_cache_equals_plain_python(model, beam_size):
    cache = model.start(SOURCE, source_mask=SOURCE != 0, max_length=T)
    attends = getattr(model, "attends", True)
    step = model.step_function(return_weights=attends)
    hypotheses = beam_search(step, cache, beam_size=beam_size, return_weights=attends, **OPTIONS)
    for b, log_probabilities in enumerate(model_log_probabilities(model)):
        score, tokens = oracle.beam_search(
            log_probabilities, begin=BEGIN, end=END, max_length=T, beam_size=beam_size, alpha=0.6
        )
        assert tokens_of(hypotheses, b) == tokens
        np.testing.assert_allclose(hypotheses.scores[b, 0], score, rtol=1e-4)
        if attends:
            inputs = jnp.array([[BEGIN, *tokens[:-1]]] * B)
            _, weights = model(SOURCE, inputs, source_mask=SOURCE != 0, return_weights=True)
            np.testing.assert_allclose(
                hypotheses.weights[b, 0, :, :, : len(tokens)], weights[b, :, :, : len(tokens)], atol=1e-5
            )


@pytest.mark.long
def test_a_wide_beam_finds_the_best_sequence_of_a_model(model):
    length = 3
    cache = model.start(SOURCE, source_mask=SOURCE != 0, max_length=length)
    hypotheses = beam_search(
        model.step_function(), cache, beam_size=V**length, **OPTIONS | dict(max_length=length)
    )
    for b, log_probabilities in enumerate(model_log_probabilities(model)):
        score, tokens = oracle.best_of_all(
            log_probabilities, begin=BEGIN, end=END, vocabulary=V, max_length=length, alpha=0.6
        )
        assert tokens_of(hypotheses, b) == tokens
        np.testing.assert_allclose(hypotheses.scores[b, 0], score, rtol=1e-4)
