"""What the tokenizer classes of `transformers` define: how text is split, special tokens and templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from transformer_jax.data.tokenizers.post_processors import bert_template

CONFIG_FILE, JSON_FILE = "tokenizer_config.json", "tokenizer.json"

# The class of a folder that names none, by its model's `model_type`.
DEFAULT_CLASSES = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "longformer": "RobertaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "clip": "CLIPTokenizer",
    "whisper": "WhisperTokenizer",
}


class StoredToken(msgspec.Struct):
    """A token of `added_tokens_decoder` or of `special_tokens_map.json`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False

    def as_added(self, *, special: bool | None = None) -> AddedToken:
        """Return the library's token.

        Args:
          special: Whether the token is special; None means as stored.
        """
        special = self.special if special is None else special
        return AddedToken(
            self.content, lstrip=self.lstrip, rstrip=self.rstrip, single_word=self.single_word,
            normalized=not special if self.normalized is None else self.normalized, special=special,
        )  # fmt: skip


class TokenizerConfig(msgspec.Struct):
    """Fields of `tokenizer_config.json` besides the special tokens."""

    tokenizer_class: str | None = None
    auto_map: Any = None
    added_tokens_decoder: dict[str, StoredToken] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    do_lower_case: bool | None = True
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = True
    add_prefix_space: bool | None = None
    trim_offsets: bool | None = True
    legacy: bool | None = None
    model_input_names: list[str] | None = None
    truncation_side: str | None = None
    split_special_tokens: bool | None = None


# A special token as JSON stores it: its text, or an object with its text and flags.
TokenField = str | StoredToken


