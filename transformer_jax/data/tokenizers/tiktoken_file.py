"""Conversion of `.tiktoken` files, with the base64 bytes and the rank of a token per line, to BPE merges."""

from __future__ import annotations

import base64
import binascii
import itertools
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from transformer_jax.data.tokenizers.byte_offsets import alphabet as byte_alphabet
from transformer_jax.errors import UserError

# For each encoding: the number of tokens in its file, and the parts that the file lacks, the pattern that
# splits text into words and the special tokens.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = "|".join([
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
_O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
_ENCODINGS: dict[str, tuple[int, str, dict[str, int]]] = {
    "gpt2": (50_256, _GPT2, {"<|endoftext|>": 50_256}),
    "r50k_base": (50_256, _GPT2, {"<|endoftext|>": 50_256}),
    "p50k_base": (50_280, _GPT2, {"<|endoftext|>": 50_256}),
    "cl100k_base": (
        100_256,
        _CL100K,
        {
            "<|endoftext|>": 100_257, "<|fim_prefix|>": 100_258, "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260, "<|endofprompt|>": 100_276,
        },
    ),
    "o200k_base": (199_998, _O200K, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
}  # fmt: skip


def _ranks(path: pathlib.Path, size: int) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path}, line {number}: not a token in base64 and its rank") from None
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        raise UserError(f"{path}: {missing} of the 256 bytes have no token; the file is truncated")
    if len(ranks) != size or len(set(ranks.values())) != size:
        raise UserError(f"{path}: {len(ranks):,} tokens, not {size:,}; the file is truncated or damaged")
    return ranks


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Merge a token's bytes using only pairs of lower rank than the token, and return the parts."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        rank, index = min((ranks.get(a + b, limit), i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        if rank >= limit:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def read_tiktoken(path: str | pathlib.Path) -> Tokenizer:
    """Read the tokenizer of a `.tiktoken` file, whose name determines the encoding.

    A rank is the id of a token and its priority in merging. The library needs merges, which are found by
    merging each token's bytes with pairs of lower rank until two parts are left.

    Raises:
      UserError: The file does not exist or is damaged, or its name is not a known encoding.
    """
    path = pathlib.Path(path)
    if path.stem not in _ENCODINGS:
        raise UserError(f"{path}: unknown encoding {path.stem!r}: known are {', '.join(_ENCODINGS)}")
    size, pattern, special = _ENCODINGS[path.stem]
    ranks, alphabet = _ranks(path, size), byte_alphabet()

    def printable(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        parts = _parts(token, ranks)
        if len(parts) == 2:  # some tokens only occur as complete words, not by merging
            merges.append((printable(parts[0]), printable(parts[1])))
    vocabulary = {printable(token): rank for token, rank in ranks.items()} | special
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return tokenizer
