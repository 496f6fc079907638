"""Tokens that the files of a published folder add to its vocabulary."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from transformer_jax.data.tokenizers.tokenizer_classes import (
    CONFIG_FILE,
    StoredToken,
    TokenField,
    TokenizerConfig,
    as_added,
)
from transformer_jax.errors import UserError
from transformer_jax.json_files import convert, read_json, read_object, shown

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _TokensWithoutRole(msgspec.Struct):
    """Special tokens without a role, in `tokenizer_config.json` or `special_tokens_map.json`."""

    additional_special_tokens: list[TokenField] | None = None
    extra_special_tokens: list[TokenField] | dict[str, TokenField] | None = None


class AddedTokens(NamedTuple):
    """Tokens that a folder adds to its vocabulary.

    Attributes:
      by_role: Special tokens by role, None for a role that the folder disables.
      by_id: Added tokens by id.
      without_role: Special tokens without role and id.
    """

    by_role: dict[str, AddedToken | None]
    by_id: dict[int, AddedToken]
    without_role: list[AddedToken]


def read_added_tokens(
    folder: pathlib.Path,
    fields: Mapping[str, Any],
    config: TokenizerConfig,
    defaults: Mapping[str, TokenField],
    tokenizer: Tokenizer,
) -> AddedTokens:
    """Read the tokens that a folder adds.

    Without `added_tokens_decoder`, `special_tokens_map.json` takes precedence over `tokenizer_config.json`, and
    `tokenizer.json` over `added_tokens.json`.
    """
    path, map_path = folder / CONFIG_FILE, folder / "special_tokens_map.json"
    has_decoder = config.added_tokens_decoder is not None
    in_map = read_object(map_path) if map_path.is_file() and not has_decoder else {}
    fields_by_role = {**defaults, **_tokens_by_role(fields, path), **_tokens_by_role(in_map, map_path)}
    extra, extra_in_map = (
        convert(fields, _TokensWithoutRole, str(path)),
        convert(in_map, _TokensWithoutRole, str(map_path)),
    )
    without_role: list[TokenField] = []
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
            str(as_added(token)) for token in (*without_role, *fields_by_role.values()) if token is not None
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
        added = None if value is None else as_added(value)
        by_role[role] = None if added is None else known.get(str(added), added)
    return AddedTokens(by_role, dict(sorted(by_id.items())), [as_added(token) for token in without_role])


def _tokens_by_role(fields: Mapping[str, Any], path: pathlib.Path) -> dict[str, TokenField | None]:
    """Return the special tokens by role; other fields that end in `_token` are flags."""
    return {
        role: None if value is None else token_field(value, path)
        for role, value in fields.items()
        if role in _ROLES or (role.endswith("_token") and isinstance(value, (str, dict)))
    }


def token_field(value: Any, path: pathlib.Path) -> TokenField:
    """Return a special token as JSON stores it: its text, or an object with its text and flags."""
    return value if isinstance(value, str) else convert(value, StoredToken, str(path))


def add_tokens(tokenizer: Tokenizer, special: AddedTokens, folder: pathlib.Path) -> None:
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
