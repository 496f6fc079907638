"""Ring attention (Liu et al. 2023) with kernels: cuDNN's on GPUs, splash attention on TPUs.

Each device keeps its queries, while keys and values travel from device to device. A kernel returns the output
of a part and the logarithm of its softmax's denominator, with which parts are merged. The kernel's backward
pass gets the output and denominator of all parts, from which it recomputes the weights of its part.

JAX's public functions have no derivative with respect to the denominator, so this file calls the kernels'
private forward and backward functions.
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

# Log-denominator of a query without visible keys. Kernels return a lower number, an infinity or NaN; in float16
# about -32,000, which has no weight next to that of a query with visible keys.
_EMPTY = -1e30

Band = tuple[int | None, int | None]
Segments = tuple[jax.Array, jax.Array] | None


class _Splash(NamedTuple):
    """Splash attention between one device's queries and one part's keys."""

    scale: float
    interpret: bool

    def _kernel(self, query: jax.Array, key: jax.Array, band: Band) -> Any:
        T, S, H = query.shape[1], key.shape[1], query.shape[2]
        return splash_kernel(T, S, H, band, save_residuals=True, interpret=self.interpret)

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, band: Band, segments: Segments
    ) -> tuple[jax.Array, jax.Array]:
        """Return (output (B, T, H, K), log-denominator (B, H, T) float32)."""
        by_head = [jnp.swapaxes(x, 1, 2) for x in (query * jnp.asarray(self.scale, query.dtype), key, value)]
        if segments is not None:
            by_head.append(splash_segments(*segments, query.shape[0]))
        output, (log_denominator,) = jax.vmap(self._kernel(query, key, band))(*by_head)
        return jnp.swapaxes(output, 1, 2), log_denominator

    def backward(
        self, query, key, value, band: Band, segments: Segments, output, log_denominator, gradient
    ) -> tuple[jax.Array, ...]:
        """Return the gradients of query, key and value, from the output and log-denominator of all parts."""
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
            _splash_attention_bwd,
        )

        kernel = self._kernel(query, key, band)
        scaled = query * jnp.asarray(self.scale, query.dtype)
        by_head = [jnp.swapaxes(x, 1, 2) for x in (scaled, key, value, output, gradient)]
        rows = None if segments is None else splash_segments(*segments, query.shape[0])

        def row_gradients(*row: Any) -> Any:
            query, key, value, output, gradient, log_denominator, segments = row
            infos = kernel.dq_mask_info, kernel.dkv_mask_info
            residuals = (query, key, value, segments, None, output, log_denominator, *infos)
            return _splash_attention_bwd(**kernel.kwargs, res=residuals, do=gradient)[3:6]

        d_query, d_key, d_value = jax.vmap(row_gradients)(*by_head, log_denominator, rows)
        return tuple(jnp.swapaxes(x, 1, 2) for x in (d_query * self.scale, d_key, d_value))


class _Cudnn(NamedTuple):
    """cuDNN's attention between one device's queries and one part's keys."""

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
        """Return (output (B, T, H, K), log-denominator (B, H, T) float32)."""
        # The public function returns the log-denominator in the compute dtype, too coarse for merging.
        from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

        mask = self._mask(query, key, band, segments)
        return dot_product_attention(query, key, value, **mask, scale=self.scale, return_residual=True)

    def backward(
        self, query, key, value, band: Band, segments: Segments, output, log_denominator, gradient
    ) -> tuple[jax.Array, ...]:
        """Return the gradients of query, key and value, from the output and log-denominator of all parts."""
        from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, _dot_product_attention_bwd_rule

        mask = self._mask(query, key, band, segments)
        absent = jnp.zeros(0, query.dtype)
        biased = mask["bias"] is not None
        bias = mask["bias"] if biased else absent
        residuals = query, key, value, bias, *(6 * [absent]), log_denominator, output
        return _dot_product_attention_bwd_rule(
            self.scale, 42, 0.0, (biased, False), mask["mask_type"], AttentionLayout.BTNH.value,
            mask["sliding_window_length"], True, False, residuals, gradient,
        )[:3]  # fmt: skip


class _Static(NamedTuple):
    """Settings known at tracing time."""

    kernel: _Splash | _Cudnn
    ring: Ring
    band: Band

    def local_bands(self, turn: int, queries: int, keys: int) -> tuple[Band | None, Band | None]:
        """Return the bands between a device's queries and the keys that it holds in a turn.

        The first band is for devices whose keys come `turn` parts before their queries, the second for devices
        past which the ring has wrapped around, whose keys come `size - turn` parts after. A band is None if it
        is empty.
        """
        bands: list[Band | None] = []
        for parts in (turn, turn - self.ring.size):
            lowest, highest = (None if limit is None else limit + parts * queries for limit in self.band)
            hidden = (highest is not None and highest <= -queries) or (lowest is not None and lowest >= keys)
            lowest = None if lowest is not None and lowest <= 1 - queries else lowest
            highest = None if highest is not None and highest >= keys - 1 else highest
            bands.append(None if hidden else (lowest, highest))
        return bands[0], bands[1]

    def run_turn(self, turn: int, queries: int, keys: int, add_part: Any, sums: Any, moving: Any) -> Any:
        """Return `add_part(band, sums, moving)` for this device's band in a turn, or `sums` if it is empty."""

        def branch(band: Band | None) -> Any:
            return (lambda sums, moving: sums) if band is None else functools.partial(add_part, band)

        before, after = self.local_bands(turn, queries, keys)
        if turn == 0 or before == after:
            return branch(before)(sums, moving)
        return jax.lax.cond(self.ring.device() >= turn, branch(before), branch(after), sums, moving)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: _Static, query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments
) -> jax.Array:
    return _forward(static, query, key, value, segments)[0]


