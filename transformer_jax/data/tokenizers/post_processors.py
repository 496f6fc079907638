"""Post-processors of the `tokenizers` library, which add special tokens to texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, models, processors


def bert_template(first: str, first_id: int, last: str, last_id: int) -> Any:
    """Return BERT's post-processor: `[CLS] A [SEP]`, or `[CLS] A [SEP] B [SEP]` with type 1 from B on."""
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, first_id), (last, last_id)],
    )


def begin_and_end_template(first: str | None, last: str | None, token_id: Callable[[str], int]) -> Any:
    """Return the post-processor that adds a begin and an end token to each text.

    Args:
      first: The begin token, or None.
      last: The end token, or None.
      token_id: Function from a token to its id.
    """
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


def special_ids(tokenizer: Tokenizer, processor: Any = None) -> list[tuple[list[int], list[int]]]:
    """Return (ids, token types) that a post-processor adds to an empty text and to an empty pair."""
    current = tokenizer.post_processor
    if processor is not None:
        tokenizer.post_processor = processor
    encodings = tokenizer.encode(""), tokenizer.encode("", "")
    if processor is not None:
        tokenizer.post_processor = current
    return [(encoding.ids, encoding.type_ids) for encoding in encodings]


def state_of(part: Any) -> dict[str, Any]:
    """Return the JSON of a normalizer, a pre-tokenizer or a post-processor."""
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def post_processor_of(state: Mapping[str, Any]) -> Any:
    """Create a post-processor from its JSON, which the library reads only as a part of a tokenizer."""
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(empty | {"post_processor": state})).post_processor


def without_types(processor: dict[str, Any]) -> dict[str, Any]:
    """Return a post-processor's JSON in which every token has type 0."""
    if processor["type"] == "Sequence":
        return processor | {"processors": [without_types(part) for part in processor["processors"]]}
    if processor["type"] == "BertProcessing":
        (last, last_id), (first, first_id) = processor["sep"], processor["cls"]
        return without_types(state_of(bert_template(first, first_id, last, last_id)))
    if processor["type"] != "TemplateProcessing":
        return processor

    def untyped(parts: Iterable[dict[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for part in parts:
            yield {name: value | {"type_id": 0} for name, value in part.items()}

    return processor | {name: list(untyped(processor[name])) for name in ("single", "pair")}


def begin_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer's post-processor adds before a text."""
    return [] if tokenizer.post_processor is None else _begin_ids(state_of(tokenizer.post_processor))


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
