"""Generation from token prompts: one compiled program reads the prompts, another one adds tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.sampling import draw, penalize_repetition, sampling_logits
from transformer_jax.decoding.top_k import top_k
from transformer_jax.decoding.translator import bucket_length
from transformer_jax.distributed.mesh import ROWS, constrained, replicated
from transformer_jax.errors import UserError
from transformer_jax.layers.int8 import with_int8_weights
from transformer_jax.limits import check_values

# Largest number of tokens per call of the compiled loop; the host reads them between two calls.
_CHUNK = 32
# Logits are divided by the temperature in float32.
_MIN_TEMPERATURE = 1e-4
# The number of rows in a batch is rounded up to one of these.
_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The sampling method; see `sampling_logits`.

    Attributes:
      temperature: 0 selects the most probable token.
      top_k: Number of tokens to sample from, or None for all.
      top_p: Probability of the nucleus to sample from, or None for no nucleus.
      min_p: Smallest probability relative to the most probable token, or None for no limit.
      repetition_penalty: See `penalize_repetition`; 1 for none.

    Raises:
      UserError: A value is outside its range, or a restriction is combined with temperature 0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        check_values(self)
        if self.temperature < 0:
            raise UserError(f"`temperature` {self.temperature} is below 0")
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise UserError(
                f"`temperature` {self.temperature} is too small for float32: use 0, the most probable token, "
                f"or at least {_MIN_TEMPERATURE}"
            )
        if not self.repetition_penalty > 0:
            raise UserError(f"`repetition_penalty` {self.repetition_penalty} is not above 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"`top_k` {self.top_k} is below 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UserError(f"`{name}` {value} must be above 0 and at most 1")
        restrictions = [n for n in ("top_k", "top_p", "min_p") if getattr(self, n) is not None]
        if self.temperature == 0 and restrictions:
            flags = ", ".join(f"`{name}`" for name in restrictions)
            raise UserError(f"{flags} has no effect at `temperature` 0, the most probable token: drop one")

    def logits(self, logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        """Return the logits (B, V) to sample from; at temperature 0, the logits for argmax."""
        if seen is not None:
            logits = penalize_repetition(logits, seen, self.repetition_penalty)
        if self.temperature == 0:
            return logits
        return sampling_logits(
            logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def choose(self, logits: jax.Array, seen: jax.Array | None, rngs: jax.Array, position: jax.Array):
        """Return one token per row, (B,) int32."""
        logits = self.logits(logits, seen)
        if self.temperature == 0:
            return top_k(logits, 1)[1][..., 0].astype(jnp.int32)  # XLA's argmax is one slow thread
        return draw(logits, rngs, position)


def cache_sizes(prompt: int, new_tokens: int, limit: int) -> tuple[int, int]:
    """Return the padded lengths of the prompts and of the cache.

    Both are rounded up, so that programs are compiled for few sizes. Because short prompts are padded at the
    left, a row may be longer than the context.

    Args:
      prompt: Length of the longest prompt in tokens.
      new_tokens: Largest number of tokens after it.
      limit: The model's context in tokens.
    """
    length = bucket_length(prompt, limit)
    return length, length + bucket_length(new_tokens, limit)


def batch_rows(requests: int) -> int:
    """Return the number of rows of a batch, rounded up; more requests need several batches."""
    return next(n for n in _ROWS if n >= min(requests, _ROWS[-1]))


class GenerationState(flax.struct.PyTreeNode):
    """The state of B requests between two tokens.

    Attributes:
      cache: The model's cache.
      last: (B,) the newest tokens, which the model has not read yet.
      done: (B,) True after an end token.
      seen: (B, V) True at tokens of the prompt and of the text so far, or None without a repetition penalty.
      rngs: (B,) the requests' keys.
      generated: Number of new tokens so far.
    """

    cache: Any
    last: jax.Array
    done: jax.Array
    seen: jax.Array | None
    rngs: jax.Array
    generated: jax.Array


def _append_token(state: GenerationState, logits: jax.Array, sampling: Sampling, ends: tuple[int, ...]):
    """Choose the next token of each request."""
    token = sampling.choose(logits, state.seen, state.rngs, state.generated)
    token = jnp.where(state.done, state.last, token)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    done = state.done | jnp.isin(token, jnp.asarray(ends, jnp.int32)) if ends else state.done
    token, done = replicated((token, done))
    return state.replace(last=token, done=done, seen=seen, generated=state.generated + 1)


@functools.partial(jax.jit, static_argnames=("cache_length", "sampling", "ends"))
def prefill(
    model: Any,
    prompts: jax.Array,
    first: jax.Array,
    rngs: jax.Array,
    *,
    cache_length: int,
    sampling: Sampling,
    ends: tuple[int, ...],
) -> GenerationState:
    """Read the prompts and choose the first new token of each.

    Args:
      model: Causal decoder.
      prompts: (B, P) token ids, padded at the left.
      first: (B,) index of each prompt's first token.
      rngs: (B,) keys, one per request.
      cache_length: Length of the cache in tokens.
      sampling: Sampling method.
      ends: Token ids that end a text.
    """
    B, P = prompts.shape
    prompts = constrained(prompts, (ROWS, None))
    step = model.step_function()
    cache = model.start(B, max_length=cache_length, first=first)
    output, cache = step(cache, prompts, prompt=True)
    logits = output.logits[:, -1]
    seen = None
    if sampling.repetition_penalty != 1.0:
        is_token = jnp.arange(P) >= first[:, None]
        ids = jnp.where(is_token, prompts, logits.shape[-1])  # `drop` ignores padding, which is out of range
        seen = jnp.zeros(logits.shape, bool).at[jnp.arange(B)[:, None], ids].set(True, mode="drop")
    zero = jnp.zeros((), jnp.int32)
    state = GenerationState(cache, prompts[:, -1], jnp.zeros((B,), bool), seen, rngs, zero)
    return _append_token(state, logits, sampling, ends)


@functools.partial(jax.jit, static_argnames=("sampling", "ends"), donate_argnames="state")
def continue_texts(
    model: Any, state: GenerationState, count: jax.Array, *, sampling: Sampling, ends: tuple[int, ...]
) -> tuple[GenerationState, jax.Array, jax.Array]:
    """Extend each request by `count` tokens, or by fewer if all requests end before.

    Returns:
      The state, the new tokens (B, _CHUNK), and how many of these columns are filled.
    """
    step = model.step_function()

    def is_unfinished(carry):
        generated, state, _ = carry
        return (generated < count) & ~state.done.all()

    def extend(carry):
        generated, state, tokens = carry
        output, cache = step(state.cache, state.last[:, None])
        state = _append_token(state.replace(cache=cache), output.logits[:, -1], sampling, ends)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, state.last[:, None], generated, axis=1)
        return generated + 1, state, tokens

    tokens = jnp.zeros((len(state.last), _CHUNK), jnp.int32)
    start = jnp.zeros((), jnp.int32), state, tokens
    generated, state, tokens = jax.lax.while_loop(is_unfinished, extend, start)
    return state, tokens, generated


@functools.partial(jax.jit, static_argnames="int8")
def for_decoding(model: Any, *, int8: bool = False) -> Any:
    """Return a causal decoder with unstacked blocks; see `CausalDecoder.for_decoding`.

    Args:
      model: The decoder.
      int8: Store matrices and tables in 8 bits; see `with_int8_weights`.
    """
    return with_int8_weights(model.for_decoding()) if int8 else model.for_decoding()


def check_int8(config: Any) -> None:
    """Check that a decoder can have weights of 8 bits on the current mesh.

    Args:
      config: Config of the decoder.

    Raises:
      UserError: The decoder is recurrent, or the mesh has several devices.
    """
    if not hasattr(config, "heads"):
        raise UserError("`int8_weights` are for decoders with attention, and this one is recurrent")
    if jax.sharding.get_abstract_mesh().size > 1:
        raise UserError("`int8_weights` need one device: remove `mesh`")


class Generator:
    """Continues token sequences with a causal decoder.

    Args:
      model: Causal decoder.
      sampling: Sampling method.
      ends: Token ids that end a text.
      int8: Store the weights in 8 bits; see `with_int8_weights`.

    Raises:
      UserError: `int8` for a recurrent model or on several devices.
    """

    def __init__(
        self, model: Any, *, sampling: Sampling = Sampling(), ends: Sequence[int] = (), int8: bool = False
    ):
        if int8:
            check_int8(model.config)
        self.config, self.sampling, self.ends, self.int8 = model.config, sampling, tuple(ends), int8
        self._stacked_model: Any = model

    @functools.cached_property
    def model(self) -> Any:
        """The model prepared by `for_decoding`; the original model is released at the first access."""
        model, self._stacked_model = self._stacked_model, None
        return for_decoding(model, int8=self.int8)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rngs: Sequence[jax.Array],
        *,
        on_tokens: Callable[[list[list[int]]], Sequence[bool]] | None = None,
        chunk: int = _CHUNK,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, including an end token.

        The tokens of a prompt depend neither on the other prompts nor on its position among them.

        Args:
          prompts: Token ids, at least one per prompt.
          max_new_tokens: Largest number of new tokens per prompt.
          rngs: One key per request; not read at temperature 0.
          on_tokens: Called every `chunk` tokens with all new tokens so far; returns for each request whether
            it is done, for example because of a stop string.
          chunk: Number of tokens between two of these calls, at most 32.

        Raises:
          UserError: A prompt is empty, has ids outside the vocabulary, or exceeds the model's context.
        """
        self.check(prompts, max_new_tokens)
        max_rows = _ROWS[-1]
        if len(prompts) > max_rows:
            # The callback receives all requests, including finished ones and those of later batches.
            finished: list[list[int]] = []
            for start in range(0, len(prompts), max_rows):
                batch = slice(start, start + max_rows)
                waiting = len(prompts) - start - max_rows

                def watch(generated, before=tuple(finished), waiting=waiting):
                    assert on_tokens is not None
                    done = on_tokens([*before, *generated, *[[]] * waiting])
                    return done[len(before) : len(before) + len(generated)]

                callback = None if on_tokens is None else watch
                options: dict[str, Any] = dict(on_tokens=callback, chunk=chunk)
                finished += self(prompts[batch], max_new_tokens, rngs[batch], **options)
            return finished
        count = len(prompts)
        rows = batch_rows(count)
        length, cache_length = cache_sizes(max(map(len, prompts)), max_new_tokens, self.config.max_length)
        filled = [*prompts, *[prompts[-1]] * (rows - count)]
        padded = np.zeros((rows, length), np.int32)
        for row, ids in zip(padded, filled, strict=True):
            row[length - len(ids) :] = ids
        first = np.array([length - len(ids) for ids in filled], np.int32)
        keys = jnp.stack([*rngs, *[rngs[-1]] * (rows - count)])
        options = dict(sampling=self.sampling, ends=self.ends)
        state = prefill(self.model, padded, first, keys, cache_length=cache_length, **options)
        new_tokens = [[int(token)] for token in np.asarray(state.last)[:count]]
        done = np.zeros(rows, bool)
        done[count:] = True
        steps = 1
        while True:
            done |= np.asarray(state.done)
            if on_tokens is not None:
                done[:count] |= np.asarray(on_tokens(new_tokens), bool)
            if steps == max_new_tokens or done.all():
                return new_tokens
            wanted = min(chunk, _CHUNK, max_new_tokens - steps)
            state = state.replace(done=jnp.asarray(done))
            state, tokens, filled_columns = continue_texts(self.model, state, jnp.int32(wanted), **options)
            columns = int(filled_columns)
            for number in np.flatnonzero(~done[:count]).tolist():
                for token in np.asarray(tokens)[number, :columns].tolist():
                    new_tokens[number].append(token)
                    if token in self.ends:
                        break
            steps += columns

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        context: int | None = None,
        draft_tokens: int = 0,
    ) -> None:
        """Check that the model can continue the prompts.

        Args:
          prompts: See `__call__`.
          max_new_tokens: See `__call__`.
          context: Largest number of tokens; None uses the model's context.
          draft_tokens: Number of tokens of the context reserved for a draft model.

        Raises:
          UserError: See `__call__`.
        """
        if max_new_tokens < 1:
            raise UserError(f"`max_new_tokens` {max_new_tokens} is below 1")
        vocab_size = self.config.vocab_size
        context = self.config.max_length if context is None else context
        reserved = f", of which {draft_tokens} are reserved for the draft model" if draft_tokens else ""
        for ids in prompts:
            if not len(ids):
                raise UserError("the prompt is empty: give at least one token")
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                invalid = next(i for i in ids if not 0 <= i < vocab_size)
                raise UserError(
                    f"token id {invalid} of the prompt is outside the model's vocabulary of {vocab_size}: "
                    "the tokenizer is not the model's"
                )
            if len(ids) + max_new_tokens + draft_tokens > context:
                raise UserError(
                    f"a prompt of {len(ids)} tokens and {max_new_tokens} new ones exceed the model's context "
                    f"of {context}{reserved}: shorten the prompt or lower `max_new_tokens`"
                )
