"""Speculative decoding: a draft model proposes tokens, and one pass of the large model verifies them."""

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
    """Return how many proposals are accepted, and the token after them (Leviathan et al. 2023, algorithm 1).

    A proposal x is accepted with probability min(1, p(x) / q(x)). The first rejected proposal is replaced by a
    token drawn from the positive part of p - q; if all are accepted, one more token is drawn from p. The
    resulting tokens are distributed as p.

    Args:
      target: (N + 1, V) probabilities p of the large model at each proposal and at the next position.
      draft: (N, V) probabilities q of the draft model, from which the proposals were drawn.
      proposed: (N,) token ids.
      rng: Key of the draws.

    Returns:
      The number of accepted proposals and the token after them.
    """
    N, V = draft.shape
    accept_rng, draw_rng = jax.random.split(rng)
    positions = jnp.arange(N)
    p, q = target[positions, proposed], draft[positions, proposed]
    accepted = jax.random.uniform(accept_rng, (N,)) * q < p
    count = jnp.where(accepted.all(), N, jnp.argmin(accepted))
    excess = jnp.maximum(target - jnp.concatenate([draft, jnp.zeros((1, V))]), 0.0)[count]
    # If p equals q except for rounding, the excess is empty and no proposal was rejected.
    excess = jnp.where(excess.sum() > 0, excess, target[count])
    return count.astype(jnp.int32), jax.random.categorical(draw_rng, jnp.log(excess)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="cache_length")
def _start(target: Any, draft: Any, prompt: jax.Array, first: jax.Array, *, cache_length: int):
    """Return the caches of both models after all tokens of the prompt except the last one."""
    caches = []
    for model in (target, draft):
        cache = model.start(1, max_length=cache_length, first=first)
        # The complete prompt is read, because kernels need its padded length; the next step overwrites the
        # entry of the last token.
        _, cache = model.step_function()(cache, prompt, prompt=True)
        caches.append(cache.truncate(prompt.shape[1] - 1))
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
    """Propose and verify tokens; return the caches, tokens (N + 1,) and how many of them are valid."""
    target_cache, draft_cache = caches
    target_step, draft_step = model.step_function(), draft.step_function()
    length = target_cache.length
    greedy = sampling.temperature == 0

    def distribution(logits: jax.Array) -> jax.Array:
        logits = sampling.logits(logits, None)
        if greedy:  # a one-hot distribution accepts a proposal if both models agree
            return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
        return jax.nn.softmax(logits, axis=-1)

    def propose(carry, key):
        cache, token = carry
        output, cache = draft_step(cache, token[None, None])
        q = distribution(output.logits[0])[0]
        token = jax.random.categorical(key, jnp.log(q)).astype(jnp.int32)
        return (cache, token), (token, q)

    *keys, verify_rng = jax.random.split(rng, draft_tokens + 2)
    # The draft runs one more step, so that its cache contains the last proposal if that is accepted.
    (draft_cache, _), (proposed, q) = jax.lax.scan(propose, (draft_cache, last), jnp.stack(keys))
    proposed, q = proposed[:-1], q[:-1]
    output, target_cache = target_step(target_cache, jnp.concatenate([last[None], proposed])[None])
    count, next_token = accepted_tokens(distribution(output.logits[0]), q, proposed, verify_rng)
    tokens = jnp.append(proposed, 0).at[count].set(next_token)
    new_length = length + count + 1
    return (target_cache.truncate(new_length), draft_cache.truncate(new_length)), tokens, count + 1


def check_draft(config: Any, draft: Any) -> None:
    """Check that the configs of a model and of its draft have the same vocabulary size and no window.

    Raises:
      UserError: The vocabulary sizes differ, or a model has a window.
    """
    for name, checked in (("model", config), ("draft", draft)):
        if getattr(checked, "window", None) is not None:
            raise UserError(
                f"the {name} keeps the last {checked.window} tokens only and cannot take proposals back: leave "
                "out the draft"
            )
    if draft.vocab_size != config.vocab_size:
        raise UserError(
            f"the draft has a vocabulary of {draft.vocab_size} and the model one of {config.vocab_size}: they "
            "must share a tokenizer"
        )


class SpeculativeGenerator:
    """Continues token sequences one by one, like `Generator`, with the proposals of a draft model.

    The tokens follow the large model's distribution for any draft; at temperature 0 they are the large model's
    greedy continuation.

    Args:
      model: Causal decoder.
      draft: Smaller causal decoder with the same vocabulary.
      draft_tokens: Number of proposals per round.
      sampling: See `Generator`.
      ends: See `Generator`.

    Raises:
      UserError: The vocabularies differ, or a repetition penalty is set, which would make each proposal depend
        on the previous ones.
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
            raise UserError("`repetition_penalty` cannot be combined with a draft model: drop one")
        if draft_tokens < 1:
            raise UserError(f"`draft_tokens` {draft_tokens} is below 1")
        self._target = Generator(model, sampling=sampling, ends=ends)
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
        """Return the new tokens of each prompt; see `Generator.__call__`.

        `chunk` has no effect, because a round yields as many tokens as the large model accepts.
        """
        del chunk
        # The last round may propose more tokens than needed.
        self._target.check(prompts, max_new_tokens, context=self.limit, draft_tokens=self.draft_tokens + 1)
        new_tokens: list[list[int]] = [[] for _ in prompts]
        for number, (ids, rng) in enumerate(zip(prompts, rngs, strict=True)):
            for accepted in self._rounds(ids, max_new_tokens, rng):
                new_tokens[number] += accepted
                if on_tokens is not None and on_tokens(new_tokens)[number]:
                    break
        return new_tokens

    def _rounds(self, ids: Sequence[int], max_new_tokens: int, rng: jax.Array):
        """Yield the new tokens of one prompt, one list per round."""
        length, cache_length = cache_sizes(len(ids), max_new_tokens + self.draft_tokens + 1, self.limit)
        first = jnp.array([length - len(ids)], jnp.int32)
        prompt = np.zeros((1, length), np.int32)
        prompt[0, length - len(ids) :] = ids
        model, draft = self._target.model, self._draft.model
        caches = _start(model, draft, prompt, first, cache_length=cache_length)
        last, total, number = jnp.int32(ids[-1]), 0, 0
        while total < max_new_tokens:
            key = jax.random.fold_in(rng, number)
            options: dict[str, Any] = dict(sampling=self.sampling, draft_tokens=self.draft_tokens)
            caches, tokens, count = _round(model, draft, caches, last, key, **options)
            accepted = np.asarray(tokens)[: int(count)].tolist()[: max_new_tokens - total]
            last, number = jnp.int32(accepted[-1]), number + 1
            size_to_end = next((n for n, token in enumerate(accepted, 1) if token in self.ends), None)
            total += len(accepted)
            yield accepted[:size_to_end]
            if size_to_end is not None:
                return
