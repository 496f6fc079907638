"""Attention by the kernels that JAX ships: cuDNN's on a GPU, Pallas's splash attention on a TPU.

A kernel never holds more than a block of the weights and leaves out blocks that the mask hides. Both have
derivatives of reverse mode only, and of first order.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import ROWS, TENSOR, platform
from transformer_jax.distributed.program_flops import band_scope
from transformer_jax.layers.attention.kernel_mask import KernelMask, added_to_logits
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.named_points import KERNEL_RESULTS

# Head widths that cuDNN's flash attention takes: multiples of 8 up to 128, or from Hopper on up to 256, which
# JAX believes only if it finds the device.
_CUDNN_WIDTH, _CUDNN_WIDTH_OF_HOPPER, _CUDNN_STEP = 128, 256, 8
# Lanes of a TPU: blocks of queries and keys are multiples.
_LANES = 128
# Keys of every distance are visible.
_NO_BAND = (None, None)
# The largest block of splash attention: its logits are 2 MiB of the 16 MiB next to a TPU's cores.
_BLOCK = 1_024


def kernel_of(target: str) -> str | None:
    """The name of a platform's kernel: "cudnn" of "gpu", "splash" of "tpu"."""
    return {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(target)


def refusal(
    kernel: str, query: Any, key: Any, value: Any, mask: Any, bias: Any, *, drops: bool = False, parts: int = 1
) -> str | None:
    """Why a kernel does not take these arguments; None: it takes them.

    Args:
      kernel: "cudnn" or "splash".
      query, key, value, mask, bias: those of `dot_product_attention`, or their shapes.
      drops: whether weights are dropped. (cuDNN has dropout, but its seed is a constant of the program: each
        step would drop the same weights.)
      parts: devices of the ring that the sequence is sharded over.
    """
    T, S, width = query.shape[1], key.shape[1], query.shape[3]
    if drops:
        return "dropout on the weights"
    if bias is not None:
        return "a bias on the logits"
    if value.shape[3] != width:
        return f"values of width {value.shape[3]} beside keys of width {width}"
    if not (mask is None or isinstance(mask, (Visibility, KernelMask))):
        return "a mask that is an array"
    form = None if mask is None else form_of(mask, T, S)
    if T != 1 and form is None and mask is not None:
        return "a mask of no form that it has"
    if parts > 1 and T != S and form is not None and form.band != (None, None):
        return f"a band of {T} queries and {S} keys over a ring"
    T, S = T // parts, S // parts
    if kernel == "cudnn":
        found = _device()
        if found is not None and found.major < 8:
            return f"{found.name} (it takes devices of compute capability 8.0 and later)"
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"dtype {query.dtype} (it takes bfloat16 and float16)"
        most = _CUDNN_WIDTH if found is None or found.major < 9 else _CUDNN_WIDTH_OF_HOPPER
        if width % _CUDNN_STEP or width > most:
            return f"head width {width} (it takes multiples of {_CUDNN_STEP} up to {most})"
        if (T % 2 or S % 2) and (parts > 1 or _needs_array(form, T, S)):
            return f"{T} queries and {S} keys (with a mask that is an array to it, it takes even numbers)"
        return None
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {query.dtype} (it takes bfloat16 and float32)"
    if T % _LANES or S % _LANES:
        return f"{T} queries and {S} keys (it takes multiples of {_LANES})"
    return None


def _needs_array(form: KernelMask | None, queries: int, keys: int) -> bool:
    """Whether a mask is an array to cuDNN: one that is neither lengths nor a causal band; see `cudnn_mask`."""
    if form is None:
        return False
    segments = form.key_segments is not None and not form.needs_no_segments
    return segments or (form.band != _NO_BAND and not (form.highest == 0 and queries == keys))


class _Device(NamedTuple):
    """A GPU that is here.

    Attributes:
      name: with its compute capability.
      major: first number of that; 0 for one that is not NVIDIA's.
    """

    name: str
    major: int


def _device() -> _Device | None:
    """The GPU that the program is made for, if it is here."""
    if kernel_of(platform()) != "cudnn":
        return None
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None  # compiled for one that is not here
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None and target.device_kind != device.device_kind:
        return None
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.partition(".")[0]
    return _Device(f"{device.device_kind} ({capability or 'unknown'})", int(major) if major.isdigit() else 0)


def form_of(mask: Visibility | KernelMask | None, queries: int, keys: int) -> KernelMask | None:
    """The kernels' form of a mask, or None if it has none."""
    return mask if mask is None or isinstance(mask, KernelMask) else KernelMask.of(mask, queries, keys)


def prepared(mask: Visibility, queries: int, keys: int, dtype: str) -> Visibility | KernelMask:
    """A mask as every layer's kernel takes it; relations that no kernel has a form for stay as they are."""
    form = form_of(mask, queries, keys)
    if form is None:
        return mask
    return form.with_additive(dtype) if kernel_of(platform()) == "cudnn" else form


@functools.cache
def report_refusal(kernel: str, reason: str, form: str) -> None:
    """Says once which form of attention is taken in place of a kernel."""
    warnings.warn(f"attention: {kernel} does not take {reason}; the {form} form is used", stacklevel=2)


def kernel_attention(
    kernel: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Visibility | KernelMask | jax.Array | None,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """`dot_product_attention` by a kernel that does not refuse it, see `refusal`.

    On a mesh each device computes its own rows and heads.

    Args:
      kernel: "cudnn" or "splash".
      query, key, value, mask, scale: see `dot_product_attention`.
      interpret: run Pallas's kernel by XLA's CPU backend, for tests.

    Returns:
      (B, T, H, K) in the query's dtype.
    """
    T, S = query.shape[1], key.shape[1]
    assert not isinstance(mask, jax.Array), "kernels refuse it"
    form = form_of(mask, T, S)
    if form is not None and kernel == "cudnn" and form.additive is None:
        form = form.with_additive(str(query.dtype))
    attend = _cudnn if kernel == "cudnn" else functools.partial(_splash, interpret=interpret)
    sees_any = None if form is None else form.sees_any
    # What a kernel computes depends on the band, which a count of the program's operations reads off this name.
    with jax.named_scope(band_scope(*_NO_BAND if form is None else form.band)):
        output = _on_each_device(functools.partial(attend, scale=scale), query, key, value, form)
    # A kernel spreads a query that sees nothing over all keys; contract 2 wants zeros, and zero gradients.
    return output if sees_any is None else jnp.where(sees_any[:, :, None, None], output, 0)


def axes_of(query: jax.Array, key: jax.Array) -> tuple[tuple[str, ...] | None, str | None]:
    """The axes of the program's mesh that rows and heads are sharded over; None where they do not divide."""
    mesh = jax.sharding.get_abstract_mesh()

    def divide(size: int, *axes: str) -> bool:
        return size % math.prod(mesh.shape.get(axis, 1) for axis in axes) == 0

    heads = divide(query.shape[2], TENSOR) and divide(key.shape[2], TENSOR)
    return ROWS if divide(query.shape[0], *ROWS) else None, TENSOR if heads else None


def _on_each_device(attend, query, key, value, form: KernelMask | None) -> jax.Array:
    """Runs `attend` on every device's rows and heads; without a mesh, or within `shard_map`, on all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return attend(query, key, value, form)
    rows, heads = axes_of(query, key)
    whole = PartitionSpec(rows, None, heads, None)
    if form is not None:
        # What the kernel does not read stays outside: the relations hold arrays of other shapes.
        form = form.replace(relations=Visibility(()), sees_any=None)
    specs = jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == query.shape[0] else None), form)
    local = jax.shard_map(attend, in_specs=(whole, whole, whole, specs), out_specs=whole, check_vma=False)
    return local(query, key, value, form)


def cudnn_mask(
    form: KernelMask | None, queries: int, keys: int, dtype: Any
) -> tuple[jax.Array | None, bool, int | None]:
    """(array to add to the logits or None, whether the kernel's mask is causal, its window or None)."""
    lowest, highest = _NO_BAND if form is None else form.band
    additive = None if form is None else form.additive
    causal = highest == 0 and queries == keys
    if (lowest, highest) != _NO_BAND and not causal:
        # The kernel's own band is causal from place 0 on; any other one is part of the array.
        distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        inside = jnp.ones((queries, keys), bool)
        inside = inside if lowest is None else inside & (distance >= lowest)
        inside = (inside if highest is None else inside & (distance <= highest))[None]
        if form is not None and form.key_lengths is not None:
            # The kernel's lengths do not go with an array here.
            inside = inside & (jnp.arange(keys) < form.key_lengths[:, None, None])
        band = added_to_logits(inside, dtype)[:, None]
        additive, lowest = band if additive is None else jnp.minimum(additive, band), None
    return additive, causal, -lowest if causal and lowest is not None else None


def even(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None, *, causal: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries, keys and values of even numbers, which cuDNN's backward pass takes alone, and the keys' lengths.

    A place is added behind odd ones, which no real query sees: lengths say so where the mask is not causal.
    """
    S = key.shape[1]
    query, key, value = (jnp.pad(x, [(0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)]) for x in (query, key, value))
    if S % 2 and not causal and lengths is None:
        lengths = jnp.full(len(key), S, jnp.int32)
    return query, key, value, lengths


def _cudnn(query, key, value, form: KernelMask | None, *, scale: float) -> jax.Array:
    T = query.shape[1]
    additive, causal, before = cudnn_mask(form, query.shape[1], key.shape[1], query.dtype)
    lengths = None if form is None else form.key_lengths
    if additive is not None:
        return _cudnn_with_array(query, key, value, additive, causal, before, scale=scale)
    first = None if form is None else form.first_keys
    if first is not None:
        # With each row's first real token at place 0, the causal band hides what then stands behind the last.
        query, key, value = (_turned(x, -first) for x in (query, key, value))
    query, key, value, lengths = even(query, key, value, lengths, causal=causal)
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        scale=scale,
        local_window_size=None if before is None else (before, 0),
        query_seq_lengths=None if lengths is None else jnp.full_like(lengths, query.shape[1]),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    output = output[:, :T]
    return output if first is None else _turned(output, first)


def _turned(x: jax.Array, places: jax.Array) -> jax.Array:
    """x (B, T, ...) with each row's tokens moved by its number of places (B,), from the end to the front."""
    return jax.vmap(functools.partial(jnp.roll, axis=0))(x, places)


def _cudnn_with_array(
    query, key, value, additive, causal: bool, before: int | None, *, scale: float
) -> jax.Array:
    """Attention with an array that is added to the logits and has no gradient.

    The public function has the kernel write that gradient too, as large as all pairs, for nobody.
    """
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType, _dot_product_attention

    absent = jnp.zeros(0, query.dtype)
    return _dot_product_attention(
        query, key, value, additive, *(6 * [absent]), scale, 42, 0.0, (True, False),
        MaskType.CAUSAL if causal else MaskType.NO_MASK, AttentionLayout.BTNH.value,
        None if before is None else before + 1, _cudnn_version(), False,
    )  # fmt: skip


def _cudnn_version() -> int:
    """Of the library that is here, as JAX's own function passes it; who compiles for a GPU has one."""
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    return check_cudnn_version()


def _block(length: int) -> int:
    """The largest block that divides a length."""
    return next(size for size in (_BLOCK, 512, 256, _LANES) if length % size == 0)


def splash_kernel(
    queries: int, keys: int, heads: int, band: tuple[int | None, int | None], **options: Any
) -> Any:
    """Splash attention of (H, T, K) queries, already scaled, and (G, S, K) keys and values.

    Args:
      queries, keys, heads: T, S and H.
      band: lowest and highest key - query that is visible.
      options: of `make_splash_mha`.
    """
    # Imported here: Pallas for TPUs is an import of a second that no other platform needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    lowest, highest = band
    if band == _NO_BAND:
        mask: Any = splash_attention_mask.FullMask((queries, keys))
    else:
        before = None if lowest is None else -lowest
        mask = splash_attention_mask.LocalMask((queries, keys), (before, highest), offset=0)
    block, key_block = _block(queries), _block(keys)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block, block_kv=key_block, block_kv_compute=min(key_block, 512),
        block_q_dkv=block, block_kv_dkv=key_block, block_kv_dkv_compute=min(key_block, 512),
        block_q_dq=block, block_kv_dq=key_block,
    )  # fmt: skip
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        **options,
    )


def splash_segments(query_segments: jax.Array, key_segments: jax.Array, rows: int) -> Any:
    """Segments (1 or B, T) and (1 or B, S) as splash attention takes them for B rows."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    return SegmentIds(*(jnp.broadcast_to(x, (rows, x.shape[1])) for x in (query_segments, key_segments)))


def _splash(query, key, value, form: KernelMask | None, *, scale: float, interpret: bool) -> jax.Array:
    (T, H), S = query.shape[1:3], key.shape[1]
    band = _NO_BAND if form is None else form.band
    kernel = splash_kernel(T, S, H, band, residual_checkpoint_name=KERNEL_RESULTS, interpret=interpret)
    query = query * jnp.asarray(scale, query.dtype)
    by_head = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
    if form is None or form.query_segments is None or form.key_segments is None:
        output = jax.vmap(kernel)(*by_head)
    else:
        segments = splash_segments(form.query_segments, form.key_segments, query.shape[0])
        output = jax.vmap(kernel)(*by_head, segments)
    return jnp.swapaxes(output, 1, 2).astype(query.dtype)
