"""Attention by the kernels that JAX ships: cuDNN's on a GPU, Pallas's splash attention on a TPU.

A kernel never holds more than a block of the weights and leaves out blocks that the mask hides. Both have
derivatives of reverse mode only, and of first order.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.distributed.mesh import ROWS, TENSOR, platform
from transformer_jax.distributed.program_flops import band_scope
from transformer_jax.layers.kernel_mask import KernelMask
from transformer_jax.layers.named_points import KERNEL_RESULTS
from transformer_jax.layers.visibility import Visibility

# Head widths that cuDNN's flash attention takes: a multiple of 8 up to 128. (On Hopper up to 256, which JAX
# believes only if it finds the device.)
_CUDNN_WIDTH, _CUDNN_STEP = 128, 8
# Lanes of a TPU: blocks of queries and keys are multiples.
_LANES = 128
# The largest block of splash attention: its logits are 2 MiB of the 16 MiB next to a TPU's cores.
_BLOCK = 1_024


def kernel_of(target: str) -> str | None:
    """The name of a platform's kernel: "cudnn" of "gpu", "splash" of "tpu"."""
    return {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(target)


def refusal(kernel: str, query: Any, key: Any, value: Any, mask: Any, bias: Any) -> str | None:
    """Why a kernel does not take these arguments; None: it takes them.

    Args:
      kernel: "cudnn" or "splash".
      query, key, value, mask, bias: those of `dot_product_attention`, or their shapes.
    """
    T, S, width = query.shape[1], key.shape[1], query.shape[3]
    if bias is not None:
        return "a bias on the logits"
    if value.shape[3] != width:
        return f"values of width {value.shape[3]} beside keys of width {width}"
    if not (mask is None or isinstance(mask, (Visibility, KernelMask))):
        return "a mask that is an array"
    if T != 1 and form_of(mask, T, S) is None and mask is not None:
        return "a mask of no form that it has"
    if kernel == "cudnn":
        if query.dtype not in (jnp.bfloat16, jnp.float16):
            return f"dtype {query.dtype} (it takes bfloat16 and float16)"
        if width % _CUDNN_STEP or width > _CUDNN_WIDTH:
            return f"head width {width} (it takes multiples of {_CUDNN_STEP} up to {_CUDNN_WIDTH})"
        if T % 2 or S % 2:
            return f"{T} queries and {S} keys (it takes even numbers)"
        return None
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {query.dtype} (it takes bfloat16 and float32)"
    if T % _LANES or S % _LANES:
        return f"{T} queries and {S} keys (it takes multiples of {_LANES})"
    return None


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
    band = (None, None) if form is None else (form.lowest, form.highest)
    # What a kernel computes depends on the band, which a count of the program's operations reads off this name.
    with jax.named_scope(band_scope(*band)):
        output = _on_each_device(functools.partial(attend, scale=scale), query, key, value, form)
    # A kernel spreads a query that sees nothing over all keys; contract 2 wants zeros, and zero gradients.
    return output if sees_any is None else jnp.where(sees_any[:, :, None, None], output, 0)


def _on_each_device(attend, query, key, value, form: KernelMask | None) -> jax.Array:
    """Runs `attend` on every device's rows and heads; without a mesh, or within `shard_map`, on all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return attend(query, key, value, form)

    def fits(size: int, *axes: str) -> bool:
        parts = 1
        for axis in axes:
            parts *= mesh.shape.get(axis, 1)
        return size % parts == 0

    rows = ROWS if fits(query.shape[0], *ROWS) else None
    heads = TENSOR if fits(query.shape[2], TENSOR) and fits(key.shape[2], TENSOR) else None
    whole = PartitionSpec(rows, None, heads, None)
    if form is not None:
        # What the kernel does not read stays outside: the relations hold arrays of other shapes.
        form = form.replace(relations=Visibility(()), sees_any=None)
    specs = jax.tree.map(lambda x: PartitionSpec(rows if x.shape[0] == query.shape[0] else None), form)
    local = jax.shard_map(attend, in_specs=(whole, whole, whole, specs), out_specs=whole, check_vma=False)
    return local(query, key, value, form)


def _cudnn(query, key, value, form: KernelMask | None, *, scale: float) -> jax.Array:
    lowest, highest, additive = (
        (None, None, None) if form is None else (form.lowest, form.highest, form.additive)
    )
    T, S = query.shape[1], key.shape[1]
    causal = highest == 0 and T == S
    if (lowest, highest) != (None, None) and not causal:
        # The kernel's own band is causal from place 0 on; any other one is part of the array.
        distance = jnp.arange(S)[None, :] - jnp.arange(T)[:, None]
        inside = jnp.ones((T, S), bool)
        inside = inside if lowest is None else inside & (distance >= lowest)
        inside = inside if highest is None else inside & (distance <= highest)
        band = jnp.where(inside, 0, jnp.finfo(query.dtype).min / 2).astype(query.dtype)[None, None]
        additive, lowest = band if additive is None else jnp.minimum(additive, band), None
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=additive,
        is_causal=causal,
        scale=scale,
        local_window_size=(-lowest, 0) if causal and lowest is not None else None,
        implementation="cudnn",
    )


def _block(length: int) -> int:
    """The largest block that divides a length."""
    return next(size for size in (_BLOCK, 512, 256, _LANES) if length % size == 0)


def _splash(query, key, value, form: KernelMask | None, *, scale: float, interpret: bool) -> jax.Array:
    # Imported here: Pallas for TPUs is an import of a second that no other platform needs.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (T, H), S = query.shape[1:3], key.shape[1]
    lowest, highest = (None, None) if form is None else (form.lowest, form.highest)
    if (lowest, highest) == (None, None):
        band: Any = splash_attention_mask.FullMask((T, S))
    else:
        before = None if lowest is None else -lowest
        band = splash_attention_mask.LocalMask((T, S), (before, highest), offset=0)
    queries, keys = _block(T), _block(S)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=queries, block_kv=keys, block_kv_compute=min(keys, 512),
        block_q_dkv=queries, block_kv_dkv=keys, block_kv_dkv_compute=min(keys, 512),
        block_q_dq=queries, block_kv_dq=keys,
    )  # fmt: skip
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([band] * H),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        residual_checkpoint_name=KERNEL_RESULTS,
        interpret=interpret,
    )
    query = query * jnp.asarray(scale, query.dtype)
    by_head = [jnp.swapaxes(x, 1, 2) for x in (query, key, value)]
    if form is None or form.query_segments is None or form.key_segments is None:
        output = jax.vmap(kernel)(*by_head)
    else:
        segments = form.query_segments, form.key_segments
        rows = (jnp.broadcast_to(x, (query.shape[0], x.shape[1])) for x in segments)
        output = jax.vmap(kernel)(*by_head, splash_attention_kernel.SegmentIds(*rows))
    return jnp.swapaxes(output, 1, 2).astype(query.dtype)