def as_added(token: TokenField) -> AddedToken:
    """Return a special token of the library."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return token.as_added(special=True)


class TokenizerClass(NamedTuple):
    """What a class of `transformers` defines.

    Attributes:
      model: The type of its model in `tokenizer.json`.
      file: The file of its vocabulary in folders without `tokenizer.json`, or "".
      tokens: Its special tokens by role, where the folder names none.
      splitting: Function from the config to its normalizer and its pre-tokenizer.
      decoder: Function from the config to its decoder.
      template: Function from (config, special tokens, id of a token) to its post-processor; None uses that of
        `tokenizer.json`, or adds the begin and end tokens that the config asks for.
      template_tokens: Roles of the special tokens in the template.
      options: Options of its model by name.
    """

    model: str
    file: str
    tokens: Mapping[str, TokenField]
    splitting: Callable[[TokenizerConfig], tuple[Any, Any]]
    decoder: Callable[[TokenizerConfig], Any]
    template: Callable[[TokenizerConfig, Mapping[str, str], Callable[[str], int]], Any] | None = None
    template_tokens: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}


def _wordpiece_splitting(config: TokenizerConfig) -> tuple[Any, Any]:
    normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.do_lower_case),
        strip_accents=config.strip_accents,
        handle_chinese_chars=bool(config.tokenize_chinese_chars),
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()


def _wordpiece_decoder(_: TokenizerConfig) -> Any:
    return decoders.WordPiece(prefix="##")


def _wordpiece_template(_: TokenizerConfig, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["cls_token"], tokens["sep_token"]
    return bert_template(first, token_id(first), last, token_id(last))


def _byte_level_splitting(config: TokenizerConfig) -> tuple[Any, Any]:
    return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(config.add_prefix_space))


def _byte_level_decoder(_: TokenizerConfig) -> Any:
    return decoders.ByteLevel()


def _roberta_template(
    config: TokenizerConfig, tokens: Mapping[str, str], token_id: Callable[[str], int]
) -> Any:
    first, last = tokens["cls_token"], tokens["sep_token"]
    return processors.RobertaProcessing(
        (last, token_id(last)),
        (first, token_id(first)),
        bool(config.trim_offsets),
        bool(config.add_prefix_space),
    )


def _clip_splitting(_: TokenizerConfig) -> tuple[Any, Any]:
    normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = Regex(
        r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    )
    splits = pre_tokenizers.Split(words, behavior="removed", invert=True)
    return normalizer, pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _clip_template(_: TokenizerConfig, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["bos_token"], tokens["eos_token"]
    return processors.RobertaProcessing((last, token_id(last)), (first, token_id(first)), False, False)


def _has_prefix(config: TokenizerConfig) -> bool:
    return config.add_prefix_space is not False


def _llama_splitting(config: TokenizerConfig) -> tuple[Any, Any]:
    scheme = ("always" if config.legacy else "first") if _has_prefix(config) else "never"
    return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def _llama_decoder(config: TokenizerConfig) -> Any:
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if _has_prefix(config) else [])])


def _unigram_splitting(config: TokenizerConfig) -> tuple[Any, Any]:
    scheme = "always" if _has_prefix(config) else "never"
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])


def _unigram_decoder(config: TokenizerConfig) -> Any:
    return decoders.Metaspace(prepend_scheme="always" if _has_prefix(config) else "never")


def _unigram_template(_: TokenizerConfig, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["bos_token"], tokens["eos_token"]
    return processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, last, "$B", last],
        special_tokens=[(first, token_id(first)), (last, token_id(last))],
    )


_BERT_TOKENS: dict[str, TokenField] = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}

_ROBERTA_TOKENS: dict[str, TokenField] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    # The mask includes the preceding space, because a space is part of the masked word.
    "mask_token": StoredToken("<mask>", lstrip=True, normalized=False, special=True),
}

_END_OF_TEXT: dict[str, TokenField] = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")

_LLAMA_TOKENS: dict[str, TokenField] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

_BERT = TokenizerClass(
    "WordPiece", "vocab.txt", _BERT_TOKENS, _wordpiece_splitting, _wordpiece_decoder,
    _wordpiece_template, ("cls_token", "sep_token"),
    {"max_input_chars_per_word": 100, "continuing_subword_prefix": "##"},
)  # fmt: skip

_BYTE_LEVEL_OPTIONS = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}

_ROBERTA = TokenizerClass(
    "BPE", "vocab.json", _ROBERTA_TOKENS, _byte_level_splitting, _byte_level_decoder, _roberta_template,
    ("cls_token", "sep_token"), _BYTE_LEVEL_OPTIONS,
)  # fmt: skip

_UNIGRAM = TokenizerClass(
    "Unigram", "", _ROBERTA_TOKENS, _unigram_splitting, _unigram_decoder, _unigram_template,
    ("bos_token", "eos_token"),
)  # fmt: skip

_LLAMA = TokenizerClass(
    "BPE", "", _LLAMA_TOKENS, _llama_splitting, _llama_decoder,
    options={"fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
)  # fmt: skip

_GPT2 = TokenizerClass(
    "BPE", "vocab.json", _END_OF_TEXT, _byte_level_splitting, _byte_level_decoder, options=_BYTE_LEVEL_OPTIONS
)

CLASSES = {
    "BertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT,
    "ElectraTokenizer": _BERT,
    "RobertaTokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "GPT2Tokenizer": _GPT2,
    "WhisperTokenizer": _GPT2,
    "CLIPTokenizer": TokenizerClass(
        "BPE",
        "vocab.json",
        _END_OF_TEXT | {"bos_token": "<|startoftext|>", "pad_token": "<|endoftext|>"},
        _clip_splitting,
        _byte_level_decoder,
        _clip_template,
        ("bos_token", "eos_token"),
        _BYTE_LEVEL_OPTIONS | {"end_of_word_suffix": "</w>"},
    ),
    "LlamaTokenizer": _LLAMA,
    "XLMRobertaTokenizer": _UNIGRAM,
}

# Classes that add nothing to `tokenizer.json`.
PLAIN_CLASSES = (
    "PreTrainedTokenizer", "TokenizersBackend", "SiglipTokenizer", "Siglip2Tokenizer", "GemmaTokenizer",
)  # fmt: skip

KNOWN_CLASSES = (*CLASSES, *PLAIN_CLASSES)
