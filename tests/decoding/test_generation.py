"""Generation with a decoder: greedy decoding by hand, independence of the batch, stops, and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.generation import Generator, Sampling, continue_texts, prefill
from transformer_jax.decoding.text_generation import TextGenerator
from transformer_jax.errors import UserError
from transformer_jax.models.decoders.gpt import GPT, GPTConfig

TOKENIZER = TextTokenizer.characters(["abcdefghijklmnopqrstuvwxyz ."])
CONFIG = GPTConfig(
    vocab_size=TOKENIZER.vocab_size, width=32, layers=2, heads=4, kv_heads=2, feed_forward=64, max_length=64,
    positions="rotary",
)  # fmt: skip
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2], [2, 7]]


@pytest.fixture(scope="module")
def model():
    """Return a random model whose logits are far enough apart that rounding has no effect."""
    model = jax.jit(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))()
    return jax.tree.map(lambda x: x * 4 if x.ndim > 2 else x, model)


def keys(count, seed=0):
    return [jax.random.fold_in(jax.random.key(seed), n) for n in range(count)]


def by_hand(model, prompt, count):
    """Return `count` greedy tokens, computing the logits of the complete text for each."""
    forward = jax.jit(lambda m, x: m(x))
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, CONFIG.max_length), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(forward(model, padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_greedy_decoding_takes_the_most_probable_tokens(model):
    generator = Generator(model, sampling=Sampling(temperature=0))
    expected = [by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert generator(PROMPTS, 20, keys(4)) == expected
    assert [generator([prompt], 20, keys(1))[0] for prompt in PROMPTS] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01), Sampling(repetition_penalty=1.5)],
)
def test_tokens_do_not_depend_on_the_batch(model, sampling):
    """A request gets the same tokens in any batch and row, and with any number of tokens per chunk."""
    generator, request_keys = Generator(model, sampling=sampling), keys(4)
    batched = generator(PROMPTS, 24, request_keys)
    reversed_batch = generator(PROMPTS[::-1], 24, request_keys[::-1])[::-1]
    single = [generator([prompt], 24, [key])[0] for prompt, key in zip(PROMPTS, request_keys, strict=True)]
    assert batched == reversed_batch == single
    assert generator(PROMPTS, 24, keys(4, seed=1)) != batched
    calls = []
    on_tokens = lambda tokens: calls.append(tokens) or [False] * 4  # noqa: E731
    assert generator(PROMPTS, 24, request_keys, on_tokens=on_tokens, chunk=5) == batched
    assert len(calls) == 1 + 5


def test_draws_follow_the_distribution(model):
    """The first tokens of 2,048 requests follow the model's probabilities."""
    count, prompt = 64, [3, 1]
    generator = Generator(model)
    drawn = [ids[0] for n in range(32) for ids in generator([prompt] * count, 1, keys(count, seed=n))]
    logits = jax.jit(lambda m, x: m(x))(model, jnp.array([prompt]))[0, -1]
    expected = np.asarray(jax.nn.softmax(logits)) * len(drawn)
    counts = np.bincount(drawn, minlength=CONFIG.vocab_size)
    likely = expected > 5
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum()
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_an_end_token_ends_only_its_own_text(model):
    (endless, *_) = Generator(model, sampling=Sampling(temperature=0))([PROMPTS[0]], 30, keys(1))
    end = endless[7]
    outputs = Generator(model, sampling=Sampling(temperature=0), ends=(end,))(PROMPTS, 30, keys(4))
    assert outputs[0] == endless[: endless.index(end) + 1]
    for ids, prompt in zip(outputs, PROMPTS, strict=True):
        expected = by_hand(model, prompt, 30)
        assert ids == (expected[: expected.index(end) + 1] if end in expected else expected)


def test_programs_are_compiled_once_per_bucket(model):
    generator = Generator(model, sampling=Sampling(temperature=0.5))
    prefill.clear_cache()
    continue_texts.clear_cache()
    for length in (2, 5, 9, 16):
        generator([list(range(1, length))], 10, keys(1))
    assert prefill._cache_size() == continue_texts._cache_size() == 1
    for count in (11, 13, 16):
        generator([[1, 2]], count, keys(1))
    assert prefill._cache_size() == continue_texts._cache_size() == 1
    generator([list(range(1, 20))], 10, keys(1))
    assert prefill._cache_size() == continue_texts._cache_size() == 2
    for count in (50, 51, 52):  # also near the end of the context
        generator([[1]], count, keys(1))
    assert prefill._cache_size() == continue_texts._cache_size() == 3


