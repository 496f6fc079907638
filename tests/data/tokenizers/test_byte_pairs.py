import concurrent.futures

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.data.tokenizers.byte_pairs import BytePairTokenizer
from transformer_jax.errors import UserError

TEXTS = ["a dog runs", "ein Hund läuft", "two dogs run 123", "zwei Hunde laufen 123"] * 20
TOKENIZER = BytePairTokenizer.train(TEXTS, 300)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back(text):
    (ids,) = TOKENIZER.encode([text])
    assert TOKENIZER.decode([ids]) == [text]
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)


@pytest.mark.parametrize("text", ["</s>", "a <pad> b", " <s>", "  two spaces  ", "日本語 🙂 العربية"])
def test_awkward_texts_come_back(text):
    (ids,) = TOKENIZER.encode([text])
    assert min(ids) > 2, "a special token written in a text is text"
    assert TOKENIZER.decode([ids]) == [text]


def test_a_number_has_the_same_tokens_wherever_it_stands():
    alone, inside, first = TOKENIZER.encode(["a 123", "a(123", "123"])
    size = len(TOKENIZER.encode(["("])[0])
    assert alone[-1:] == inside[-1:] == first[-1:]
    assert len(inside) - size <= len(alone)


def test_it_is_saved_and_read(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    again = BytePairTokenizer.load(tmp_path / "tokenizer.json")
    assert again.encode(TEXTS) == TOKENIZER.encode(TEXTS)


def test_vocabulary_size_is_a_limit():
    assert 259 < TOKENIZER.vocab_size <= 300
    assert BytePairTokenizer.train(TEXTS, 270).vocab_size == 270


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match="a vocabulary of 100 cannot hold"):
        BytePairTokenizer.train(TEXTS, 100)
    with pytest.raises(UserError, match="no such tokenizer file"):
        BytePairTokenizer.load(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"version": ')
    with pytest.raises(UserError, match="not a tokenizer file"):
        BytePairTokenizer.load(tmp_path / "torn.json")


def test_threads_may_encode_at_the_same_time():
    """The training batches are made in a thread of their own while validation sentences are encoded."""
    tokenizer = BytePairTokenizer.train(["a few words"], 270)
    texts = ["a few <pad> words"] * 50
    expected = tokenizer.encode(texts)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(ids == expected for ids in pool.map(lambda _: tokenizer.encode(texts), range(200)))
