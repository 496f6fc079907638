"""Ring attention (Liu et al. 2023) whose parts a kernel computes: cuDNN's on GPUs, splash attention on TPUs.

Each device keeps its queries; keys and values travel from device to device. A kernel gives a part's output and
the logarithm of its softmax's denominator, and parts are merged by these. The backward pass hands the kernel's
backward pass the output and logarithm of all parts, from which it makes the part's true weights again.

JAX keeps the kernels' own derivatives private and leaves the logarithm out of them, so those functions are
called directly, here alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import SEQUENCE
from transformer_jax.distributed.program_flops import band_scope
from transformer_jax.layers.attention.chunked import Ring
from transformer_jax.layers.attention.kernel_mask import KernelMask
from transformer_jax.layers.attention.kernels import (
    axes_of,
    cudnn_mask,
    form_of,
    splash_kernel,
    splash_segments,
)
from transformer_jax.layers.attention.ring import ring_size
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.named_points import KERNEL_RESULTS, named

# The logarithm of a query that has seen no key. A kernel's own is lower, infinite or not a number; in float16
# it is about -32,000, which weighs nothing beside that of a query that has seen a key.
_NOTHING = -1e30

Band = tuple[int | None, int | None]
Segments = tuple[jax.Array, jax.Array] | None


class _Splash(NamedTuple):
    """Splash attention of one device's queries and one part's keys."""

    scale: float
    interpret: bool

    def _kernel(self, query: jax.Array, key: jax.Array, band: Band) -> Any:
        T, S, H = query.shape[1], key.shape[1], query.shape[2]
        return splash_kernel(T, S, H, band, save_residuals=True, interpret=self.interpret)

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, band: Band, segments: Segments
    ) -> tuple[jax.Array, jax.Array]:
        """(output (B, T, H, K), logarithm (B, H, T) float32)."""
        by_head = [jnp.swapaxes(x, 1, 2) for x in (query * jnp.asarray(self.scale, query.dtype), key, value)]
        if segments is not None:
            by_head.append(splash_segments(*segments, query.shape[0]))
        output, (logarithm,) = jax.vmap(self._kernel(query, key, band))(*by_head)
        return jnp.swapaxes(output, 1, 2), logarithm

    def backward(
        self, query, key, value, band: Band, segments: Segments, output, logarithm, gradient
    ) -> tuple[jax.Array, ...]:
        """Gradients of query, key and value, for output and logarithm of all parts."""
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
            _splash_attention_bwd,
        )

        kernel = self._kernel(query, key, band)
        scaled = query * jnp.asarray(self.scale, query.dtype)
        by_head = [jnp.swapaxes(x, 1, 2) for x in (scaled, key, value, output, gradient)]
        rows = None if segments is None else splash_segments(*segments, query.shape[0])

        def one(*row: Any) -> Any:
            query, key, value, output, gradient, logarithm, segments = row
            infos = kernel.dq_mask_info, kernel.dkv_mask_info
            kept = (query, key, value, segments, None, output, logarithm, *infos)
            return _splash_attention_bwd(**kernel.kwargs, res=kept, do=gradient)[3:6]

        of_query, of_key, of_value = jax.vmap(one)(*by_head, logarithm, rows)
        return tuple(jnp.swapaxes(x, 1, 2) for x in (of_query * self.scale, of_key, of_value))


class _Cudnn(NamedTuple):
    """cuDNN's attention of one device's queries and one part's keys."""

    scale: float

    def _mask(self, query: jax.Array, key: jax.Array, band: Band, segments: Segments) -> dict[str, Any]:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType

        dtype = query.dtype
        form = KernelMask(Visibility(()), *band, *(segments or ())).with_additive(str(dtype))
        additive, causal, before = cudnn_mask(form, query.shape[1], key.shape[1], dtype)
        return dict(
            bias=additive,
            mask_type=MaskType.CAUSAL if causal else MaskType.NO_MASK,
            sliding_window_length=None if before is None else before + 1,
        )

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, band: Band, segments: Segments
    ) -> tuple[jax.Array, jax.Array]:
        """(output (B, T, H, K), logarithm (B, H, T) float32)."""
        # The public function returns the logarithm in the compute dtype, too coarse to merge by.
        from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

        mask = self._mask(query, key, band, segments)
        return dot_product_attention(query, key, value, **mask, scale=self.scale, return_residual=True)

    def backward(
        self, query, key, value, band: Band, segments: Segments, output, logarithm, gradient
    ) -> tuple[jax.Array, ...]:
        """Gradients of query, key and value, for output and logarithm of all parts."""
        from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, _dot_product_attention_bwd_rule

        mask = self._mask(query, key, band, segments)
        absent = jnp.zeros(0, query.dtype)
        biased = mask["bias"] is not None
        kept = (
            query, key, value, mask["bias"] if biased else absent, *(6 * [absent]), logarithm, output
        )  # fmt: skip
        return _dot_product_attention_bwd_rule(
            self.scale, 42, 0.0, (biased, False), mask["mask_type"], AttentionLayout.BTNH.value,
            mask["sliding_window_length"], True, False, kept, gradient,
        )[:3]  # fmt: skip


