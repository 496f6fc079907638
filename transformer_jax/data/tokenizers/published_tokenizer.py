"""The tokenizer of a published folder, read from all of its files with the precedence of `transformers`."""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from transformer_jax.data.tokenizers.tokenizer_file import read_bpe, read_tokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_json, read_object, shown

CONFIG_FILE, JSON_FILE = "tokenizer_config.json", "tokenizer.json"

# The class of a folder that names none, by its model's `model_type`.
_DEFAULT_CLASSES = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "longformer": "RobertaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "clip": "CLIPTokenizer",
    "whisper": "WhisperTokenizer",
}
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Texts on which two ways of splitting are compared.
_PROBES = (
    "Don't STOP, in 2010: A b!", " two  spaces ", "a\tb\nc\r\nd", "Ünïted é e\u0301 ﬁ", "東京abc",
    "x\u200by\u00a0z", "İ Σ", "well... (yes)!? _x_ 1,234.5",
)  # fmt: skip


class _Token(msgspec.Struct):
    """A token of `added_tokens_decoder` or of `special_tokens_map.json`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False

    def as_added(self, *, special: bool | None = None) -> AddedToken:
        special = self.special if special is None else special
        return AddedToken(
            self.content, lstrip=self.lstrip, rstrip=self.rstrip, single_word=self.single_word,
            normalized=not special if self.normalized is None else self.normalized, special=special,
        )  # fmt: skip


class _Config(msgspec.Struct):
    """Fields of `tokenizer_config.json` besides the special tokens."""

    tokenizer_class: str | None = None
    auto_map: Any = None
    added_tokens_decoder: dict[str, _Token] | None = None
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


_TokenField = str | _Token


class _Extra(msgspec.Struct):
    """Special tokens without a role, in `tokenizer_config.json` or `special_tokens_map.json`."""

    additional_special_tokens: list[_TokenField] | None = None
    extra_special_tokens: list[_TokenField] | dict[str, _TokenField] | None = None


class _Model(msgspec.Struct):
    tokenizer_class: str | None = None
    model_type: str | None = None


class PublishedTokenizer(NamedTuple):
    """A tokenizer and the special tokens of its folder.

    Attributes:
      tokenizer: The tokenizer, with all added tokens and its template.
      tokens: Special tokens by role, such as "eos_token".
      splits_special_tokens: Whether special tokens in a text are read like other text.
      has_config: Whether a file besides the vocabulary describes the tokenizer or its model.
    """

    tokenizer: Tokenizer
    tokens: dict[str, str]
    splits_special_tokens: bool
    has_config: bool


class _Special(NamedTuple):
    """Tokens that a folder adds to its vocabulary.

    Attributes:
      by_role: Special tokens by role, None for a role that the folder disables.
      by_id: Added tokens by id.
      without_role: Special tokens without role and id.
    """

    by_role: dict[str, AddedToken | None]
    by_id: dict[int, AddedToken]
    without_role: list[AddedToken]


class _Class(NamedTuple):
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
    tokens: Mapping[str, _TokenField]
    splitting: Callable[[_Config], tuple[Any, Any]]
    decoder: Callable[[_Config], Any]
    template: Callable[[_Config, Mapping[str, str], Callable[[str], int]], Any] | None = None
    template_tokens: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}


def _wordpiece_splitting(config: _Config) -> tuple[Any, Any]:
    normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.do_lower_case),
        strip_accents=config.strip_accents,
        handle_chinese_chars=bool(config.tokenize_chinese_chars),
    )
    return normalizer, pre_tokenizers.BertPreTokenizer()


def _wordpiece_decoder(_: _Config) -> Any:
    return decoders.WordPiece(prefix="##")


def _wordpiece_template(_: _Config, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["cls_token"], tokens["sep_token"]
    return bert_template(first, token_id(first), last, token_id(last))


def bert_template(first: str, first_id: int, last: str, last_id: int) -> Any:
    """Return BERT's post-processor: `[CLS] A [SEP]`, or `[CLS] A [SEP] B [SEP]` with type 1 from B on."""
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, first_id), (last, last_id)],
    )


