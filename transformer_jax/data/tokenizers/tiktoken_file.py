"""`.tiktoken` files: a line for each token, its bytes in base64 and its rank, turned into a BPE of merges."""

from __future__ import annotations

import base64
import binascii
import itertools
import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from transformer_jax.errors import UserError

# Each encoding's number of tokens in its file, and what the file does not hold: how text is cut into words
# before merging, and the special tokens.
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


def _alphabet() -> list[str]:
    """The printable character of each byte in byte-level BPE (Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


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
        raise UserError(f"{path}: {missing} of the 256 bytes have no token; the file is cut short")
    if len(ranks) != size or len(set(ranks.values())) != size:
        raise UserError(f"{path}: {len(ranks):,} tokens, not {size:,}; the file is cut short or damaged")
    return ranks


def _parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What merging leaves of a token's bytes when only pairs of a lower rank than its own may merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        least, place = min((ranks.get(a + b, limit), i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        if least >= limit:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def read_tiktoken(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a `.tiktoken` file, whose name says how it cuts words.

    A rank is a token's id and its turn in merging at once; the merges that the library wants are found by
    merging each token's own bytes with those of lower rank, which leaves the two that it is made of.

    Raises:
      UserError: no such file, a damaged one, or a name that is none of the known encodings.
    """
    path = pathlib.Path(path)
    if path.stem not in _ENCODINGS:
        raise UserError(f"{path}: unknown encoding {path.stem!r}: known are {', '.join(_ENCODINGS)}")
    size, pattern, special = _ENCODINGS[path.stem]
    ranks, alphabet = _ranks(path, size), _alphabet()

    def written(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        parts = _parts(token, ranks)
        if len(parts) == 2:  # some tokens are never made by merging, only found as complete words
            merges.append((written(parts[0]), written(parts[1])))
    vocabulary = {written(token): rank for token, rank in ranks.items()} | special
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return tokenizer
