"""Texts that are cut, against the truncation of the library tokenizers."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from transformer_jax.data.tokenizers.encoded_text import kept_lengths
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer

WORDS = ["aa", "bab", "abba"]


@pytest.fixture(scope="module", params=["wordpiece", "byte_pairs"])
def tokenizer(request):
    return getattr(EncoderTokenizer, request.param)([" ".join(WORDS)] * 2, 270)


def library(tokenizer, **truncation):
    found = Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    found.enable_truncation(**truncation)
    return found


@pytest.mark.parametrize("limit", [9, 10, 17])
def test_what_is_cut_is_what_the_library_cuts(tokenizer, limit):
    other = library(tokenizer, max_length=limit)
    lengths = range(1, 13)
    pairs = [(" ".join(WORDS * a), " ".join(WORDS * b)) for a, b in itertools.product(lengths, lengths)]
    texts = [first for first, _ in pairs] + pairs
    ours = tokenizer.encode_batch(texts, max_length=limit)
    cut = 0
    for text, own, expected in zip(texts, ours, other.encode_batch(texts), strict=True):
        assert own.ids.tolist() == expected.ids, text
        assert own.types.tolist() == expected.type_ids
        assert [n if n >= 0 else None for n in own.sequences.tolist()] == expected.sequence_ids
        assert own.cut == bool(expected.overflowing)
        cut += own.cut
    assert 0 < cut < len(texts)


def test_words_that_are_cut(tokenizer):
    words = [WORDS * n for n in range(1, 6)]
    for own, given in zip(tokenizer.encode_batch(words, max_length=9, words=True), words, strict=True):
        assert len(own.ids) <= 9
        assert own.cut == (own.words.max() < len(given) - 1)
        assert list(own.first_pieces()) == sorted(own.first_pieces(), reverse=True)
        assert {own.words[place] for place in own.first_pieces().values()} == set(own.words[1:-1])
        assert all(own.words[place - 1] != word for word, place in own.first_pieces().items())


def test_a_text_of_no_tokens():
    tokenizer = EncoderTokenizer.wordpiece([" ".join(WORDS)] * 2, 270)
    found = tokenizer.encode_batch(["aa", ("aa", "\u200b"), ("\u200b", "aa"), ("aa", "aa")], max_length=9)
    assert [own.has_every_text for own in found] == [True, False, False, True]


def test_windows_are_those_of_the_library(tokenizer):
    other = library(tokenizer, max_length=14, stride=3, strategy="only_second")
    pairs = [("bab aa", " ".join(WORDS * n)) for n in (1, 2, 9)]
    for own, expected in zip(
        tokenizer.windows(pairs, max_length=14, stride=3), other.encode_batch(pairs), strict=True
    ):
        windows = [expected, *expected.overflowing]
        assert [window.ids.tolist() for window in own] == [window.ids for window in windows]
        assert [[(a, b) for a, b in w.offsets.tolist()] for w in own] == [w.offsets for w in windows]
        assert [window.cut for window in own] == [len(windows) > 1] * len(windows)
    (whole,) = tokenizer.encode_batch([pairs[2]], max_length=999)
    assert not whole.cut  # windows leave the tokenizer as it was


def test_pairs_much_longer_than_the_limit_need_no_more_memory_than_their_tokens():
    """The library's truncation holds each part of one text with each of the other: here 360,000 parts."""
    program = """
import resource
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
tokenizer = EncoderTokenizer.wordpiece(["aa bab"] * 2, 270)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = "aa " * 6_000
(own,) = tokenizer.encode_batch([(text, text)], max_length=23)
print(len(own.ids), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    length, kibibytes = map(int, found.stdout.split())
    assert length == 23
    assert kibibytes < 100 * 1024


@pytest.mark.parametrize(
    ("lengths", "room", "expected"),
    [
        ([3], 5, [3]),
        ([9], 5, [5]),
        ([2, 9], 5, [2, 3]),
        ([9, 2], 5, [3, 2]),
        ([9, 8], 5, [3, 2]),
        ([9, 9], 5, [2, 3]),
    ],
)
def test_the_longer_text_is_cut_first(lengths, room, expected):
    assert kept_lengths(lengths, room) == expected
    assert sum(expected) <= room
    assert np.less_equal(expected, lengths).all()
