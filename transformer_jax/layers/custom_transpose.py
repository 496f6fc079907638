"""Linear functions with a custom transpose.

JAX's `linear_call` supports neither `jax.vmap` nor derivatives with respect to the residuals.
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
    """Compute function(residuals, linear), whose transpose with respect to `linear` is `transpose`.

    Together with a `jax.custom_jvp` rule it gives a function custom derivatives in both modes: the rule's
    tangent in forward mode, the transpose in reverse mode. Both can be differentiated again.

    Args:
      function: Function (residuals, linear) -> output, linear in `linear`, that closes over no traced values.
      transpose: Function (residuals, cotangent of the output) -> cotangent of `linear`, that closes over no
        traced values.
      residuals: Pytree of arrays.
      linear: Pytree of arrays.

    Returns:
      The output of `function`.
    """
    residual_leaves, residual_tree = jax.tree.flatten(residuals)
    linear_leaves = jax.tree.leaves(linear)
    count = len(residual_leaves)
    # Traced here, because the mesh axes of an enclosing `shard_map` have their names only here.
    forward, output = jax.make_jaxpr(function, return_shape=True)(residuals, linear)
    output_tree = jax.tree.structure(output)

    def backward(*leaves: jax.Array) -> list[jax.Array]:
        arguments = (
            jax.tree.unflatten(residual_tree, leaves[:count]),
            jax.tree.unflatten(output_tree, leaves[count:]),
        )
        return jax.tree.leaves(transpose(*arguments))

    leaves = _linear.bind(*residual_leaves, *linear_leaves, forward=forward, backward=backward, count=count)
    return jax.tree.unflatten(output_tree, leaves)


def in_one_piece(function: Callable, *arguments: Any) -> Any:
    """Compute function(*arguments) as one operation of the program that derivatives are taken of.

    JAX splits a scan whose gradient is taken, and computes what does not depend on its carry before the loop,
    for all steps together. A scan for which that takes too much memory is wrapped in this function.

    Args:
      function: Function of pytrees of arrays that closes over no traced values.
      *arguments: Its arguments.
    """
    return with_transpose(lambda residuals, _: function(*residuals), lambda *_: (), arguments, ())


def _evaluate(*arguments: Any, forward: ClosedJaxpr, backward: Leaves, count: int) -> list[jax.Array]:
    return jaxpr_as_fun(forward)(*arguments)


def _transpose(cotangents, *arguments, forward: ClosedJaxpr, backward: Leaves, count: int):
    residuals, linear = arguments[:count], arguments[count:]
    cotangents = [
        jnp.zeros(like.shape, like.dtype) if type(x) is ad.Zero else x
        for x, like in zip(cotangents, forward.out_avals, strict=True)
    ]
    traced = jax.make_jaxpr(backward)(*residuals, *cotangents)
    results = _linear.bind(*residuals, *cotangents, forward=traced, backward=jaxpr_as_fun(forward), count=count)
    # A tangent that is a constant zero gets no cotangent, like the residuals.
    cotangents = [x if ad.is_undefined_primal(y) else None for x, y in zip(results, linear, strict=True)]
    return [None] * count + cotangents


def _jvp(primals, tangents, *, forward: ClosedJaxpr, backward: Leaves, count: int):
    bind = functools.partial(_linear.bind, forward=forward, backward=backward, count=count)
    output = bind(*primals)
    terms: list[list[jax.Array]] = []
    if any(type(x) is not ad.Zero for x in tangents[count:]):
        terms.append(bind(*primals[:count], *(ad.instantiate_zeros(x) for x in tangents[count:])))
    nonzero = [n for n, x in enumerate(tangents[:count]) if type(x) is not ad.Zero]
    if nonzero:

        def of_residuals(*values: jax.Array) -> list[jax.Array]:
            changed = dict(zip(nonzero, values, strict=True))
            return jaxpr_as_fun(forward)(*(changed.get(n, x) for n, x in enumerate(primals)))

        terms.append(jax.jvp(of_residuals, [primals[n] for n in nonzero], [tangents[n] for n in nonzero])[1])
    return output, [sum(leaf_terms[1:], start=leaf_terms[0]) for leaf_terms in zip(*terms, strict=True)]


def _batch(arguments, axes, *, forward: ClosedJaxpr, backward: Leaves, count: int):
    size = next(x.shape[n] for x, n in zip(arguments, axes, strict=True) if n is not None)
    # Every linear argument is batched, because the transpose returns batched cotangents for all of them.
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
_linear.def_impl(_evaluate)
_linear.def_abstract_eval(lambda *_, forward, **__: forward.out_avals)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
