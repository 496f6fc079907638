"""Speculative decoding: a small model proposes tokens, one pass of the large one accepts or mends them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.generation import Generator, Sampling, cache_sizes
from transformer_jax.errors import UserError


def accepted_tokens(
    target: jax.Array, draft: jax.Array, proposed: jax.Array, rng: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many proposals are accepted, and the token after them (Leviathan et al. 2023, algorithm 1).

    A proposal x is accepted with probability min(1, p(x) / q(x)). In place of the first rejected one a token is
    drawn from the positive part of p - q; if all are accepted, one more from p. The result is distributed as p.

    Args:
      target: (N + 1, V) the large model's probabilities p, of each proposal's place and the one behind.
      draft: (N, V) the small model's probabilities q, which the proposals were drawn from.
      proposed: (N,) token ids.
      rng: a key.

    Returns:
      (number of accepted proposals, the token after them).
    """
    N, V = draft.shape
    accept, mend = jax.random.split(rng)
    places = jnp.arange(N)
    p, q = target[places, proposed], draft[places, proposed]
    stands = jax.random.uniform(accept, (N,)) * q < p
    count = jnp.where(stands.all(), N, jnp.argmin(stands))
    excess = jnp.maximum(target - jnp.concatenate([draft, jnp.zeros((1, V))]), 0.0)[count]
    # Where p equals q but for rounding, nothing is in excess, and nothing was refused.
    excess = jnp.where(excess.sum() > 0, excess, target[count])
    return count.astype(jnp.int32), jax.random.categorical(mend, jnp.log(excess)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="room")
def _begin(model: Any, draft: Any, prompt: jax.Array, first: jax.Array, *, room: int):
    """The caches of both models with all of the prompt but its last token."""
    caches = []
    for one in (model, draft):
        cache = one.start(1, max_length=room, first=first)
        # All of it is read, since kernels do not take every length; the last token's place is written again.
        _, cache = one.step_function()(cache, prompt, prompt=True)
        caches.append(cache.cut(prompt.shape[1] - 1))
    return tuple(caches)


@functools.partial(jax.jit, static_argnames=("sampling", "draft_tokens"), donate_argnames="caches")
def _round(
    model: Any,
    draft: Any,
    caches: Any,
    last: jax.Array,
    rng: jax.Array,
    *,
    sampling: Sampling,
    draft_tokens: int,
):
    """One proposal and its verdict: (caches, tokens (N + 1,), how many of them are accepted)."""
    target_cache, draft_cache = caches
    target_step, draft_step = model.step_function(), draft.step_function()
    length = target_cache.length
    greedy = sampling.temperature == 0

    def distribution(logits: jax.Array) -> jax.Array:
        logits = sampling.logits(logits, None)
        if greedy:  # all on the likeliest, so that a proposal is accepted where the two agree
            return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
        return jax.nn.softmax(logits, axis=-1)

    def propose(carry, key):
        cache, token = carry
        output, cache = draft_step(cache, token[None, None])
        q = distribution(output.logits[0])[0]
        token = jax.random.categorical(key, jnp.log(q)).astype(jnp.int32)
        return (cache, token), (token, q)

    *keys, verdict = jax.random.split(rng, draft_tokens + 2)
    # One token more than is proposed, so that the draft has seen the last proposal if it is accepted.
    (draft_cache, _), (proposed, q) = jax.lax.scan(propose, (draft_cache, last), jnp.stack(keys))
    proposed, q = proposed[:-1], q[:-1]
    output, target_cache = target_step(target_cache, jnp.concatenate([last[None], proposed])[None])
    count, after = accepted_tokens(distribution(output.logits[0]), q, proposed, verdict)
    tokens = jnp.append(proposed, 0).at[count].set(after)
    seen = length + count + 1
    return (target_cache.cut(seen), draft_cache.cut(seen)), tokens, count + 1


def check_draft(config: Any, draft: Any) -> None:
    """Checks the configs of a model and of the one that proposes its tokens.

    Raises:
      UserError: two vocabularies.
    """
    if draft.vocab_size != config.vocab_size:
        raise UserError(
            f"the draft has a vocabulary of {draft.vocab_size} and the model one of {config.vocab_size}: they "
            "must share a tokenizer"
        )


class SpeculativeGenerator:
    """Continues token sequences as `Generator` does, each by itself, with a draft model's help.

    What is drawn has the large model's distribution, whatever the draft proposes; greedily it is the large
    model's own continuation.

    Args:
      model: a causal decoder.
      draft: a smaller one of the same vocabulary.
      draft_tokens: proposals of each round.
      sampling, ends: see `Generator`.

    Raises:
      UserError: two vocabularies, or a repetition penalty, which would make each proposal depend on those
        before it.
    """

    def __init__(
        self,
        model: Any,
        draft: Any,
        *,
        draft_tokens: int = 4,
        sampling: Sampling = Sampling(),
        ends: Sequence[int] = (),
    ):
        check_draft(model.config, draft.config)
        if sampling.repetition_penalty != 1.0:
            raise UserError("`repetition_penalty` and a draft model contradict each other: drop one")
        if draft_tokens < 1:
            raise UserError(f"`draft_tokens` {draft_tokens} is below 1")
        self._plain = Generator(model, sampling=sampling, ends=ends)
        self._draft = Generator(draft)
        self.sampling, self.ends, self.draft_tokens = sampling, tuple(ends), draft_tokens
        self.limit = min(model.config.max_length, draft.config.max_length)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rngs: Sequence[jax.Array],
        *,
        on_tokens: Callable[[list[list[int]]], Sequence[bool]] | None = None,
        chunk: int = 0,
    ) -> list[list[int]]:
        """See `Generator`; `chunk` is not read, since a round makes as many tokens as are accepted."""
        del chunk
        # The last round may propose more than is needed.
        self._plain.check(prompts, max_new_tokens, context=self.limit, spare=self.draft_tokens + 1)
        made: list[list[int]] = [[] for _ in prompts]
        for number, (ids, rng) in enumerate(zip(prompts, rngs, strict=True)):
            for new in self._one(ids, max_new_tokens, rng):
                made[number] += new
                if on_tokens is not None and on_tokens(made)[number]:
                    break
        return made

    def _one(self, ids: Sequence[int], max_new_tokens: int, rng: jax.Array):
        """The new tokens of one prompt, as many at a time as a round leaves standing."""
        length, room = cache_sizes(len(ids), max_new_tokens + self.draft_tokens + 1, self.limit)
        first = jnp.array([length - len(ids)], jnp.int32)
        prompt = np.zeros((1, length), np.int32)
        prompt[0, length - len(ids) :] = ids
        model, draft = self._plain.model, self._draft.model
        caches = _begin(model, draft, prompt, first, room=room)
        last, new, number = jnp.int32(ids[-1]), 0, 0
        while new < max_new_tokens:
            key = jax.random.fold_in(rng, number)
            options: dict[str, Any] = dict(sampling=self.sampling, draft_tokens=self.draft_tokens)
            caches, tokens, count = _round(model, draft, caches, last, key, **options)
            standing = np.asarray(tokens)[: int(count)].tolist()[: max_new_tokens - new]
            last, number = jnp.int32(standing[-1]), number + 1
            ended = next((n for n, token in enumerate(standing, 1) if token in self.ends), None)
            new += len(standing)
            yield standing[:ended]
            if ended is not None:
                return