def _byte_level_splitting(config: _Config) -> tuple[Any, Any]:
    return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(config.add_prefix_space))


def _byte_level_decoder(_: _Config) -> Any:
    return decoders.ByteLevel()


def _roberta_template(config: _Config, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["cls_token"], tokens["sep_token"]
    return processors.RobertaProcessing(
        (last, token_id(last)),
        (first, token_id(first)),
        bool(config.trim_offsets),
        bool(config.add_prefix_space),
    )


def _clip_splitting(_: _Config) -> tuple[Any, Any]:
    normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = Regex(
        r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    )
    splits = pre_tokenizers.Split(words, behavior="removed", invert=True)
    return normalizer, pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _clip_template(_: _Config, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["bos_token"], tokens["eos_token"]
    return processors.RobertaProcessing((last, token_id(last)), (first, token_id(first)), False, False)


def _has_prefix(config: _Config) -> bool:
    return config.add_prefix_space is not False


def _llama_splitting(config: _Config) -> tuple[Any, Any]:
    scheme = ("always" if config.legacy else "first") if _has_prefix(config) else "never"
    return None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def _llama_decoder(config: _Config) -> Any:
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=1)] if _has_prefix(config) else [])])


def _unigram_splitting(config: _Config) -> tuple[Any, Any]:
    scheme = "always" if _has_prefix(config) else "never"
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])


def _unigram_decoder(config: _Config) -> Any:
    return decoders.Metaspace(prepend_scheme="always" if _has_prefix(config) else "never")


def _unigram_template(_: _Config, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    first, last = tokens["bos_token"], tokens["eos_token"]
    return processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, last, "$B", last],
        special_tokens=[(first, token_id(first)), (last, token_id(last))],
    )


_BERT_TOKENS: dict[str, _TokenField] = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA_TOKENS: dict[str, _TokenField] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    # The mask includes the preceding space, because a space is part of the masked word.
    "mask_token": _Token("<mask>", lstrip=True, normalized=False, special=True),
}
_END_OF_TEXT: dict[str, _TokenField] = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_LLAMA_TOKENS: dict[str, _TokenField] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

