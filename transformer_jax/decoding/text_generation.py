"""Prompts in, texts out: the tokenizer, the samples of each prompt and stop strings around the generator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from transformer_jax.data.tokenizers.text_tokenizer import TextTokenizer
from transformer_jax.decoding.generation import Generator, Sampling
from transformer_jax.decoding.speculative import SpeculativeGenerator
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Generated:
    """One continuation of a prompt.

    Attributes:
      text: the prompt and what follows it, up to a stop string.
      token_ids: all that the model saw and made, a begin token included.
      new_tokens: how many of them were made.
    """

    text: str
    token_ids: list[int]
    new_tokens: int


class TextGenerator:
    """Continues texts with a causal decoder and its tokenizer.

    Args:
      model: a causal decoder.
      tokenizer: the one that it was trained with.
      sampling: how a token is chosen.
      ends: ids of the tokens that end a text; None is the tokenizer's own.
      draft: a smaller model of the same vocabulary that proposes tokens (see `SpeculativeGenerator`), or None.
      draft_tokens: how many it proposes at a time.

    Raises:
      UserError: a tokenizer or a draft of another vocabulary.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TextTokenizer,
        *,
        sampling: Sampling = Sampling(),
        ends: Sequence[int] | None = None,
        draft: Any = None,
        draft_tokens: int = 4,
    ):
        tokenizer.check_fits(model.config.vocab_size)
        self.tokenizer = tokenizer
        if ends is None:
            ends = tokenizer.ends
        options: dict[str, Any] = dict(sampling=sampling, ends=ends)
        self.generator: Generator | SpeculativeGenerator
        if draft is None:
            self.generator = Generator(model, **options)
        else:
            self.generator = SpeculativeGenerator(model, draft, draft_tokens=draft_tokens, **options)

    def __call__(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[list[Generated]]:
        """`samples` continuations of each prompt.

        Args:
          prompts: texts; special tokens may be written in them.
          max_new_tokens: largest number of new tokens of each continuation.
          samples: continuations of each prompt, with keys of their own.
          seed: of all draws.
          stop: strings that end a continuation, which are cut off.
          on_text: called with (number of the continuation, what came to its text) as it is made; the first
            call has the prompt.

        Raises:
          UserError: see `Generator`; or an empty stop string.
        """
        if not all(stop):
            raise UserError("a stop string is empty: leave it out")
        if not prompts:
            return []
        encoded = self.tokenizer.encode_prompts(prompts)
        for text, ids in zip(prompts, encoded, strict=True):
            if not text or not ids:
                raise UserError("the prompt is empty: give some text")
        asked = [ids for ids in encoded for _ in range(samples)]
        key = jax.random.key(seed)
        rngs = [jax.random.fold_in(key, n) for _ in prompts for n in range(samples)]
        shown = [""] * len(asked)
        # As they come out again: special tokens are left out of a text.
        begins = [len(text) for text in self.tokenizer.decode(encoded)]

        def text_of(number: int, new: list[int]) -> tuple[str, bool]:
            """The text so far, and whether a stop string ended it."""
            (text,) = self.tokenizer.decode([[*asked[number], *new]])
            behind = begins[number // samples]  # a stop string in the prompt stops nothing
            places = [place for s in stop if (place := text.find(s, max(0, behind - len(s) + 1))) >= 0]
            return (text[: min(places)], True) if places else (text, False)

        def show(number: int, text: str) -> None:
            if on_text is not None and len(text) > len(shown[number]) and text.startswith(shown[number]):
                on_text(number, text[len(shown[number]) :])
                shown[number] = text

        def look(made: list[list[int]]) -> list[bool]:
            done = []
            for number, new in enumerate(made):
                text, stopped = text_of(number, new)
                # The last character may be cut, and a stop string may have begun: what is shown stays shown.
                show(number, text if stopped else _without_begun(text.rstrip("\ufffd"), stop))
                done.append(stopped)
            return done

        watched: dict[str, Any] = {}
        if stop or on_text is not None:
            watched = dict(on_tokens=look, chunk=1 if on_text is not None else 16)
        made = self.generator(asked, max_new_tokens, rngs, **watched)
        found = []
        for number, new in enumerate(made):
            text, stopped = text_of(number, new)
            while stopped and len(new) > 1 and text_of(number, new[:-1])[1]:
                new = new[:-1]  # tokens of the same call behind the stop string
            show(number, text)
            found.append(Generated(text, [*asked[number], *new], len(new)))
        return [found[n : n + samples] for n in range(0, len(found), samples)]


def _without_begun(text: str, stop: Sequence[str]) -> str:
    """The text without an end that a stop string may begin with."""
    begun = [size for s in stop for size in range(1, len(s)) if text.endswith(s[:size])]
    return text[: len(text) - max(begun, default=0)]
