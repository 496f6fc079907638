"""Generation with a trained decoder: greedy by hand, prompts together as alone, stops, and refusals."""

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
    """Random, with logits far enough apart that rounding decides nothing."""
    made = jax.jit(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))()
    return jax.tree.map(lambda x: x * 4 if x.ndim > 2 else x, made)


def keys(count, seed=0):
    return [jax.random.fold_in(jax.random.key(seed), n) for n in range(count)]


def by_hand(model, prompt, count):
    """The whole text through the model for each token."""
    forward = jax.jit(lambda m, x: m(x))
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, CONFIG.max_length), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(forward(model, padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_greedy_is_the_likeliest_token_each_time(model):
    generator = Generator(model, sampling=Sampling(temperature=0))
    expected = [by_hand(model, prompt, 20) for prompt in PROMPTS]
    assert generator(PROMPTS, 20, keys(4)) == expected
    assert [generator([prompt], 20, keys(1))[0] for prompt in PROMPTS] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.7, top_k=9, top_p=0.9, min_p=0.01), Sampling(repetition_penalty=1.5)],
)
def test_a_request_gets_the_tokens_that_it_gets_alone(model, sampling):
    """Whatever stands beside it, in whatever place."""
    generator, rngs = Generator(model, sampling=sampling), keys(4)
    together = generator(PROMPTS, 24, rngs)
    backwards = generator(PROMPTS[::-1], 24, rngs[::-1])[::-1]
    alone = [generator([prompt], 24, [rng])[0] for prompt, rng in zip(PROMPTS, rngs, strict=True)]
    assert together == backwards == alone
    assert generator(PROMPTS, 24, keys(4, seed=1)) != together
    # How many tokens are made between two looks changes nothing either.
    looked = []
    again = generator(PROMPTS, 24, rngs, on_tokens=lambda made: looked.append(made) or [False] * 4, chunk=5)
    assert again == together
    assert len(looked) == 1 + 5


def test_draws_follow_the_distribution(model):
    """First tokens of 2,000 requests against the model's probabilities."""
    count, prompt = 64, [3, 1]
    generator = Generator(model)
    drawn = [ids[0] for n in range(32) for ids in generator([prompt] * count, 1, keys(count, seed=n))]
    logits = jax.jit(lambda m, x: m(x))(model, jnp.array([prompt]))[0, -1]
    expected = np.asarray(jax.nn.softmax(logits)) * len(drawn)
    seen = np.bincount(drawn, minlength=CONFIG.vocab_size)
    likely = expected > 5
    statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum()
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_an_end_token_ends_its_own_text_alone(model):
    (free, *_) = Generator(model, sampling=Sampling(temperature=0))([PROMPTS[0]], 30, keys(1))
    end = free[7]
    found = Generator(model, sampling=Sampling(temperature=0), ends=(end,))(PROMPTS, 30, keys(4))
    assert found[0] == free[: free.index(end) + 1]
    for ids, prompt in zip(found, PROMPTS, strict=True):
        hand = by_hand(model, prompt, 30)
        assert ids == (hand[: hand.index(end) + 1] if end in hand else hand)


def test_programs_are_compiled_once_for_a_bucket(model):
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
    for count in (50, 51, 52):  # near the end of the context as well
        generator([[1]], count, keys(1))
    assert prefill._cache_size() == continue_texts._cache_size() == 3


def test_the_whole_context_can_be_filled(model):
    generator = Generator(model, sampling=Sampling(temperature=0))
    prompt = list(range(1, 28)) + list(range(1, 14))
    (found,) = generator([prompt], 64 - len(prompt), keys(1))
    assert found == by_hand(model, prompt, 64 - len(prompt))
    with pytest.raises(UserError, match="40 tokens and 25 new ones are more than the model's context of 64"):
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
def test_bad_prompts(model, prompts, count, message):
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
        (dict(temperature=0, top_k=5, min_p=0.1), "which `top_k`, `min_p` cannot change: drop one"),
    ],
)
def test_bad_sampling(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values)


def test_texts_samples_and_stops(model):
    generate = TextGenerator(model, TOKENIZER)
    (first, again) = (generate(["ab", "c"], max_new_tokens=30, samples=3, seed=5) for _ in range(2))
    assert first == again
    texts = [one.text for samples in first for one in samples]
    assert len(set(texts)) == 6
    assert all(t.startswith("ab") for t in texts[:3])
    one = first[0][1]
    assert TOKENIZER.decode([one.token_ids]) == [one.text]
    assert one.new_tokens == 30
    # Three letters of the middle stop it, and are cut off; a stop that the prompt holds stops nothing.
    stop = one.text[12:15]
    stopped = generate(["ab", "c"], max_new_tokens=30, samples=3, seed=5, stop=["ab", stop])[0][1]
    places = [p for s in ("ab", stop) if (p := one.text.find(s, 1)) > 0]
    assert stopped.text == one.text[: min(places)]
    assert stopped.new_tokens < 30
    with pytest.raises(UserError, match="a stop string is empty"):
        generate(["ab"], max_new_tokens=5, stop=[""])
    with pytest.raises(UserError, match="the prompt is empty"):
        generate([""], max_new_tokens=5)


def test_streamed_text_is_the_text(model):
    """Also where a stop string is made in several tokens: none of it is shown."""
    generate = TextGenerator(model, TOKENIZER)
    free = generate(["abc", "d"], max_new_tokens=20, seed=1)
    for stop in ((), (free[0][0].text[9:13],)):
        heard: dict[int, str] = {0: "", 1: ""}
        hear = lambda n, t, heard=heard: heard.update({n: heard[n] + t})  # noqa: E731
        found = generate(["abc", "d"], max_new_tokens=20, seed=1, on_text=hear, stop=stop)
        assert heard == {0: found[0][0].text, 1: found[1][0].text}
    assert found[0][0].text == free[0][0].text[:9]
    assert generate([], max_new_tokens=3) == []


def test_a_stop_string_behind_a_special_token(model):
    """The prompt's token of eleven characters comes out as none."""
    tokenizer = TextTokenizer.byte_pairs(["ab"], 257)
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    bigger = jax.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))()
    generate = TextGenerator(bigger, tokenizer, ends=())
    ((free,),) = generate(["<|endoftext|>hello"], max_new_tokens=12, seed=2)
    stop = free.text[6:8]
    ((stopped,),) = generate(["<|endoftext|>hello"], max_new_tokens=12, seed=2, stop=[stop])
    assert stopped.text == free.text[: free.text.find(stop, 4)]


def test_more_requests_than_a_batch_holds(model):
    prompts = [[n % 20 + 1, n % 7] for n in range(70)]
    generator, rngs = Generator(model, sampling=Sampling(1.2)), keys(70)
    seen = []
    found = generator(prompts, 6, rngs, on_tokens=lambda made: seen.append(len(made)) or [False] * 70)
    assert found == [*generator(prompts[:64], 6, rngs[:64]), *generator(prompts[64:], 6, rngs[64:])]
    assert set(seen) == {70}


def test_a_tokenizer_of_another_vocabulary(model):
    big = TextTokenizer.byte_pairs(["a"], 300)
    with pytest.raises(UserError, match="ids up to 256 and the model a vocabulary of 28"):
        TextGenerator(model, big)