_BERT = _Class(
    "WordPiece", "vocab.txt", _BERT_TOKENS, _wordpiece_splitting, _wordpiece_decoder,
    _wordpiece_template, ("cls_token", "sep_token"),
    {"max_input_chars_per_word": 100, "continuing_subword_prefix": "##"},
)  # fmt: skip
_BYTE_LEVEL_OPTIONS = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
_ROBERTA = _Class(
    "BPE", "vocab.json", _ROBERTA_TOKENS, _byte_level_splitting, _byte_level_decoder, _roberta_template,
    ("cls_token", "sep_token"), _BYTE_LEVEL_OPTIONS,
)  # fmt: skip
_UNIGRAM = _Class(
    "Unigram", "", _ROBERTA_TOKENS, _unigram_splitting, _unigram_decoder, _unigram_template,
    ("bos_token", "eos_token"),
)  # fmt: skip
_LLAMA = _Class(
    "BPE", "", _LLAMA_TOKENS, _llama_splitting, _llama_decoder,
    options={"fuse_unk": True, "byte_fallback": True, "ignore_merges": False},
)  # fmt: skip
_GPT2 = _Class(
    "BPE", "vocab.json", _END_OF_TEXT, _byte_level_splitting, _byte_level_decoder, options=_BYTE_LEVEL_OPTIONS
)
_CLASSES = {
    "BertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT,
    "ElectraTokenizer": _BERT,
    "RobertaTokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "GPT2Tokenizer": _GPT2,
    "WhisperTokenizer": _GPT2,
    "CLIPTokenizer": _Class(
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
_PLAIN_CLASSES = (
    "PreTrainedTokenizer", "TokenizersBackend", "SiglipTokenizer", "Siglip2Tokenizer", "GemmaTokenizer",
)  # fmt: skip
KNOWN_CLASSES = (*_CLASSES, *_PLAIN_CLASSES)


def read_published_tokenizer(
    path: str | pathlib.Path, *, byte_level_class: str, model_type: str | None = None
) -> PublishedTokenizer:
    """Read the tokenizer of a folder with the precedence of `transformers` 5, except where a warning says so.

    `tokenizer_config.json` names the class, whose options (lower case, a space before the text) and template
    apply; the vocabulary is that of `tokenizer.json`, or else of `vocab.txt`, or `vocab.json` and `merges.txt`.
    Tokens are added from `added_tokens_decoder` in the config, or without it from
    `special_tokens_map.json` and `added_tokens.json`. A normalizer or pre-tokenizer in `tokenizer.json` of
    another kind than the class's is kept, with a warning if it splits text differently.

    Args:
      path: A folder, or one of the files with a vocabulary.
      byte_level_class: The class of `vocab.json` and `merges.txt` in a folder that names no class and no model.
      model_type: The `model_type` of the folder's model; None reads it from `config.json`.

    Raises:
      UserError: The class is unknown or needs code of the folder, no file has a vocabulary, a file is damaged,
        or the files contradict each other.
    """
    path = pathlib.Path(path)
    if not path.exists() and path.suffix:
        raise UserError(f"{path}: no such tokenizer file")
    folder = path if path.is_dir() else path.parent
    fields, config = _read_config(folder)
    name, is_named = _class_name(path, config, model_type, byte_level_class)
    kind = _CLASSES.get(name)
    file = path if path.is_file() else _vocabulary_file(folder, name)
    if file.name not in ("vocab.txt", "vocab.json"):
        tokenizer = read_tokenizer(file)
        # Some folders of Llama 3 name LlamaTokenizer for a byte-level `tokenizer.json`; as in `transformers`,
        # that file is read unchanged. So is a file whose model does not fit the default class of its folder.
        is_other = kind is not None and type(tokenizer.model).__name__ != kind.model
        if (name == "LlamaTokenizer" and isinstance(tokenizer.decoder, decoders.ByteLevel)) or (
            is_other and not is_named
        ):
            kind = None
        if kind is not None:
            _apply_class(tokenizer, kind, config, file, name)
    elif kind is None or kind.file != file.name:
        raise UserError(f"{file}: {name} does not read {file.name}")
    else:
        tokenizer = _from_vocabulary(file, kind, config, fields)
    # A default that the vocabulary lacks is not added: the model has no row for it.
    known = [] if kind is None else kind.tokens.items()
    defaults = {
        role: token for role, token in known if tokenizer.token_to_id(str(_as_added(token))) is not None
    }
    special = _special_tokens(folder, fields, config, defaults, tokenizer)
    _warn_of_differences(folder, kind, name, config, special, tokenizer, fields)
    _add_tokens(tokenizer, special, folder)
    tokens = {role: str(token) for role, token in special.by_role.items() if token is not None}
    if kind is not None and isinstance(tokenizer.model, models.WordPiece) and "unk_token" in tokens:
        tokenizer.model.unk_token = tokens["unk_token"]
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None  # random segmentation is for training
    _set_template(tokenizer, kind, config, tokens, file, name, is_named=is_named)
    has_config = any((folder / file_name).is_file() for file_name in (CONFIG_FILE, "config.json"))
    return PublishedTokenizer(tokenizer, tokens, bool(config.split_special_tokens), has_config)


def _read_config(folder: pathlib.Path) -> tuple[dict[str, Any], _Config]:
    path = folder / CONFIG_FILE
    fields = read_object(path) if path.is_file() else {}
    config = convert(fields, _Config, str(path))
    if config.truncation_side not in (None, "right"):
        raise UserError(f"{path}: truncation_side {config.truncation_side!r} is not supported")
    auto_map = config.auto_map
    if isinstance(auto_map, list) or (isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")):
        raise UserError(f"{path}: auto_map needs Python code of the folder, which is never executed")
    return fields, config


def _class_name(
    path: pathlib.Path, config: _Config, model_type: str | None, byte_level_class: str
) -> tuple[str, bool]:
    """Return the name of the tokenizer's class, without "Fast", and whether the folder names it."""
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    model = read_json(file, _Model) if file.is_file() else _Model()
    class_name = config.tokenizer_class or model.tokenizer_class
    name = class_name or _DEFAULT_CLASSES.get(model_type or model.model_type or "")
    if name is None:
        by_file = {JSON_FILE: _PLAIN_CLASSES[0], "vocab.txt": "BertTokenizer", "vocab.json": byte_level_class}
        names = [path.name] if path.is_file() else [n for n in by_file if (folder / n).is_file()]
        name = by_file.get(next(iter(names), ""), _PLAIN_CLASSES[0])
    name = name.removesuffix("Fast")
    if name not in KNOWN_CLASSES:
        raise UserError(
            f"{folder}: the tokenizer class {shown(name)} is not supported; choose one of "
            f"{', '.join(KNOWN_CLASSES)}"
        )
    return name, class_name is not None


def _vocabulary_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    names = [JSON_FILE, *([_CLASSES[name].file] if name in _CLASSES and _CLASSES[name].file else [])]
    file = next((folder / file for file in names if (folder / file).is_file()), None)
    if file is not None:
        return file
    sentencepiece = next(iter(sorted(folder.glob("*.model"))), None)
    if sentencepiece is not None:
        raise UserError(
            f"{sentencepiece}: SentencePiece's format is not read: write a {JSON_FILE} with "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers"
        )
    raise UserError(f"{folder}: {name} needs {' or '.join(names)}, which the folder does not have")


def _apply_class(tokenizer: Tokenizer, kind: _Class, config: _Config, file: pathlib.Path, name: str) -> None:
    """Apply the options of a class to the tokenizer in `tokenizer.json`."""
    model = type(tokenizer.model).__name__
    if model != kind.model:
        raise UserError(f"{file}: has a {model} model, but the tokenizer class {name} needs {kind.model}")
    normalizer, pre_tokenizer = kind.splitting(config)
    expected = [_words(normalizer, pre_tokenizer, text) for text in _PROBES]
    stored = [_words(tokenizer.normalizer, tokenizer.pre_tokenizer, text) for text in _PROBES]
    same_kind = _types(normalizer) == _types(tokenizer.normalizer) and _types(pre_tokenizer) == _types(
        tokenizer.pre_tokenizer
    )
    if same_kind:
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizer
    if same_kind or tokenizer.decoder is None:
        tokenizer.decoder = kind.decoder(config)
    if expected != stored:
        followed, ignored = (name, JSON_FILE) if same_kind else (JSON_FILE, name)
        warnings.warn(
            f"{file.parent}: {JSON_FILE} and {name} with the options in {CONFIG_FILE} split text differently: "
            f"{followed} is followed, not {ignored}",
            stacklevel=5,
        )


def _words(normalizer: Any, pre_tokenizer: Any, text: str) -> list[str]:
    """Return the words into which a text is split before the model."""
    text = text if normalizer is None else normalizer.normalize_str(text)
    return [text] if pre_tokenizer is None else [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def _types(part: Any) -> list[str]:
    """Return the types of a normalizer or pre-tokenizer and of its steps."""
    if part is None:
        return []
    state = _state(part)
    steps = state.get("normalizers", state.get("pretokenizers", [state]))
    return [step["type"] for step in steps]


def _from_vocabulary(file: pathlib.Path, kind: _Class, config: _Config, fields: Mapping[str, Any]) -> Tokenizer:
    """Create a class's tokenizer from its vocabulary file."""
    if file.name == "vocab.json":
        suffix = kind.options.get("end_of_word_suffix")
        options = (
            {} if suffix is None else {"end_of_word_suffix": suffix, "unk_token": kind.tokens["unk_token"]}
        )
        tokenizer = Tokenizer(read_bpe(file, file.parent / "merges.txt", **options))
    else:
        special_map = file.parent / "special_tokens_map.json"
        in_map = read_object(special_map) if special_map.is_file() else {}
        unknown_field = in_map.get("unk_token") or fields.get("unk_token") or "[UNK]"
        unknown = _token_field(unknown_field, file.parent / CONFIG_FILE)
        tokenizer = Tokenizer(_read_wordpiece(file, unknown if isinstance(unknown, str) else unknown.content))
    normalizer, pre_tokenizer = kind.splitting(config)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, kind.decoder(config)
    return tokenizer


def _read_wordpiece(path: pathlib.Path, unknown: str) -> models.WordPiece:
    """Read BERT's `vocab.txt`, a piece per line."""
    try:
        vocabulary = models.WordPiece.read_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise UserError(f"{path}: not a vocabulary of word pieces ({error})") from None
    if len(vocabulary) != max(vocabulary.values(), default=-1) + 1:
        raise UserError(f"{path}: a word piece is listed twice")
    if unknown not in vocabulary:
        raise UserError(f"{path}: the vocabulary lacks the unknown token {unknown!r}")
    return models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)


def _special_tokens(
    folder: pathlib.Path,
    fields: Mapping[str, Any],
    config: _Config,
    defaults: Mapping[str, _TokenField],
    tokenizer: Tokenizer,
) -> _Special:
    """Read the tokens that a folder adds.

    Without `added_tokens_decoder`, `special_tokens_map.json` takes precedence over `tokenizer_config.json`, and
    `tokenizer.json` over `added_tokens.json`.
    """
    path, map_path = folder / CONFIG_FILE, folder / "special_tokens_map.json"
    has_decoder = config.added_tokens_decoder is not None
    in_map = read_object(map_path) if map_path.is_file() and not has_decoder else {}
    fields_by_role = {**defaults, **_tokens_by_role(fields, path), **_tokens_by_role(in_map, map_path)}
    extra, extra_in_map = convert(fields, _Extra, str(path)), convert(in_map, _Extra, str(map_path))
    without_role: list[_TokenField] = []
    for tokens in (
        extra.extra_special_tokens or extra.additional_special_tokens,
        extra_in_map.extra_special_tokens,
    ):
        if isinstance(tokens, dict):
            fields_by_role |= tokens
        else:
            without_role += tokens or []
    by_id: dict[int, AddedToken] = {}
    for key, token in (config.added_tokens_decoder or {}).items():
        if not key.isdecimal():
            raise UserError(f"{path}: added_tokens_decoder has the key {shown(key)}, which is no id")
        by_id[int(key)] = token.as_added()
    if not has_decoder and (folder / "added_tokens.json").is_file():
        special = {
            str(_as_added(token)) for token in (*without_role, *fields_by_role.values()) if token is not None
        }
        for content, number in read_json(folder / "added_tokens.json", dict[str, int]).items():
            is_special = content in special
            by_id[number] = AddedToken(content, normalized=not is_special, special=is_special)
        by_id |= {n: t for n, t in tokenizer.get_added_tokens_decoder().items() if n in by_id}
    # `transformers` 5 reads this field after the added tokens, which therefore do not become special by it.
    without_role += extra_in_map.additional_special_tokens or []
    known = {str(token): token for token in by_id.values()}
    by_role: dict[str, AddedToken | None] = {}
    for role, value in fields_by_role.items():
        added = None if value is None else _as_added(value)
        by_role[role] = None if added is None else known.get(str(added), added)
    return _Special(by_role, dict(sorted(by_id.items())), [_as_added(token) for token in without_role])


def _tokens_by_role(fields: Mapping[str, Any], path: pathlib.Path) -> dict[str, _TokenField | None]:
    """Return the special tokens by role; other fields that end in `_token` are flags."""
    return {
        role: None if value is None else _token_field(value, path)
        for role, value in fields.items()
        if role in _ROLES or (role.endswith("_token") and isinstance(value, (str, dict)))
    }


def _token_field(value: Any, path: pathlib.Path) -> _TokenField:
    """Return a special token as JSON stores it: its text, or an object with its text and flags."""
    return value if isinstance(value, str) else convert(value, _Token, str(path))


def _as_added(token: _TokenField) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return token.as_added(special=True)


def _add_tokens(tokenizer: Tokenizer, special: _Special, folder: pathlib.Path) -> None:
    """Add a folder's tokens to its tokenizer.

    Raises:
      UserError: The vocabulary gives a token another id than the folder.
    """
    by_role = [token for token in special.by_role.values() if token is not None]
    contents = {str(token) for token in by_role}
    stored = tokenizer.get_added_tokens_decoder().values()
    tokens = list(special.by_id.values())
    present = {str(token) for token in (*stored, *tokens)}
    for token in (*by_role, *special.without_role):
        if str(token) not in present:
            tokens.append(token)
            present.add(str(token))
    for token in tokens:
        token.special = token.special or str(token) in contents
    tokenizer.add_tokens(tokens)
    for number, token in special.by_id.items():
        if (actual := tokenizer.token_to_id(str(token))) != number:
            name = shown(str(token))
            raise UserError(
                f"{folder}: the files of added tokens give {name} the id {number}, but the vocabulary gives it "
                f"{actual}"
            )


def _warn_of_differences(
    folder: pathlib.Path,
    kind: _Class | None,
    name: str,
    config: _Config,
    special: _Special,
    tokenizer: Tokenizer,
    fields: Mapping[str, Any],
) -> None:
    """Warn if the result differs from `transformers` 5: model options, added tokens or the mask."""
    if kind is None:
        return
    model: Any = tokenizer.model
    different = [n for n, value in kind.options.items() if getattr(model, n, value) not in (value, None)]
    if different:
        warnings.warn(
            f"{folder}: {JSON_FILE} is followed for {', '.join(different)}, which {name} sets differently",
            stacklevel=4,
        )
    if config.added_tokens_decoder is not None:
        known = {str(token) for token in special.by_id.values()}
        stored = (token.content for token in tokenizer.get_added_tokens_decoder().values())
        if missing := [token for token in stored if token not in known and not token.startswith("[unused")]:
            warnings.warn(
                f"{folder}: {JSON_FILE} adds {shown(missing[0])}, which added_tokens_decoder lacks: it is kept",
                stacklevel=4,
            )
    mask = special.by_role.get("mask_token")
    if (
        mask is not None
        and mask.lstrip
        and "mask_token" not in fields
        and str(mask)
        not in {str(token) for token in special.by_id.values()}
        | {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    ):
        warnings.warn(
            f"{folder}: no file describes {mask}: it includes the space before it, as in RoBERTa; in "
            "transformers 5 it does not",
            stacklevel=4,
        )


def _set_template(
    tokenizer: Tokenizer,
    kind: _Class | None,
    config: _Config,
    tokens: Mapping[str, str],
    file: pathlib.Path,
    name: str,
    *,
    is_named: bool,
) -> None:
    """Set the post-processor, which adds special tokens to a text."""

    def token_id(token: str) -> int:
        result = tokenizer.token_to_id(token)
        assert result is not None, "special tokens are in the vocabulary"
        return result

    missing = [] if kind is None else [role for role in kind.template_tokens if role not in tokens]
    if missing:
        raise UserError(
            f"{file}: {name} adds its {missing[0]} to each text, but the folder has no {missing[0]}"
        )
    stored = tokenizer.post_processor
    if kind is not None and kind.template is not None:
        tokenizer.post_processor = kind.template(config, tokens, token_id)
    elif stored is None:
        # `tokenizer.json` comes before the flags of the config.
        flags = _Config() if file.name == JSON_FILE else config
        tokenizer.post_processor = _begin_and_end(flags, tokens, token_id)
    if stored is not None and _template_ids(tokenizer) != _template_ids(tokenizer, stored):
        warnings.warn(
            f"{file.parent}: the template in {JSON_FILE} adds other special tokens or token types than {name}: "
            f"{name} is followed",
            stacklevel=5,
        )
    names = config.model_input_names
    # The plain classes of `transformers` 5 return token types only where the folder asks for them.
    silent = names is None and kind is None and is_named
    without_types = silent or (names is not None and "token_type_ids" not in names)
    if tokenizer.post_processor is not None and without_types:
        state = _state(tokenizer.post_processor)
        if (without := _without_types(state)) != state:
            tokenizer.post_processor = _post_processor(without)
            if silent and stored is not None:
                warnings.warn(
                    f"{file.parent}: the token types in {JSON_FILE} are not used, because {CONFIG_FILE} has no "
                    "model_input_names that lists token_type_ids",
                    stacklevel=5,
                )


def _template_ids(tokenizer: Tokenizer, processor: Any = None) -> list[tuple[list[int], list[int]]]:
    """Return (ids, token types) that a post-processor adds to an empty text and to an empty pair."""
    current = tokenizer.post_processor
    if processor is not None:
        tokenizer.post_processor = processor
    encodings = tokenizer.encode(""), tokenizer.encode("", "")
    if processor is not None:
        tokenizer.post_processor = current
    return [(encoding.ids, encoding.type_ids) for encoding in encodings]


def _begin_and_end(config: _Config, tokens: Mapping[str, str], token_id: Callable[[str], int]) -> Any:
    """Return the post-processor that adds the begin and end tokens that `tokenizer_config.json` asks for."""
    first = tokens.get("bos_token") if config.add_bos_token else None
    last = tokens.get("eos_token") if config.add_eos_token else None
    before, after = [[name] if name else [] for name in (first, last)]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{name}:1" for name in before),
            "$B:1",
            *(f"{name}:1" for name in after),
        ],
        special_tokens=[(name, token_id(name)) for name in (first, last) if name],
    )


def _state(part: Any) -> dict[str, Any]:
    """Return the JSON of a normalizer, a pre-tokenizer or a post-processor."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _post_processor(state: Mapping[str, Any]) -> Any:
    """Create a post-processor from its JSON, which the library reads only as a part of a tokenizer."""
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(empty | {"post_processor": state})).post_processor


def _without_types(processor: dict[str, Any]) -> dict[str, Any]:
    """Return a post-processor's JSON in which every token has type 0."""
    if processor["type"] == "Sequence":
        return processor | {"processors": [_without_types(part) for part in processor["processors"]]}
    if processor["type"] == "BertProcessing":
        (last, last_id), (first, first_id) = processor["sep"], processor["cls"]
        template = _state(bert_template(first, first_id, last, last_id))
        return _without_types(template)
    if processor["type"] != "TemplateProcessing":
        return processor

    def untyped(parts: Iterable[dict[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for part in parts:
            yield {name: value | {"type_id": 0} for name, value in part.items()}

    return processor | {name: list(untyped(processor[name])) for name in ("single", "pair")}


def begin_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer's post-processor adds before a text."""
    return [] if tokenizer.post_processor is None else _begin_ids(_state(tokenizer.post_processor))


def _begin_ids(state: Mapping[str, Any]) -> list[int]:
    if state["type"] == "Sequence":
        return [number for part in state["processors"] for number in _begin_ids(part)]
    if state["type"] in ("BertProcessing", "RobertaProcessing"):
        return [state["cls"][1]]
    ids: list[int] = []
    for part in state.get("single", ()):
        if "SpecialToken" not in part:
            break
        ids += state["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return ids