class _Static(NamedTuple):
    """What is known before an attention runs."""

    kernel: _Splash | _Cudnn
    ring: Ring
    band: Band

    def local_bands(self, turn: int, queries: int, keys: int) -> tuple[Band | None, Band | None]:
        """The bands between a device's queries and the keys that it has in a turn, None where it sees none.

        The first is for keys that come `turn` parts before the queries, the second for those of the devices
        where the ring has wrapped around, which come `parts - turn` parts behind.
        """
        found: list[Band | None] = []
        for parts in (turn, turn - self.ring.parts):
            lowest, highest = (None if limit is None else limit + parts * queries for limit in self.band)
            hidden = (highest is not None and highest <= -queries) or (lowest is not None and lowest >= keys)
            lowest = None if lowest is not None and lowest <= 1 - queries else lowest
            highest = None if highest is not None and highest >= keys - 1 else highest
            found.append(None if hidden else (lowest, highest))
        return found[0], found[1]

    def in_turn(self, turn: int, queries: int, keys: int, seen: Any, unseen: Any, *arguments: Any) -> Any:
        """`seen(band)(*arguments)` of the band of this device in a turn, or `unseen(*arguments)`."""

        def of(band: Band | None) -> Any:
            return unseen if band is None else functools.partial(seen, band)

        before, behind = self.local_bands(turn, queries, keys)
        if turn == 0 or before == behind:
            return of(before)(*arguments)
        return jax.lax.cond(self.ring.own() >= turn, of(before), of(behind), *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _Static, query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments) -> jax.Array:
    return _forward(how, query, key, value, segments)[0]


def _forward(how: _Static, query, key, value, segments: Segments):
    (B, T, H, _), S = query.shape, key.shape[1]

    def seen(band: Band, sums, moving):
        key, value, own = moving
        with jax.named_scope(band_scope(*band)):
            output, logarithm = how.kernel.forward(query, key, value, band, _pair(segments, own))
        # Queries that see nothing of this part have no numbers, or those of a mean over all of its keys.
        some = jnp.abs(logarithm) < -_NOTHING
        logarithm = jnp.where(some, logarithm, _NOTHING)
        output = jnp.where(_as_rows(some), output, 0)
        before, logarithm_before = sums
        new = jnp.logaddexp(logarithm_before, logarithm)
        kept, added = (_as_rows(jnp.exp(x - new)) for x in (logarithm_before, logarithm))
        return kept * before + added * output, new

    sums = jnp.zeros((B, T, H, value.shape[3]), jnp.float32), jnp.full((B, H, T), _NOTHING, jnp.float32)
    moving = key, value, None if segments is None else segments[1]
    for turn in range(how.ring.parts):
        sums = how.in_turn(turn, T, S, seen, lambda sums, moving: sums, sums, moving)
        if turn + 1 < how.ring.parts:
            moving = how.ring.rotated(moving)
    output, logarithm = (named(x, KERNEL_RESULTS) for x in (sums[0].astype(query.dtype), sums[1]))
    return output, (query, key, value, segments, output, logarithm)


def _backward(how: _Static, kept, gradient: jax.Array):
    query, key, value, segments, output, logarithm = kept
    T, S = query.shape[1], key.shape[1]
    gradient = gradient.astype(query.dtype)

    def seen(band: Band, sums, moving):
        key, value, own = moving
        with jax.named_scope(band_scope(*band)):
            found = how.kernel.backward(
                query, key, value, band, _pair(segments, own), output, logarithm, gradient
            )
        return tuple(old + new.astype(jnp.float32) for old, new in zip(sums, found, strict=True))

    moving = key, value, None if segments is None else segments[1]
    of_query, of_key, of_value = (jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    for turn in range(how.ring.parts):
        sums = of_query, of_key, of_value
        of_query, of_key, of_value = how.in_turn(
            turn, T, S, seen, lambda sums, moving: sums, sums, moving
        )  # fmt: skip
        # The gradients travel with their keys, and are home after the last turn.
        of_key, of_value = how.ring.rotated((of_key, of_value))
        if turn + 1 < how.ring.parts:
            moving = how.ring.rotated(moving)
    found = zip((of_query, of_key, of_value), (query, key, value), strict=True)
    return (*(x.astype(like.dtype) for x, like in found), None)


_attend.defvjp(_forward, _backward)


def _pair(segments: Segments, own: jax.Array | None) -> Segments:
    return None if segments is None or own is None else (segments[0], own)


def _as_rows(x: jax.Array) -> jax.Array:
    """(B, H, T) -> (B, T, H, 1)."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def ring_kernel_attention(
    kernel: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Visibility | KernelMask | None,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """`kernel_attention` over the axis `sequence` of the program's mesh, which divides T and S.

    The turns of the ring are not in a loop, since the kernel of each has a band of its own; a device skips
    parts whose keys all lie outside its band.

    Args and returns: see there.
    """
    form = form_of(mask, query.shape[1], key.shape[1])
    segments: Segments = None
    if form is not None and form.query_segments is not None and form.key_segments is not None:
        segments = form.query_segments, form.key_segments
    how = _Static(
        _Cudnn(scale) if kernel == "cudnn" else _Splash(scale, interpret),
        Ring(SEQUENCE, ring_size(query.shape[1], key.shape[1])),
        (None, None) if form is None else form.band,
    )
    rows, heads = axes_of(query, key)
    cut = PartitionSpec(rows, SEQUENCE, heads, None)
    of_segments = jax.tree.map(
        lambda x: PartitionSpec(rows if x.shape[0] == query.shape[0] else None, SEQUENCE), segments
    )
    # A kernel is one device's: no axis may stay automatic.
    local = jax.shard_map(
        functools.partial(_attend, how),
        in_specs=(cut, cut, cut, of_segments),
        out_specs=cut,
        check_vma=False,
    )
    output = local(query, key, value, segments)
    sees_any = None if form is None else form.sees_any
    return output if sees_any is None else jnp.where(sees_any[:, :, None, None], output, 0)
