"""Count of a traced program's floating-point operations: matrix products times the trips of their loops.

XLA's own count takes a loop's body once and ignores kernels. This one reads the program that JAX hands to the
compiler, after differentiation and rematerialization. It omits elementwise work, as does the usual 6 N D.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Products between (T, S) and (S, K) in a kernel, and how many of them repeat one of another kernel: a backward
# pass computes the logits again, and a separate kernel for dq also the gradients of the weights.
_CUDNN = {
    "dot_product_attention_fwd_wrapper": (2, 0), "dot_product_attention_fwd": (2, 0),
    "dot_product_attention_bwd_wrapper": (5, 1), "dot_product_attention_bwd": (5, 1),
}  # fmt: skip
_SPLASH = {"_fwd": (2, 0), "_dq": (3, 2), "_dkv": (4, 1)}


class Flops(NamedTuple):
    """Floating-point operations.

    Attributes:
      products: Operations of matrix products.
      kernels: Operations of attention kernels.
      recomputed: Those among `kernels` that repeat operations of another kernel.
    """

    products: float
    kernels: float
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        """All operations."""
        return self.products + self.kernels

    @property
    def model(self) -> float:
        """Operations without those that kernels repeat."""
        return self.total - self.recomputed

    def plus(self, other: Flops) -> Flops:
        """Return the sums."""
        return Flops(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> Flops:
        """Return the operations of `count` executions."""
        return Flops(*(operations * count for operations in self))


_ZERO = Flops(0.0, 0.0)


def program_flops(program: ClosedJaxpr) -> float:
    """Count the operations of all devices together; a `cond` counts its most expensive branch.

    Args:
      program: `jax.make_jaxpr(f)(*arguments)` or `jitted.trace(*arguments).jaxpr`.

    Raises:
      ValueError: A product is in a loop of unknown length.
    """
    return program_work(program).total


def program_work(program: ClosedJaxpr) -> Flops:
    """Count the operations of `program_flops` by kind."""
    return _flops(program.jaxpr, "")


def _flops(jaxpr: Jaxpr, scope: str, read: Sequence[bool] | None = None) -> Flops:
    """Count the equations that the outputs need; `read` marks the outputs that are used, None means all.

    Rematerialization leaves equations behind whose results are unused; the compiler drops them.
    """
    outputs = (
        jaxpr.outvars if read is None else [x for x, used in zip(jaxpr.outvars, read, strict=True) if used]
    )
    needed = {x for x in outputs if not isinstance(x, Literal)}
    total = _ZERO
    for equation in reversed(jaxpr.eqns):
        used = [x in needed for x in equation.outvars]
        if not any(used) and not equation.effects:
            continue
        total = total.plus(_equation_flops(equation, scope, used))
        needed |= {x for x in equation.invars if not isinstance(x, Literal)}
    return total


def _equation_flops(equation: Any, outer_scope: str, read: Sequence[bool]) -> Flops:
    scope = f"{outer_scope}/{equation.source_info.name_stack}"
    name, params = equation.primitive.name, equation.params
    shapes = [getattr(x.aval, "shape", ()) for x in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        size = math.prod(shapes[0][axis] for axis in contracted)
        return Flops(2.0 * equation.outvars[0].aval.size * size, 0.0)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        outputs = shapes[1][numbers.rhs_spec[0]]
        return Flops(2.0 * equation.outvars[0].aval.size * math.prod(shapes[1]) / outputs, 0.0)
    if name in _CUDNN or name == "pallas_call":
        return _kernel_flops(equation, scope)
    programs = _inner_programs(params)
    is_call = len(programs) == 1 and name not in ("scan", "while") and len(programs[0].outvars) == len(read)
    inner = [_flops(program, scope, read if is_call else None) for program in programs]
    total = functools.reduce(Flops.plus, inner, _ZERO)
    if name == "scan":
        return total.times(params["length"])
    if name == "while":
        if total.total:
            raise ValueError("a product in a loop of unknown length")
        return total
    if name == "cond":
        return max(inner, key=lambda flops: flops.total)
    if name == "shard_map":
        mesh = params["mesh"]
        axes = params.get("manual_axes", mesh.axis_names)
        return total.times(math.prod(mesh.shape[axis] for axis in axes))
    return total


def _kernel_flops(equation: Any, scope: str) -> Flops:
    """Compute an attention kernel's operations; splash attention has one for forward, dq, and dk with dv."""
    name = equation.primitive.name
    if name in _CUDNN:
        products = _CUDNN[name]
        query, key = [x.aval.shape for x in equation.invars[:2]]
        (B, T, H, K), S = query, key[1]
        pairs = B * H * T * S
    else:
        name = str(equation.params.get("name_and_src_info") or equation.params.get("name"))
        floats = [
            x.aval.shape
            for x in equation.invars
            if jnp.issubdtype(getattr(x.aval, "dtype", jnp.int32), jnp.floating) and len(x.aval.shape) >= 3
        ]
        products = next((products for part, products in _SPLASH.items() if part in name), (0, 0))
        if products == (0, 0) or not floats:
            raise ValueError(f"no formula for the kernel {name}")
        (*rows, T, K), S = floats[0], floats[1][-2]
        pairs = math.prod(rows) * T * S
    product = 2.0 * pairs * K * _visible(scope, T, S)
    return Flops(0.0, *(count * product for count in products))


def band_scope(lowest: int | None, highest: int | None) -> str:
    """Return the name scope of a kernel whose mask allows `lowest` <= key - query <= `highest`."""
    return f"attention_kernel({lowest},{highest})"


def _visible(scope: str, queries: int, keys: int) -> float:
    """Return the share of (query, key) pairs within the band that the scope names."""
    match = re.search(r"attention_kernel\((None|-?\d+),(None|-?\d+)\)", scope)
    if match is None:
        return 1.0
    lowest, highest = (None if limit == "None" else int(limit) for limit in match.groups())
    query = np.arange(queries)
    first = np.zeros(queries, int) if lowest is None else np.maximum(query + lowest, 0)
    last = np.full(queries, keys - 1) if highest is None else np.minimum(query + highest, keys - 1)
    return float(np.maximum(last - first + 1, 0).sum()) / (queries * keys)


def _inner_programs(params: Any) -> list[Jaxpr]:
    return [
        item.jaxpr if isinstance(item, ClosedJaxpr) else item
        for value in params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(item, (Jaxpr, ClosedJaxpr))
    ]