def test_generation_can_fill_the_context(model):
    generator = Generator(model, sampling=Sampling(temperature=0))
    prompt = list(range(1, 28)) + list(range(1, 14))
    (tokens,) = generator([prompt], 64 - len(prompt), keys(1))
    assert tokens == by_hand(model, prompt, 64 - len(prompt))
    with pytest.raises(UserError, match="40 tokens and 25 new ones exceed the model's context of 64"):
        generator([prompt], 25, keys(1))


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[]], 5, "the prompt is empty"),
        ([[1], [28]], 5, "token id 28 of the prompt is outside the model's vocabulary of 28"),
        ([[-1]], 5, "token id -1"),
        ([[1]], 0, "`max_new_tokens` 0 is below 1"),
    ],
)
def test_invalid_prompts(model, prompts, count, message):
    with pytest.raises(UserError, match=message):
        Generator(model)(prompts, count, keys(len(prompts)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(temperature=-1), "`temperature` -1 is below 0"),
        (dict(temperature=float("nan")), "`temperature` nan"),
        (dict(top_k=0), "`top_k` 0 is below 1"),
        (dict(top_p=0.0), "`top_p` 0.0 must be above 0"),
        (dict(min_p=1.5), "`min_p` 1.5 must be"),
        (dict(repetition_penalty=0), "`repetition_penalty` 0"),
        (dict(temperature=0, top_k=5, min_p=0.1), "`top_k`, `min_p` has no effect at `temperature` 0"),
    ],
)
def test_invalid_sampling(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values)


def test_samples_and_stop_strings(model):
    generate = TextGenerator(model, TOKENIZER)
    outputs, again = (generate(["ab", "c"], max_new_tokens=30, samples=3, seed=5) for _ in range(2))
    assert outputs == again
    texts = [sample.text for samples in outputs for sample in samples]
    assert len(set(texts)) == 6
    assert all(text.startswith("ab") for text in texts[:3])
    sample = outputs[0][1]
    assert TOKENIZER.decode([sample.token_ids]) == [sample.text]
    assert sample.new_tokens == 30
    # A stop string is removed from the text; a stop string in the prompt has no effect.
    stop = sample.text[12:15]
    stopped = generate(["ab", "c"], max_new_tokens=30, samples=3, seed=5, stop=["ab", stop])[0][1]
    starts = [start for string in ("ab", stop) if (start := sample.text.find(string, 1)) > 0]
    assert stopped.text == sample.text[: min(starts)]
    assert stopped.new_tokens < 30
    with pytest.raises(UserError, match="a stop string is empty"):
        generate(["ab"], max_new_tokens=5, stop=[""])
    with pytest.raises(UserError, match="the prompt is empty"):
        generate([""], max_new_tokens=5)


def test_streamed_text_equals_the_returned_text(model):
    """No part of a stop string is streamed, even if it spans several tokens."""
    generate = TextGenerator(model, TOKENIZER)
    ((unstopped,), _) = generate(["abc", "d"], max_new_tokens=20, seed=1)
    for stop in ((), (unstopped.text[9:13],)):
        streamed: dict[int, str] = {0: "", 1: ""}
        on_text = lambda n, text, streamed=streamed: streamed.update({n: streamed[n] + text})  # noqa: E731
        (first,), (second,) = generate(["abc", "d"], max_new_tokens=20, seed=1, on_text=on_text, stop=stop)
        assert streamed == {0: first.text, 1: second.text}
    assert first.text == unstopped.text[:9]
    assert generate([], max_new_tokens=3) == []


@pytest.mark.filterwarnings("ignore:the text contains")
def test_a_stop_string_after_a_special_token():
    """The special token of the prompt has eleven characters and decodes to none."""
    tokenizer = TextTokenizer.byte_pairs(["ab"], 257)
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    model = jax.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))()
    generate = TextGenerator(model, tokenizer, ends=())
    ((unstopped,),) = generate(["<|endoftext|>hello"], max_new_tokens=12, seed=2)
    stop = unstopped.text[6:8]
    ((stopped,),) = generate(["<|endoftext|>hello"], max_new_tokens=12, seed=2, stop=[stop])
    assert stopped.text == unstopped.text[: unstopped.text.find(stop, 4)]


def test_more_requests_than_fit_into_a_batch(model):
    prompts = [[n % 20 + 1, n % 7] for n in range(70)]
    generator, request_keys = Generator(model, sampling=Sampling(1.2)), keys(70)
    counts = []
    on_tokens = lambda tokens: counts.append(len(tokens)) or [False] * 70  # noqa: E731
    outputs = generator(prompts, 6, request_keys, on_tokens=on_tokens)
    expected = generator(prompts[:64], 6, request_keys[:64]) + generator(prompts[64:], 6, request_keys[64:])
    assert outputs == expected
    assert set(counts) == {70}


def test_a_tokenizer_with_a_larger_vocabulary(model):
    tokenizer = TextTokenizer.byte_pairs(["a"], 300)
    with pytest.raises(UserError, match="ids up to 256 and the model a vocabulary of 28"):
        TextGenerator(model, tokenizer)
