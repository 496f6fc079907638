"""Floating-point operations of a traced program: its products, times the trips of the loops around them.

XLA's own count takes a loop's body once and a kernel as nothing. This one reads the program that JAX hands to
the compiler, after differentiation and rematerialisation. Elementwise work is left out, as in the usual 6 N D.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Products of (T, S) logits or weights with (S, K) that a kernel computes. A backward pass makes the weights
# again.
_CUDNN = {
    "dot_product_attention_fwd_wrapper": 2, "dot_product_attention_fwd": 2,
    "dot_product_attention_bwd_wrapper": 5, "dot_product_attention_bwd": 5,
}  # fmt: skip
_SPLASH = {"_fwd": 2, "_dq": 3, "_dkv": 4}


def program_flops(program: ClosedJaxpr) -> float:
    """Operations of all devices together; of a `cond` the branch with the most.

    Args:
      program: `jax.make_jaxpr(f)(*arguments)` or `jitted.trace(*arguments).jaxpr`.

    Raises:
      ValueError: a product in a loop of unknown length.
    """
    return _of(program.jaxpr, "")


def _of(jaxpr: Jaxpr, scope: str, read: Sequence[bool] | None = None) -> float:
    """Of the equations that the outputs need, of which `read` says which are read; None is all.

    Rematerialisation leaves equations behind whose results nothing reads, and the compiler drops them.
    """
    outputs = jaxpr.outvars if read is None else [x for x, own in zip(jaxpr.outvars, read, strict=True) if own]
    needed = {x for x in outputs if not isinstance(x, Literal)}
    total = 0.0
    for equation in reversed(jaxpr.eqns):
        own = [x in needed for x in equation.outvars]
        if not any(own) and not equation.effects:
            continue
        total += _of_equation(equation, scope, own)
        needed |= {x for x in equation.invars if not isinstance(x, Literal)}
    return total


def _of_equation(equation: Any, around: str, read: Sequence[bool]) -> float:
    scope = f"{around}/{equation.source_info.name_stack}"
    name, params = equation.primitive.name, equation.params
    shapes = [getattr(x.aval, "shape", ()) for x in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * equation.outvars[0].aval.size * math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        outputs = shapes[1][numbers.rhs_spec[0]]
        return 2.0 * equation.outvars[0].aval.size * math.prod(shapes[1]) / outputs
    if name in _CUDNN or name == "pallas_call":
        return _of_kernel(equation, scope)
    programs = [_jaxpr(value) for value in _programs(params)]
    whole = len(programs) == 1 and name not in ("scan", "while") and len(programs[0].outvars) == len(read)
    inner = [_of(program, scope, read if whole else None) for program in programs]
    if not inner:
        return 0.0
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "while":
        if sum(inner):
            raise ValueError("a product in a loop of unknown length")
        return 0.0
    if name == "cond":
        return max(inner)
    if name == "shard_map":
        mesh = params["mesh"]
        axes = params.get("manual_axes", mesh.axis_names)
        return math.prod(mesh.shape[axis] for axis in axes) * sum(inner)
    return sum(inner)


def _of_kernel(equation: Any, scope: str) -> float:
    """An attention kernel by formula; of splash attention forward, dq, and dk with dv."""
    name = equation.primitive.name
    if name in _CUDNN:
        products, (query, key) = _CUDNN[name], [x.aval.shape for x in equation.invars[:2]]
        (B, T, H, K), S = query, key[1]
        pairs = B * H * T * S
    else:
        name = str(equation.params.get("name_and_src_info") or equation.params.get("name"))
        floats = [
            x.aval.shape
            for x in equation.invars
            if jnp.issubdtype(getattr(x.aval, "dtype", jnp.int32), jnp.floating) and len(x.aval.shape) >= 3
        ]
        products = next((count for part, count in _SPLASH.items() if part in name), 0)
        if not products or not floats:
            raise ValueError(f"no formula for the kernel {name}")
        (*rows, T, K), S = floats[0], floats[1][-2]
        pairs = math.prod(rows) * T * S
    return products * 2.0 * pairs * K * _visible(scope, T, S)


def band_scope(lowest: int | None, highest: int | None) -> str:
    """The name of the scope around a kernel whose mask shows keys at key - query within these limits."""
    return f"attention_kernel({lowest},{highest})"


def _visible(scope: str, queries: int, keys: int) -> float:
    """The share of pairs of a query and a key within the band that the scope names."""
    found = re.search(r"attention_kernel\((None|-?\d+),(None|-?\d+)\)", scope)
    if found is None:
        return 1.0
    lowest, highest = (None if limit == "None" else int(limit) for limit in found.groups())
    query = np.arange(queries)
    first = np.zeros(queries, int) if lowest is None else np.maximum(query + lowest, 0)
    last = np.full(queries, keys - 1) if highest is None else np.minimum(query + highest, keys - 1)
    return float(np.maximum(last - first + 1, 0).sum()) / (queries * keys)


def _programs(params: Any) -> list[Any]:
    found = []
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, (Jaxpr, ClosedJaxpr)):
                found.append(one)
    return found


def _jaxpr(program: Any) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program
