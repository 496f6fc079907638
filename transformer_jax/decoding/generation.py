"""From a prompt to the tokens after it: one program for the prompt and one for the tokens, by bucket."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.sampling import draw, penalise_repetition, sampling_logits
from transformer_jax.decoding.top_k import top_k
from transformer_jax.decoding.translator import bucket_length
from transformer_jax.distributed.mesh import ROWS, constrained, replicated
from transformer_jax.errors import UserError

# Tokens that a call of the compiled loop makes at most, before the host reads them.
_CHUNK = 32
# Rows of a batch are rounded up to one of these.
_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is chosen; see `sampling_logits`.

    Attributes:
      temperature: 0 takes the likeliest token.
      top_k, top_p, min_p: restrictions of what is drawn from, or None.
      repetition_penalty: see `penalise_repetition`; 1 for none.

    Raises:
      UserError: a value outside its range, or a restriction where nothing is drawn.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise UserError(f"`temperature` {self.temperature} is below 0")
        if not self.repetition_penalty > 0:
            raise UserError(f"`repetition_penalty` {self.repetition_penalty} is not above 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"`top_k` {self.top_k} is below 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UserError(f"`{name}` {value} must be above 0 and at most 1")
        given = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) is not None]
        if self.temperature == 0 and given:
            flags = ", ".join(f"`{name}`" for name in given)
            raise UserError(f"`temperature` 0 takes the likeliest token, which {flags} cannot change: drop one")

    def logits(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Of the distribution that is drawn from (B, V); at temperature 0 those whose largest is taken."""
        if seen is not None:
            logits = penalise_repetition(logits, seen, self.repetition_penalty)
        if self.temperature == 0:
            return logits
        return sampling_logits(
            logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def choose(self, logits: jax.Array, seen: jax.Array | None, rngs: jax.Array, position: jax.Array):
        """A token of each row (B,) int32."""
        logits = self.logits(logits, seen)
        if self.temperature == 0:
            return top_k(logits, 1)[1][..., 0].astype(jnp.int32)  # XLA's argmax is one slow thread
        return draw(logits, rngs, position)


def cache_sizes(prompt: int, new_tokens: int, limit: int) -> tuple[int, int]:
    """(places of the prompts, places of the cache): rounded up, so that programs are compiled for a few sizes.

    With its empty places in front of short prompts, a row may be longer than the context.

    Args:
      prompt: tokens of the longest prompt.
      new_tokens: largest number of tokens after it.
      limit: the context.
    """
    length = bucket_length(prompt, limit)
    return length, length + bucket_length(new_tokens, limit)


def batch_rows(requests: int) -> int:
    """The rows of a batch of so many requests, rounded up; requests beyond the largest batch wait for it."""
    return next(n for n in _ROWS if n >= min(requests, _ROWS[-1]))


class GenerationState(flax.struct.PyTreeNode):
    """B requests between two tokens.

    Attributes:
      cache: the model's.
      last: (B,) the newest token, which the model has not seen yet.
      done: (B,) True where an end token was made.
      seen: (B, V) True at tokens that came before, or None where no penalty asks for them.
      rngs: (B,) the requests' keys.
      made: number of new tokens so far.
    """

    cache: Any
    last: jax.Array
    done: jax.Array
    seen: jax.Array | None
    rngs: jax.Array
    made: jax.Array


def _chosen(state: GenerationState, logits: jax.Array, sampling: Sampling, ends: tuple[int, ...]):
    token = sampling.choose(logits, state.seen, state.rngs, state.made)
    token = jnp.where(state.done, state.last, token)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    done = state.done | jnp.isin(token, jnp.asarray(ends, jnp.int32)) if ends else state.done
    token, done = replicated((token, done))
    return state.replace(last=token, done=done, seen=seen, made=state.made + 1)


@functools.partial(jax.jit, static_argnames=("room", "sampling", "ends"))
def prefill(
    model: Any,
    prompts: jax.Array,
    first: jax.Array,
    rngs: jax.Array,
    *,
    room: int,
    sampling: Sampling,
    ends: tuple[int, ...],
) -> GenerationState:
    """Reads the prompts and chooses the first token of each.

    Args:
      model: a causal decoder.
      prompts: (B, P) token ids, each ending at the last place.
      first: (B,) the place of each prompt's first token.
      rngs: (B,) keys, one of each request.
      room: places of the cache.
      sampling: how a token is chosen.
      ends: token ids that end a text.
    """
    B, P = prompts.shape
    prompts = constrained(prompts, (ROWS, None))
    step = model.step_function()
    cache = model.start(B, max_length=room, first=first)
    output, cache = step(cache, prompts, prompt=True)
    logits = output.logits[:, -1]
    seen = None
    if sampling.repetition_penalty != 1.0:
        real = jnp.arange(P) >= first[:, None]
        ids = jnp.where(real, prompts, logits.shape[-1])  # out of range: dropped
        seen = jnp.zeros(logits.shape, bool).at[jnp.arange(B)[:, None], ids].set(True, mode="drop")
    zero = jnp.zeros((), jnp.int32)
    state = GenerationState(cache, prompts[:, -1], jnp.zeros((B,), bool), seen, rngs, zero)
    return _chosen(state, logits, sampling, ends)


@functools.partial(jax.jit, static_argnames=("sampling", "ends"), donate_argnames="state")
def continue_texts(
    model: Any, state: GenerationState, count: jax.Array, *, sampling: Sampling, ends: tuple[int, ...]
) -> tuple[GenerationState, jax.Array, jax.Array]:
    """`count` more tokens of each request, at most `_CHUNK`; fewer once all have ended.

    Returns:
      (the state, tokens (B, _CHUNK), how many of them were made).
    """
    step = model.step_function()

    def unfinished(carry):
        made, state, _ = carry
        return (made < count) & ~state.done.all()

    def extend(carry):
        made, state, tokens = carry
        output, cache = step(state.cache, state.last[:, None])
        state = _chosen(state.replace(cache=cache), output.logits[:, -1], sampling, ends)
        return made + 1, state, jax.lax.dynamic_update_slice_in_dim(tokens, state.last[:, None], made, axis=1)

    tokens = jnp.zeros((len(state.last), _CHUNK), jnp.int32)
    made, state, tokens = jax.lax.while_loop(unfinished, extend, (jnp.zeros((), jnp.int32), state, tokens))
    return state, tokens, made


@jax.jit
def for_decoding(model: Any) -> Any:
    """A causal decoder with its blocks cut out of their stack; see `CausalDecoder.for_decoding`."""
    return model.for_decoding()


class Generator:
    """Continues token sequences with a causal decoder.

    Args:
      model: a causal decoder of the zoo.
      sampling: how a token is chosen.
      ends: token ids that end a text.
    """

    def __init__(self, model: Any, *, sampling: Sampling = Sampling(), ends: Sequence[int] = ()):
        self.config, self.sampling, self.ends = model.config, sampling, tuple(ends)
        self._given: Any = model

    @functools.cached_property
    def model(self) -> Any:
        """The model as `for_decoding` makes it, once; the model that was passed in is released then."""
        model, self._given = self._given, None
        return for_decoding(model)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rngs: Sequence[jax.Array],
        *,
        on_tokens: Callable[[list[list[int]]], Sequence[bool]] | None = None,
        chunk: int = _CHUNK,
    ) -> list[list[int]]:
        """The new tokens of each prompt, an end token included.

        A prompt's tokens do not depend on the other prompts, nor on its place among them.

        Args:
          prompts: token ids, at least one each.
          max_new_tokens: largest number of new tokens of each.
          rngs: a key of each request; not read at temperature 0.
          on_tokens: called now and then with all new tokens so far; returns for each request whether
            it is done, as a stop string decides.
          chunk: how many tokens are made between two of these calls, 32 at most.

        Raises:
          UserError: an empty prompt, ids outside the vocabulary, or more tokens than the model's context.
        """
        self.check(prompts, max_new_tokens)
        most = _ROWS[-1]
        if len(prompts) > most:
            # A watcher sees all requests, those that are done and those that have not begun among them.
            groups: list[list[list[int]]] = []
            for n in range(0, len(prompts), most):
                before, after = [ids for group in groups for ids in group], len(prompts) - n - most

                def watch(made, before=before, after=after):
                    assert on_tokens is not None
                    return on_tokens([*before, *made, *[[]] * after])[len(before) : len(before) + len(made)]

                watched = None if on_tokens is None else watch
                own = prompts[n : n + most]
                groups.append(self(own, max_new_tokens, rngs[n : n + most], on_tokens=watched, chunk=chunk))
            return [ids for group in groups for ids in group]
        count = len(prompts)
        rows = batch_rows(count)
        length, room = cache_sizes(max(map(len, prompts)), max_new_tokens, self.config.max_length)
        filled = [*prompts, *[prompts[-1]] * (rows - count)]
        padded = np.zeros((rows, length), np.int32)
        for place, ids in zip(padded, filled, strict=True):
            place[length - len(ids) :] = ids
        first = np.array([length - len(ids) for ids in filled], np.int32)
        keys = jnp.stack([*rngs, *[rngs[-1]] * (rows - count)])
        options: dict[str, Any] = dict(sampling=self.sampling, ends=self.ends)
        state = prefill(self.model, padded, first, keys, room=room, **options)
        made = [[int(token)] for token in np.asarray(state.last)[:count]]
        done = np.zeros(rows, bool)
        done[count:] = True
        new = 1
        while True:
            done |= np.asarray(state.done)
            if on_tokens is not None:
                done[:count] |= np.asarray(on_tokens(made), bool)
            if new == max_new_tokens or done.all():
                return made
            asked = min(chunk, _CHUNK, max_new_tokens - new)
            state = state.replace(done=jnp.asarray(done))
            state, tokens, count_made = continue_texts(self.model, state, jnp.int32(asked), **options)
            steps = int(count_made)
            for row in np.flatnonzero(~done[:count]).tolist():
                for token in np.asarray(tokens)[row, :steps].tolist():
                    made[row].append(token)
                    if token in self.ends:
                        break
            new += steps

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        context: int | None = None,
        spare: int = 0,
    ) -> None:
        """Checks that the prompts can be continued.

        Args:
          prompts, max_new_tokens: see `__call__`.
          context: tokens that may be seen at once; None is the model's.
          spare: tokens of it that a draft model takes.

        Raises:
          UserError: they cannot; see `__call__`.
        """
        if max_new_tokens < 1:
            raise UserError(f"`max_new_tokens` {max_new_tokens} is below 1")
        vocab_size = self.config.vocab_size
        context = self.config.max_length if context is None else context
        taken = f", of which a draft model takes {spare}" if spare else ""
        for ids in prompts:
            if not len(ids):
                raise UserError("the prompt is empty: give at least one token")
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                strange = next(i for i in ids if not 0 <= i < vocab_size)
                raise UserError(
                    f"token id {strange} of the prompt is outside the model's vocabulary of {vocab_size}: "
                    "the tokenizer is not the model's"
                )
            if len(ids) + max_new_tokens + spare > context:
                raise UserError(
                    f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones are more than the model's "
                    f"context of {context}{taken}: shorten the prompt or lower `max_new_tokens`"
                )
