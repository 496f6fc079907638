"""Text generation: a generator with a tokenizer, several samples per prompt and stop strings."""

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
      text: The prompt and its continuation up to a stop string.
      token_ids: Ids of the prompt, including a begin token, and of the continuation.
      new_tokens: Number of tokens of the continuation.
    """

    text: str
    token_ids: list[int]
    new_tokens: int


class TextGenerator:
    """Continues texts with a causal decoder and its tokenizer.

    Args:
      model: Causal decoder.
      tokenizer: Tokenizer of the model's training.
      sampling: Sampling method.
      ends: Ids of the tokens that end a text; None uses the tokenizer's.
      draft: Smaller model with the same vocabulary that proposes tokens (see `SpeculativeGenerator`), or None.
      draft_tokens: Number of proposals per round.
      int8: Store the weights in 8 bits; see `Generator`.

    Raises:
      UserError: The tokenizer or the draft has another vocabulary, or `int8` is set with a draft; see also
        `Generator`.
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
        int8: bool = False,
    ):
        if int8 and draft is not None:
            raise UserError("`int8_weights` cannot be combined with a draft: remove one of them")
        tokenizer.check_fits(model.config.vocab_size)
        self.tokenizer = tokenizer
        if ends is None:
            ends = tokenizer.ends
        options: dict[str, Any] = dict(sampling=sampling, ends=ends)
        self.generator: Generator | SpeculativeGenerator
        if draft is None:
            self.generator = Generator(model, int8=int8, **options)
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
        """Return `samples` continuations of each prompt.

        Args:
          prompts: Texts, which may contain special tokens.
          max_new_tokens: Largest number of new tokens per continuation.
          samples: Number of continuations per prompt, each with its random key.
          seed: Seed of all draws.
          stop: Strings that end a continuation; the text ends before the stop string.
          on_text: Called during generation with the number of the continuation and its additional text; the
            first call passes the prompt.

        Raises:
          UserError: A stop string is empty; see also `Generator`.
        """
        if not all(stop):
            raise UserError("a stop string is empty: leave it out")
        if not prompts:
            return []
        encoded = self.tokenizer.encode_prompts(prompts)
        for text, ids in zip(prompts, encoded, strict=True):
            if not text or not ids:
                raise UserError("the prompt is empty: give some text")
        requests = [ids for ids in encoded for _ in range(samples)]
        key = jax.random.key(seed)
        rngs = [jax.random.fold_in(key, n) for _ in prompts for n in range(samples)]
        streamed = [""] * len(requests)
        # Decoded lengths, because decoding drops the special tokens of a prompt.
        prompt_lengths = [len(text) for text in self.tokenizer.decode(encoded)]

        def decode(number: int, new_tokens: list[int]) -> tuple[str, bool]:
            """Return the text so far, and whether a stop string ended it."""
            (text,) = self.tokenizer.decode([[*requests[number], *new_tokens]])
            prompt_length = prompt_lengths[number // samples]  # stop strings inside the prompt are ignored
            starts = [text.find(s, max(0, prompt_length - len(s) + 1)) for s in stop]
            starts = [start for start in starts if start >= 0]
            return (text[: min(starts)], True) if starts else (text, False)

        def stream(number: int, text: str) -> None:
            before = streamed[number]
            if on_text is not None and len(text) > len(before) and text.startswith(before):
                on_text(number, text[len(before) :])
                streamed[number] = text

        def check_stop(tokens: list[list[int]]) -> list[bool]:
            done = []
            for number, new_tokens in enumerate(tokens):
                text, stopped = decode(number, new_tokens)
                # Streamed text is final, so an incomplete character or a partial stop string waits.
                stream(number, text if stopped else _without_partial_stop(text.rstrip("\ufffd"), stop))
                done.append(stopped)
            return done

        callback: dict[str, Any] = {}
        if stop or on_text is not None:
            callback = dict(on_tokens=check_stop, chunk=1 if on_text is not None else 16)
        continuations = []
        for number, new_tokens in enumerate(self.generator(requests, max_new_tokens, rngs, **callback)):
            text, stopped = decode(number, new_tokens)
            while stopped and len(new_tokens) > 1 and decode(number, new_tokens[:-1])[1]:
                new_tokens = new_tokens[:-1]  # tokens of the same chunk after the stop string
            stream(number, text)
            continuations.append(Generated(text, [*requests[number], *new_tokens], len(new_tokens)))
        return [continuations[n : n + samples] for n in range(0, len(continuations), samples)]


def _without_partial_stop(text: str, stop: Sequence[str]) -> str:
    """Drop the end of a text that may be the beginning of a stop string."""
    sizes = [size for s in stop for size in range(1, len(s)) if text.endswith(s[:size])]
    return text[: len(text) - max(sizes, default=0)]