def _forward(static: _Static, query, key, value, segments: Segments):
    (B, T, H, _), S = query.shape, key.shape[1]

    def add_part(band: Band, sums, moving):
        key, value, key_segments = moving
        with jax.named_scope(band_scope(*band)):
            pair = _pair(segments, key_segments)
            output, log_denominator = static.kernel.forward(query, key, value, band, pair)
        # For queries without visible keys in this part the kernel's numbers are undefined.
        visible = jnp.abs(log_denominator) < -_EMPTY
        log_denominator = jnp.where(visible, log_denominator, _EMPTY)
        output = jnp.where(_as_rows(visible), output, 0)
        old_output, old = sums
        new = jnp.logaddexp(old, log_denominator)
        old_share, share = (_as_rows(jnp.exp(x - new)) for x in (old, log_denominator))
        return old_share * old_output + share * output, new

    sums = jnp.zeros((B, T, H, value.shape[3]), jnp.float32), jnp.full((B, H, T), _EMPTY, jnp.float32)
    moving = key, value, None if segments is None else segments[1]
    for turn in range(static.ring.size):
        sums = static.run_turn(turn, T, S, add_part, sums, moving)
        if turn + 1 < static.ring.size:
            moving = static.ring.rotate(moving)
    output, log_denominator = (named(x, KERNEL_RESULTS) for x in (sums[0].astype(query.dtype), sums[1]))
    return output, (query, key, value, segments, output, log_denominator)


def _backward(static: _Static, residuals, gradient: jax.Array):
    query, key, value, segments, output, log_denominator = residuals
    T, S = query.shape[1], key.shape[1]
    gradient = gradient.astype(query.dtype)

    def add_part(band: Band, sums, moving):
        key, value, key_segments = moving
        with jax.named_scope(band_scope(*band)):
            pair = _pair(segments, key_segments)
            terms = static.kernel.backward(query, key, value, band, pair, output, log_denominator, gradient)
        return tuple(total + x.astype(jnp.float32) for total, x in zip(sums, terms, strict=True))

    moving = key, value, None if segments is None else segments[1]
    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    for turn in range(static.ring.size):
        d_query, d_key, d_value = static.run_turn(turn, T, S, add_part, sums, moving)
        # The gradients travel with their keys and are back on their device after the last turn.
        sums = d_query, *static.ring.rotate((d_key, d_value))
        if turn + 1 < static.ring.size:
            moving = static.ring.rotate(moving)
    return (*(x.astype(like.dtype) for x, like in zip(sums, (query, key, value), strict=True)), None)


_attend.defvjp(_forward, _backward)


def _pair(segments: Segments, key_segments: jax.Array | None) -> Segments:
    return None if segments is None or key_segments is None else (segments[0], key_segments)


def _as_rows(x: jax.Array) -> jax.Array:
    """Transpose (B, H, T) to (B, T, H, 1)."""
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
    """Compute `kernel_attention` over the axis `sequence` of the program's mesh, which must divide T and S.

    The turns of the ring are unrolled, because the kernel of each turn has its own band; a device skips parts
    outside its band.

    The arguments are those of `kernel_attention`.

    Returns:
      (B, T, H, K) in the query's dtype.
    """
    form = form_of(mask, query.shape[1], key.shape[1])
    segments: Segments = None
    if form is not None and form.query_segments is not None and form.key_segments is not None:
        segments = form.query_segments, form.key_segments
    static = _Static(
        _Cudnn(scale) if kernel == "cudnn" else _Splash(scale, interpret),
        Ring(SEQUENCE, ring_size(query.shape[1], key.shape[1])),
        (None, None) if form is None else form.band,
    )
    rows, heads = axes_of(query, key)
    spec = PartitionSpec(rows, SEQUENCE, heads, None)
    segment_specs = jax.tree.map(
        lambda x: PartitionSpec(rows if x.shape[0] == query.shape[0] else None, SEQUENCE), segments
    )
    # A kernel runs on one device, so that no mesh axis may stay automatic.
    local = jax.shard_map(
        functools.partial(_attend, static),
        in_specs=(spec, spec, spec, segment_specs),
        out_specs=spec,
        check_vma=False,
    )
    output = local(query, key, value, segments)
    sees_any = None if form is None else form.sees_any
    return output if sees_any is None else jnp.where(sees_any[:, :, None, None], output, 0)
