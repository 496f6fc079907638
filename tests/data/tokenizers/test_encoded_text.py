"""Truncated texts against the truncation of the library `tokenizers`."""

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
    """Return the library's tokenizer with truncation."""
    reference = Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    reference.enable_truncation(**truncation)
    return reference


@pytest.mark.parametrize("limit", [9, 10, 17])
def test_truncation_equals_the_library(tokenizer, limit):
    reference = library(tokenizer, max_length=limit)
    lengths = range(1, 13)
    pairs = [(" ".join(WORDS * a), " ".join(WORDS * b)) for a, b in itertools.product(lengths, lengths)]
    texts = [first for first, _ in pairs] + pairs
    encodings = tokenizer.encode_batch(texts, max_length=limit)
    truncated = 0
    for text, encoding, expected in zip(texts, encodings, reference.encode_batch(texts), strict=True):
        assert encoding.ids.tolist() == expected.ids, text
        assert encoding.types.tolist() == expected.type_ids
        assert [n if n >= 0 else None for n in encoding.sequences.tolist()] == expected.sequence_ids
        assert encoding.truncated == bool(expected.overflowing)
        truncated += encoding.truncated
    assert 0 < truncated < len(texts)


def test_truncated_words(tokenizer):
    texts = [WORDS * n for n in range(1, 6)]
    for encoding, words in zip(tokenizer.encode_batch(texts, max_length=9, words=True), texts, strict=True):
        assert len(encoding.ids) <= 9
        assert encoding.truncated == (encoding.words.max() < len(words) - 1)
        first_pieces = encoding.first_pieces()
        assert list(first_pieces) == sorted(first_pieces, reverse=True)
        assert {encoding.words[position] for position in first_pieces.values()} == set(encoding.words[1:-1])
        assert all(encoding.words[position - 1] != word for word, position in first_pieces.items())


def test_a_text_without_tokens():
    tokenizer = EncoderTokenizer.wordpiece([" ".join(WORDS)] * 2, 270)
    encodings = tokenizer.encode_batch(["aa", ("aa", "\u200b"), ("\u200b", "aa"), ("aa", "aa")], max_length=9)
    assert [encoding.has_every_text for encoding in encodings] == [True, False, False, True]


def test_windows_equal_the_library(tokenizer):
    reference = library(tokenizer, max_length=14, stride=3, strategy="only_second")
    pairs = [("bab aa", " ".join(WORDS * n)) for n in (1, 2, 9)]
    for windows, encoding in zip(
        tokenizer.windows(pairs, max_length=14, stride=3), reference.encode_batch(pairs), strict=True
    ):
        expected = [encoding, *encoding.overflowing]
        assert [window.ids.tolist() for window in windows] == [window.ids for window in expected]
        assert [[(a, b) for a, b in w.offsets.tolist()] for w in windows] == [w.offsets for w in expected]
        assert [window.truncated for window in windows] == [len(expected) > 1] * len(expected)
    (encoding,) = tokenizer.encode_batch([pairs[2]], max_length=999)
    assert not encoding.truncated, "windows leave the tokenizer's truncation unchanged"


def test_truncating_long_pairs_needs_memory_only_for_their_tokens():
    """The library's truncation would hold 360,000 combinations of parts of both texts."""
    program = """
import resource
from transformer_jax.data.tokenizers.encoder_tokenizer import EncoderTokenizer
tokenizer = EncoderTokenizer.wordpiece(["aa bab"] * 2, 270)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = "aa " * 6_000
(encoding,) = tokenizer.encode_batch([(text, text)], max_length=23)
print(len(encoding.ids), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    length, kibibytes = map(int, ended.stdout.split())
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
def test_the_longer_text_is_truncated_first(lengths, room, expected):
    assert kept_lengths(lengths, room) == expected
    assert sum(expected) <= room
    assert np.less_equal(expected, lengths).all()
