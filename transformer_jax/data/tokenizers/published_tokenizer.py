"""The tokenizer of a published folder, read from all of its files with the precedence of `transformers`."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer, decoders, models

from transformer_jax.data.tokenizers.added_tokens import AddedTokens, add_tokens, read_added_tokens, token_field
from transformer_jax.data.tokenizers.post_processors import (
    begin_and_end_template,
    post_processor_of,
    special_ids,
    state_of,
    without_types,
)
from transformer_jax.data.tokenizers.tokenizer_classes import (
    CLASSES,
    CONFIG_FILE,
    DEFAULT_CLASSES,
    JSON_FILE,
    KNOWN_CLASSES,
    PLAIN_CLASSES,
    TokenizerClass,
    TokenizerConfig,
    as_added,
)
from transformer_jax.data.tokenizers.tokenizer_file import read_bpe, read_tokenizer
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_json, read_object, shown

# Texts on which two ways of splitting are compared.
_PROBES = (
    "Don't STOP, in 2010: A b!", " two  spaces ", "a\tb\nc\r\nd", "Ünïted é e\u0301 ﬁ", "東京abc",
    "x\u200by\u00a0z", "İ Σ", "well... (yes)!? _x_ 1,234.5",
)  # fmt: skip


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
    kind = CLASSES.get(name)
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
    defaults = {role: token for role, token in known if tokenizer.token_to_id(str(as_added(token))) is not None}
    special = read_added_tokens(folder, fields, config, defaults, tokenizer)
    _warn_of_differences(folder, kind, name, config, special, tokenizer, fields)
    add_tokens(tokenizer, special, folder)
    tokens = {role: str(token) for role, token in special.by_role.items() if token is not None}
    if kind is not None and isinstance(tokenizer.model, models.WordPiece) and "unk_token" in tokens:
        tokenizer.model.unk_token = tokens["unk_token"]
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None  # random segmentation is for training
    _set_template(tokenizer, kind, config, tokens, file, name, is_named=is_named)
    has_config = any((folder / file_name).is_file() for file_name in (CONFIG_FILE, "config.json"))
    return PublishedTokenizer(tokenizer, tokens, bool(config.split_special_tokens), has_config)


def _read_config(folder: pathlib.Path) -> tuple[dict[str, Any], TokenizerConfig]:
    path = folder / CONFIG_FILE
    fields = read_object(path) if path.is_file() else {}
    config = convert(fields, TokenizerConfig, str(path))
    if config.truncation_side not in (None, "right"):
        raise UserError(f"{path}: truncation_side {config.truncation_side!r} is not supported")
    auto_map = config.auto_map
    if isinstance(auto_map, list) or (isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")):
        raise UserError(f"{path}: auto_map needs Python code of the folder, which is never executed")
    return fields, config


def _class_name(
    path: pathlib.Path, config: TokenizerConfig, model_type: str | None, byte_level_class: str
) -> tuple[str, bool]:
    """Return the name of the tokenizer's class, without "Fast", and whether the folder names it."""
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
    model = read_json(file, _Model) if file.is_file() else _Model()
    class_name = config.tokenizer_class or model.tokenizer_class
    name = class_name or DEFAULT_CLASSES.get(model_type or model.model_type or "")
    if name is None:
        by_file = {JSON_FILE: PLAIN_CLASSES[0], "vocab.txt": "BertTokenizer", "vocab.json": byte_level_class}
        names = [path.name] if path.is_file() else [n for n in by_file if (folder / n).is_file()]
        name = by_file.get(next(iter(names), ""), PLAIN_CLASSES[0])
    name = name.removesuffix("Fast")
    if name not in KNOWN_CLASSES:
        raise UserError(
            f"{folder}: the tokenizer class {shown(name)} is not supported; choose one of "
            f"{', '.join(KNOWN_CLASSES)}"
        )
    return name, class_name is not None


def _vocabulary_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    names = [JSON_FILE, *([CLASSES[name].file] if name in CLASSES and CLASSES[name].file else [])]
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


def _apply_class(
    tokenizer: Tokenizer, kind: TokenizerClass, config: TokenizerConfig, file: pathlib.Path, name: str
) -> None:
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
    state = state_of(part)
    steps = state.get("normalizers", state.get("pretokenizers", [state]))
    return [step["type"] for step in steps]


def _from_vocabulary(
    file: pathlib.Path, kind: TokenizerClass, config: TokenizerConfig, fields: Mapping[str, Any]
) -> Tokenizer:
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
        unknown = token_field(unknown_field, file.parent / CONFIG_FILE)
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


def _warn_of_differences(
    folder: pathlib.Path,
    kind: TokenizerClass | None,
    name: str,
    config: TokenizerConfig,
    special: AddedTokens,
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
    kind: TokenizerClass | None,
    config: TokenizerConfig,
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
        flags = TokenizerConfig() if file.name == JSON_FILE else config
        first = tokens.get("bos_token") if flags.add_bos_token else None
        last = tokens.get("eos_token") if flags.add_eos_token else None
        tokenizer.post_processor = begin_and_end_template(first, last, token_id)
    if stored is not None and special_ids(tokenizer) != special_ids(tokenizer, stored):
        warnings.warn(
            f"{file.parent}: the template in {JSON_FILE} adds other special tokens or token types than {name}: "
            f"{name} is followed",
            stacklevel=5,
        )
    names = config.model_input_names
    # The plain classes of `transformers` 5 return token types only where the folder asks for them.
    silent = names is None and kind is None and is_named
    omits_types = silent or (names is not None and "token_type_ids" not in names)
    if tokenizer.post_processor is not None and omits_types:
        state = state_of(tokenizer.post_processor)
        if (untyped := without_types(state)) != state:
            tokenizer.post_processor = post_processor_of(untyped)
            if silent and stored is not None:
                warnings.warn(
                    f"{file.parent}: the token types in {JSON_FILE} are not used, because {CONFIG_FILE} has no "
                    "model_input_names that lists token_type_ids",
                    stacklevel=5,
                )
