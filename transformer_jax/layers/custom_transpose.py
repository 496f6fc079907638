"""A linear function with a transpose of its own.

JAX's `linear_call` has no rule for `jax.vmap`, and none for derivatives with respect to the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Leaves = Callable[..., list[jax.Array]]


def with_transpose(function: Callable, transpose: Callable, residuals: Any, linear: Any) -> Any:
    """Returns function(residuals, linear), whose transpose with respect to `linear` is `transpose`.

    With a `jax.custom_jvp` rule it gives a function its own derivatives in both modes: the rule's tangent in
    forward mode, the transpose in reverse mode. Both may be differentiated again.

    Args:
      function: (residuals, linear) -> output, linear in `linear`. It closes over no traced values.
      transpose: (residuals, cotangent of the output) -> cotangent of `linear`, of its structure. Likewise.
      residuals: pytree of arrays.
      linear: pytree of arrays.

    Returns:
      What `function` returns.
    """
    residual_leaves, of_residuals = jax.tree.flatten(residuals)
    linear_leaves = jax.tree.leaves(linear)
    count = len(residual_leaves)
    # Traced here, where the mesh axes of a `shard_map` around it have their names.
    forward, output = jax.make_jaxpr(function, return_shape=True)(residuals, linear)
    of_output = jax.tree.structure(output)

    def backward(*leaves: jax.Array) -> list[jax.Array]:
        arguments = (
            jax.tree.unflatten(of_residuals, leaves[:count]),
            jax.tree.unflatten(of_output, leaves[count:]),
        )
        return jax.tree.leaves(transpose(*arguments))

    leaves = _linear.bind(*residual_leaves, *linear_leaves, forward=forward, backward=backward, count=count)
    return jax.tree.unflatten(of_output, leaves)


def _evaluated(*arguments: Any, forward: ClosedJaxpr, backward: Leaves, count: int) -> list[jax.Array]:
    return jaxpr_as_fun(forward)(*arguments)


def _transposed(cotangents, *arguments, forward: ClosedJaxpr, backward: Leaves, count: int):
    residuals, linear = arguments[:count], arguments[count:]
    cotangents = [
        jnp.zeros(like.shape, like.dtype) if type(x) is ad.Zero else x
        for x, like in zip(cotangents, forward.out_avals, strict=True)
    ]
    traced = jax.make_jaxpr(backward)(*residuals, *cotangents)
    found = _linear.bind(*residuals, *cotangents, forward=traced, backward=jaxpr_as_fun(forward), count=count)
    # A tangent that is a constant zero is an argument like the residuals.
    cotangents = [x if ad.is_undefined_primal(y) else None for x, y in zip(found, linear, strict=True)]
    return [None] * count + cotangents


def _jvp(primals, tangents, *, forward: ClosedJaxpr, backward: Leaves, count: int):
    bind = functools.partial(_linear.bind, forward=forward, backward=backward, count=count)
    output = bind(*primals)
    parts: list[list[jax.Array]] = []
    if any(type(x) is not ad.Zero for x in tangents[count:]):
        parts.append(bind(*primals[:count], *(ad.instantiate_zeros(x) for x in tangents[count:])))
    moving = [n for n, x in enumerate(tangents[:count]) if type(x) is not ad.Zero]
    if moving:

        def of_moving(*values: jax.Array) -> list[jax.Array]:
            changed = dict(zip(moving, values, strict=True))
            return jaxpr_as_fun(forward)(*(changed.get(n, x) for n, x in enumerate(primals)))

        parts.append(jax.jvp(of_moving, [primals[n] for n in moving], [tangents[n] for n in moving])[1])
    return output, [sum(each[1:], start=each[0]) for each in zip(*parts, strict=True)]


def _batched(arguments, axes, *, forward: ClosedJaxpr, backward: Leaves, count: int):
    size = next(x.shape[n] for x, n in zip(arguments, axes, strict=True) if n is not None)
    # All of them, since so are the cotangents that the transpose returns.
    linear = [
        jnp.broadcast_to(x, (size, *x.shape)) if n is None else jnp.moveaxis(x, n, 0)
        for x, n in zip(arguments[count:], axes[count:], strict=True)
    ]

    def over_batch(function: Leaves) -> Leaves:
        def batched(*leaves: jax.Array) -> list[jax.Array]:
            return jax.vmap(function, in_axes=(*axes[:count], *(0 for _ in leaves[count:])))(*leaves)

        return batched

    arguments = [*arguments[:count], *linear]
    traced = jax.make_jaxpr(over_batch(jaxpr_as_fun(forward)))(*arguments)
    output = _linear.bind(*arguments, forward=traced, backward=over_batch(backward), count=count)
    return output, [0] * len(output)


_linear = Primitive("linear_with_transpose")
_linear.multiple_results = True
_linear.def_impl(_evaluated)
_linear.def_abstract_eval(lambda *_, forward, **__: forward.out_avals)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transposed
batching.primitive_batchers[_linear] = _batched
mlir.register_lowering(_linear, mlir.lower_fun(_evaluated, multiple_results=True))
