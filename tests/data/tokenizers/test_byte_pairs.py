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
def test_any_clean_text_is_decoded_exactly(text):
    (ids,) = TOKENIZER.encode([text])
    assert TOKENIZER.decode([ids]) == [TOKENIZER.clean(text)]
    assert all(0 <= i < TOKENIZER.vocab_size for i in ids)


@pytest.mark.parametrize("text", ["</s>", "a <pad> b", "<s>", "日本語 🙂 العربية"])
def test_special_texts_are_decoded_exactly(text):
    (ids,) = TOKENIZER.encode([text])
    assert min(ids) > 2, "the name of a special token in a text is ordinary text"
    assert TOKENIZER.decode([ids]) == [text]


@pytest.mark.parametrize(
    "text",
    [" a café runs", "a café runs\r", "a\tcafé  runs ", "\ufeffa café runs", "a\u00a0café runs\u00a0",
     "a cafe\u0301 runs", "a café\u200e runs\u2028"],
)  # fmt: skip
def test_forms_of_one_text_have_the_same_tokens(text):
    assert TOKENIZER.clean(text) == "a café runs"
    assert TOKENIZER.encode([text]) == TOKENIZER.encode(["a café runs"])
    assert TOKENIZER.words(text) == TOKENIZER.words("a café runs")


def test_a_number_has_the_same_tokens_in_every_context():
    after_space, after_parenthesis, at_start = TOKENIZER.encode(["a 123", "a(123", "123"])
    size = len(TOKENIZER.encode(["("])[0])
    assert after_space[-1:] == after_parenthesis[-1:] == at_start[-1:]
    assert len(after_parenthesis) - size <= len(after_space)


def test_saving_and_loading(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    loaded = BytePairTokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS) == TOKENIZER.encode(TEXTS)


def test_the_vocabulary_size_is_an_upper_limit():
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


def test_threads_can_encode_concurrently():
    """A thread prepares training batches while the main thread encodes validation sentences."""
    tokenizer = BytePairTokenizer.train(["a few words"], 270)
    texts = ["a few <pad> words"] * 50
    expected = tokenizer.encode(texts)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(ids == expected for ids in pool.map(lambda _: tokenizer.encode(texts), range(200)))
