"""Attention by the kernels that JAX ships: cuDNN's on a GPU, Pallas's splash attention on a TPU.

A kernel holds only a block of the weights at a time and skips blocks that the mask hides. Kernels have
first-order derivatives in reverse mode only. With dropout on the weights, `dropout_kernel` is used instead.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import ROWS, TENSOR, platform
from transformer_jax.distributed.program_flops import band_scope
from transformer_jax.layers.attention.dropout_kernel import attention_with_dropout
from transformer_jax.layers.attention.kernel_mask import KernelMask, additive_mask
from transformer_jax.layers.attention.visibility import Visibility
from transformer_jax.layers.named_points import KERNEL_RESULTS

# Head widths of cuDNN's flash attention: multiples of 8 up to 128, or up to 256 from Hopper on, which JAX
# accepts only if it finds the device.
_CUDNN_WIDTH, _CUDNN_WIDTH_OF_HOPPER, _CUDNN_STEP = 128, 256, 8
# Lanes of a TPU: blocks of queries and keys are multiples.
_LANES = 128
# With dropout, sequences of fewer tokens use the plain form. On a TPU, all queries or keys of a head must fit
# into VMEM.
_MIN_WITH_DROPOUT, _MAX_BYTES_WITH_DROPOUT = 128, 2**19
# Segment of padding, which no token has.
_PADDING_SEGMENT = -2
# Band of a mask without limits.
_NO_BAND = (None, None)
# Maximum block of splash attention: its logits take 2 MiB of a TPU's 16 MiB of VMEM.
_BLOCK = 1_024


def kernel_of(target: str) -> str | None:
    """Return the name of a platform's kernel: "cudnn" for "gpu", "splash" for "tpu", None for others."""
    return {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(target)


def refusal(
    kernel: str,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    *,
    has_dropout: bool = False,
    ring: int = 1,
) -> str | None:
    """Return the reason why a kernel does not support these arguments, or None if it does.

    Args:
      kernel: "cudnn" or "splash".
      query: See `dot_product_attention`, or the shape.
      key: See `dot_product_attention`, or the shape.
      value: See `dot_product_attention`, or the shape.
      mask: See `dot_product_attention`.
      bias: See `dot_product_attention`.
      has_dropout: True if weights are dropped, so that `dropout_kernel` is used.
      ring: Number of devices that the sequence is sharded over.
    """
    T, S, width = query.shape[1], key.shape[1], query.shape[3]
    if bias is not None:
        return "a bias on the logits"
    if value.shape[3] != width:
        return f"values of width {value.shape[3]} with keys of width {width}"
    if not (mask is None or isinstance(mask, (Visibility, KernelMask))):
        return "a mask that is an array"
    form = None if mask is None else form_of(mask, T, S)
    if T != 1 and form is None and mask is not None:
        return "a mask that has no form for kernels"
    if ring > 1 and T != S and form is not None and form.band != (None, None):
        return f"a band of {T} queries and {S} keys over a ring"
    if has_dropout and ring > 1:
        return "dropout on the weights over a ring"
    if has_dropout and min(T, S) < _MIN_WITH_DROPOUT:
        return f"dropout on the weights of {T} queries and {S} keys (at least {_MIN_WITH_DROPOUT} of each)"
    T, S = T // ring, S // ring
    if kernel == "cudnn":
        device = _device()
        target = device or _target()
        if target is not None and target.major < 8:
            return f"{target.name} (it supports devices of compute capability 8.0 and later)"
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"dtype {query.dtype} (it supports bfloat16 and float16)"
        supports_wide_heads = not has_dropout and device is not None and device.major >= 9
        maximum = _CUDNN_WIDTH_OF_HOPPER if supports_wide_heads else _CUDNN_WIDTH
        if width % _CUDNN_STEP or width > maximum:
            return f"head width {width} (it supports multiples of {_CUDNN_STEP} up to {maximum})"
        if not has_dropout and (T % 2 or S % 2) and (ring > 1 or needs_array(form, T, S)):
            return f"{T} queries and {S} keys (with a mask as an array it supports even numbers)"
        return None
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {query.dtype} (it supports bfloat16 and float32)"
    if has_dropout:
        size = max(T, S) * -(-width // _LANES) * _LANES * np.dtype(query.dtype).itemsize
        if size > _MAX_BYTES_WITH_DROPOUT:
            return (
                f"dropout on the weights of {T} queries and {S} keys of width {width} and dtype {query.dtype}"
            )
        return None
    if min(T, S) < _LANES:
        return f"{T} queries and {S} keys (it supports {_LANES} or more)"
    if ring > 1 and (T % _LANES or S % _LANES):
        return f"{T} queries and {S} keys (over a ring it supports multiples of {_LANES})"
    return None


def needs_array(form: KernelMask | None, queries: int, keys: int) -> bool:
    """Return whether cuDNN needs a mask as an array, as neither lengths nor a causal band; see `cudnn_mask`."""
    if form is None:
        return False
    segments = form.key_segments is not None and not form.needs_no_segments
    return segments or (form.band != _NO_BAND and not (form.highest == 0 and queries == keys))


class _Device(NamedTuple):
    """An attached GPU.

    Attributes:
      name: Name with the compute capability.
      major: Major number of the compute capability; 0 for a GPU that is not NVIDIA's.
    """

    name: str
    major: int


def _device() -> _Device | None:
    """Return the GPU that the program is compiled for if it is attached, else None."""
    if kernel_of(platform()) != "cudnn":
        return None
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return None  # compiled for a GPU that is not attached
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None and target.device_kind != device.device_kind:
        return None
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.partition(".")[0]
    return _Device(f"{device.device_kind} ({capability or 'unknown'})", int(major) if major.isdigit() else 0)


def _target() -> _Device | None:
    """Return the GPU of the current mesh, which need not be attached, if its data sheet is known."""
    from transformer_jax.distributed.targets import chip_of_kind  # imports the description of topologies

    target = jax.sharding.get_abstract_mesh().abstract_device
    chip = None if target is None else chip_of_kind(target.device_kind)
    if chip is None or chip.gpu is None:
        return None
    return _Device(f"{chip.name} ({chip.gpu.major}.{chip.gpu.minor})", chip.gpu.major)


def form_of(mask: Visibility | KernelMask | None, queries: int, keys: int) -> KernelMask | None:
    """Return the kernels' form of a mask, or None if it has none."""
    return (
        mask
        if mask is None or isinstance(mask, KernelMask)
        else KernelMask.from_visibility(mask, queries, keys)
    )


def prepare_for_kernel(mask: Visibility, queries: int, keys: int, dtype: str) -> Visibility | KernelMask:
    """Return the form of a mask for the kernels of all layers, or the mask itself if it has no such form."""
    form = form_of(mask, queries, keys)
    if form is None:
        return mask
    return form.with_additive(dtype) if kernel_of(platform()) == "cudnn" else form


@functools.cache
def report_refusal(kernel: str, reason: str, form: str, *, requested: bool) -> None:
    """Warn once about the form of attention that is used instead of a kernel.

    Args:
      kernel: The kernel.
      reason: Why the kernel does not support the arguments, see `refusal`.
      form: The form that is used.
      requested: Whether the user asked for a kernel; otherwise only reasons that another choice of sizes or
        dtype avoids are reported.
    """
    if requested or reason.startswith(("head width", "dtype", "values")):
        warnings.warn(f"attention: {kernel} does not support {reason}; the {form} form is used", stacklevel=2)


def kernel_attention(
    kernel: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Visibility | KernelMask | jax.Array | None,
    scale: float,
    weight_dropout: float = 0.0,
    words: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute `dot_product_attention` by a kernel that supports the arguments, see `refusal`.

    On a mesh each device computes its own rows and heads.

    Args:
      kernel: "cudnn" or "splash".
      query: See `dot_product_attention`.
      key: See `dot_product_attention`.
      value: See `dot_product_attention`.
      mask: See `dot_product_attention`.
      scale: See `dot_product_attention`.
      weight_dropout: See `dot_product_attention`.
      words: Random words of dropout, see `random_words`; dropout is on if they are passed.
      interpret: Interpret Pallas's kernel on a CPU, for tests.

    Returns:
      (B, T, H, K) in the query's dtype.
    """
    T, S = query.shape[1], key.shape[1]
    assert not isinstance(mask, jax.Array), "kernels refuse it"
    form = form_of(mask, T, S)
    attend: Any
    inputs: tuple[jax.Array, ...] = ()
    if words is not None:
        target = "interpret" if interpret else "gpu" if kernel == "cudnn" else "tpu"
        attend = functools.partial(_dropout, rate=weight_dropout, target=target, heads=query.shape[2])
        inputs, form = (words,), None if form is None else form.replace(additive=None)
    elif kernel == "cudnn":
        form = form if form is None or form.additive is not None else form.with_additive(str(query.dtype))
        attend = _cudnn
    else:
        attend = functools.partial(_splash, interpret=interpret)
    sees_any = None if form is None else form.sees_any
    # The count of the program's operations reads the band from this name.
    with jax.named_scope(band_scope(*_NO_BAND if form is None else form.band)):
        output = _on_each_device(functools.partial(attend, scale=scale), query, key, value, form, *inputs)
    # For a query without visible keys a kernel returns a mean over all keys; the contract is zeros.
    return output if sees_any is None else jnp.where(sees_any[:, :, None, None], output, 0)


def axes_of(query: jax.Array, key: jax.Array) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the mesh axes that shard rows and heads, each None if the axes do not divide them."""
    mesh = jax.sharding.get_abstract_mesh()

    def divides(size: int, *axes: str) -> bool:
        return size % math.prod(mesh.shape.get(axis, 1) for axis in axes) == 0

    heads = divides(query.shape[2], TENSOR) and divides(key.shape[2], TENSOR)
    return ROWS if divides(query.shape[0], *ROWS) else None, TENSOR if heads else None


def _on_each_device(attend, query, key, value, form: KernelMask | None, *inputs: jax.Array) -> jax.Array:
    """Run `attend` on each device's rows and heads; on all of them without a mesh or inside a `shard_map`.

    Args:
      attend: Function of the other arguments.
      query: (B, T, H, K).
      key: (B, S, G, K).
      value: (B, S, G, K).
      form: The mask, or None.
      *inputs: Further arrays, which every device reads completely.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return attend(query, key, value, form, *inputs)
    rows, heads = axes_of(query, key)
    spec = PartitionSpec(rows, None, heads, None)
    if form is not None:
        # The kernel does not read these fields, whose arrays have other shapes.
        form = form.replace(relations=Visibility(()), sees_any=None)
    specs = jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == query.shape[0] else None), form)
    in_specs = (spec, spec, spec, specs, *(PartitionSpec() for _ in inputs))
    local = jax.shard_map(
        functools.partial(attend, axes=(rows, heads)) if inputs else attend,
        in_specs=in_specs, out_specs=spec, check_vma=False,
    )  # fmt: skip
    return local(query, key, value, form, *inputs)


def _dropout(query, key, value, form, words, *, scale, rate, target, heads, axes=(None, None)) -> jax.Array:
    """Run `attention_with_dropout` on this device's rows and heads, which `axes` of the mesh shard."""
    sizes = query.shape[0], query.shape[2]
    first = [
        jnp.uint32(0) if axis is None else jax.lax.axis_index(axis).astype(jnp.uint32) * jnp.uint32(size)
        for axis, size in zip(axes, sizes, strict=True)
    ]
    numbers = jnp.concatenate([words, jnp.stack(first)])
    return attention_with_dropout(
        query, key, value, form, numbers, heads=heads, scale=scale, rate=rate, target=target
    )


def cudnn_mask(
    form: KernelMask | None, queries: int, keys: int, dtype: Any
) -> tuple[jax.Array | None, bool, int | None]:
    """Return (array to add to the logits or None, whether the kernel's mask is causal, its window or None)."""
    lowest, highest = _NO_BAND if form is None else form.band
    additive = None if form is None else form.additive
    causal = highest == 0 and queries == keys and not (form is not None and form.always)
    if (lowest, highest) != _NO_BAND and not causal:
        # The kernel's band is causal from index 0 on; any other band becomes part of the array.
        assert form is not None
        visible = jnp.asarray(form.in_band(queries, keys))[None]
        if form.key_lengths is not None:
            # The kernel does not combine lengths with an array.
            visible = visible & (jnp.arange(keys) < form.key_lengths[:, None, None])
        band = additive_mask(visible, dtype)[:, None]
        additive, lowest = band if additive is None else jnp.minimum(additive, band), None
    return additive, causal, -lowest if causal and lowest is not None else None


def pad_to_even(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None, *, causal: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Pad queries, keys and values to even lengths, which cuDNN's backward pass requires.

    Returns:
      (query, key, value, key lengths). Unless the mask is causal, the lengths hide the padding.
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
        # With each row's first real token at index 0, the causal band hides the padding, which is then last.
        query, key, value = (_roll(x, -first) for x in (query, key, value))
    query, key, value, lengths = pad_to_even(query, key, value, lengths, causal=causal)
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
    return output if first is None else _roll(output, first)


def _roll(x: jax.Array, shifts: jax.Array) -> jax.Array:
    """Roll the tokens of each row of x (B, T, ...) by its shift (B,)."""
    return jax.vmap(functools.partial(jnp.roll, axis=0))(x, shifts)


def _cudnn_with_array(
    query, key, value, additive, causal: bool, before: int | None, *, scale: float
) -> jax.Array:
    """Compute attention with an array that is added to the logits and has no gradient.

    The public function would make the kernel write the array's gradient, which nobody needs.
    """
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType, _dot_product_attention

    absent = jnp.zeros(0, query.dtype)
    return _dot_product_attention(
        query, key, value, additive, *(6 * [absent]), scale, 42, 0.0, (True, False),
        MaskType.CAUSAL if causal else MaskType.NO_MASK, AttentionLayout.BTNH.value,
        None if before is None else before + 1, _cudnn_version(), False,
    )  # fmt: skip


def _cudnn_version() -> int:
    """Return the version of the installed cuDNN, as JAX's own function passes it."""
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    return check_cudnn_version()


def _block(length: int) -> int:
    """Return the largest block that divides a length."""
    return next(size for size in (_BLOCK, 512, 256, _LANES) if length % size == 0)


def splash_kernel(
    queries: int, keys: int, heads: int, band: tuple[int | None, int | None], mask: Any = None, **options: Any
) -> Any:
    """Return splash attention for (H, T, K) queries, already scaled, and (G, S, K) keys and values.

    Args:
      queries: T.
      keys: S.
      heads: H.
      band: Lowest and highest visible value of key index - query index.
      mask: (T, S) booleans that replace the band, or None.
      **options: Options of `make_splash_mha`.
    """
    # Imported here, because Pallas for TPUs takes a second to import and no other platform needs it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    lowest, highest = band
    if mask is not None:
        mask = splash_attention_mask.NumpyMask(mask)
    elif band == _NO_BAND:
        mask = splash_attention_mask.FullMask((queries, keys))
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
    """Return segments (1 or B, T) and (1 or B, S) in the form of splash attention for B rows."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    return SegmentIds(*(jnp.broadcast_to(x, (rows, x.shape[1])) for x in (query_segments, key_segments)))


def _splash(query, key, value, form: KernelMask | None, *, scale: float, interpret: bool) -> jax.Array:
    (B, T, H), S = query.shape[:3], key.shape[1]
    band = _NO_BAND if form is None else form.band
    query_padding, key_padding = (-length % _LANES for length in (T, S))
    options: dict[str, Any] = dict(residual_checkpoint_name=KERNEL_RESULTS, interpret=interpret)
    mask = None if form is None or not form.always else form.in_band(T + query_padding, S + key_padding)
    kernel = splash_kernel(T + query_padding, S + key_padding, H, band, mask, **options)
    query = query * jnp.asarray(scale, query.dtype)
    by_head = [
        jnp.pad(jnp.swapaxes(x, 1, 2), [(0, 0), (0, 0), (0, padding), (0, 0)])
        for x, padding in ((query, query_padding), (key, key_padding), (value, key_padding))
    ]
    segments: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if form is not None:
        segments = form.query_segments, form.key_segments
    # A causal band hides the padding, which is last.
    if key_padding and segments[0] is None and not (band[1] == 0 and T == S):
        segments = jnp.zeros((1, T), jnp.int32), jnp.zeros((1, S), jnp.int32)
    if segments[0] is None or segments[1] is None:
        output = jax.vmap(kernel)(*by_head)
    else:
        padded_query, padded_key = (
            jnp.pad(x, [(0, 0), (0, padding)], constant_values=_PADDING_SEGMENT)
            for x, padding in ((segments[0], query_padding), (segments[1], key_padding))
        )
        output = jax.vmap(kernel)(*by_head, splash_segments(padded_query, padded_key, B))
    return jnp.swapaxes(output[:, :, :T], 1, 2).astype(query.dtype)
