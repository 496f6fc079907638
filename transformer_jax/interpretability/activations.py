"""The named values of a model, returned or replaced.

A model's named points (`layers.named_points`) are part of the program that JAX traces of it. Both functions
here trace the model, run that program once more, equation by equation, and return or replace the values at
those points: nothing is kept in the model, and a model that is not inspected costs what it would cost without
them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, Literal

from transformer_jax.layers.attention.multi_head import MultiHeadAttention
from transformer_jax.layers.named_points import CROSS_ATTENTION, SELF_ATTENTION, WEIGHTS

# (value, number of the layer) -> value of the same shape. The number is that of the innermost loop, a traced
# integer; outside of loops it counts how often the name has come before.
Replacement = Callable[[jax.Array, Any], jax.Array]


def exact(model: nnx.Module) -> Any:
    """The same model with plain attention, whose weights have a name; chunked and fused forms hold none."""
    copy = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, MultiHeadAttention):
            module.implementation = "plain"
    return copy


def activations(
    function: Callable[..., Any], *inputs: Any, only: str | Sequence[str] = "*", **options: Any
) -> tuple[Any, dict[str, jax.Array]]:
    """Runs a model and returns its output and its named values.

    Names are paths: "decoder/residual", "encoder/self_attention/weights". A value that a loop over layers names
    comes back with a leading axis of L, one of a loop over time with an axis of T, the outer loop's first; so
    does one that is named several times in a row. A value inside a loop without a fixed number of turns, as
    decoding has, is not seen. Each call traces and compiles again: compile what you call often with `jax.jit`.

    Args:
      function: a model, one of its methods, or any function of arrays. If weights are asked for, models are run
        with `exact` attention, those among the inputs too; one that a function only encloses is run as it is.
      *inputs, **options: its arguments.
      only: shell patterns of the names to keep; other values are not kept.

    Returns:
      (what the function returns, the values by name in the order of their computation).

    Raises:
      ValueError: a pattern that no name fits, with the names that exist; or a value to keep that is named
        several times with different shapes.
    """
    patterns = [only] if isinstance(only, str) else list(only)
    program = _Program(function, inputs, options, patterns)

    @jax.jit
    def run(constants: Sequence[jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        request = _Request(patterns, {})
        output, seen = program.run(constants, request)
        _check(patterns, request.met)
        return output, {name: _one(name, values) for name, values in seen.items()}

    output, values = run(program.constants)
    # A dictionary that leaves a compiled function is in alphabetical order.
    return output, {name: values[name] for name in program.order if name in values}


def replaced(function: Callable[..., Any], replacements: Mapping[str, Replacement]) -> Callable[..., Any]:
    """The function with some of its named values replaced; what follows is computed from the new ones.

    Gradients, `jax.jit`, `jax.vmap`, `activations` and `replaced` may be taken of it again. Each call compiles
    anew: compile what you call often with `jax.jit`.

    Args:
      function: a model, or any function of arrays, see `activations`.
      replacements: for shell patterns of names, what takes the value's place.

    Returns:
      A function of the same arguments. It raises ValueError where a pattern fits no name, or where a new value
      has another shape.
    """
    patterns = list(replacements)

    def run(*inputs: Any, **options: Any) -> Any:
        program = _Program(function, inputs, options, patterns)

        @jax.jit
        def with_new_values(constants: Sequence[jax.Array]) -> Any:
            request = _Request([], replacements)
            output, _ = program.run(constants, request)
            _check(patterns, request.met)
            return output

        return with_new_values(program.constants)

    return run


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check(patterns: Sequence[str], met: Mapping[str, Any]) -> None:
    for pattern in patterns:
        if not any(_fits(name, [pattern]) for name in met):
            raise ValueError(f"no value is named {pattern!r}; there are {', '.join(met) or 'none'}")


def _one(name: str, values: Sequence[jax.Array]) -> jax.Array:
    shapes = list(dict.fromkeys(value.shape for value in values))
    if len(shapes) > 1:
        raise ValueError(f"{name} is named {len(values)} times, with shapes {', '.join(map(str, shapes))}")
    return values[0] if len(values) == 1 else jnp.stack(values)


class _Request:
    """What a run is for, and what it has met.

    Attributes:
      kept: patterns of the values to keep.
      replacements: see `replaced`.
      met: how often each name has come so far, outside of loops; the names in order.
    """

    def __init__(self, kept: Sequence[str], replacements: Mapping[str, Replacement]):
        self.kept, self.replacements = kept, replacements
        self.met: dict[str, int] = {}

    def at(self, name: str, value: jax.Array, turn: _Turn | None) -> jax.Array:
        """The value itself, or what takes its place."""
        number = self.met.setdefault(name, 0) if turn is None else turn.number
        self.met[name] = self.met.get(name, 0) + 1
        for pattern, replacement in self.replacements.items():
            if _fits(name, [pattern]):
                check = getattr(replacement, "check", None)
                if check is not None:
                    check(name, value, None if turn is None else turn.length)
                value = _like(replacement(value, number), value, name)
        return value


class _Turn(NamedTuple):
    """Of the innermost loop."""

    number: jax.Array
    length: int


# Where models have attention weights: they are run plainly if one of these is inspected.
_WEIGHTS = [
    "/".join(filter(None, (side, kind, WEIGHTS)))
    for side in ("encoder", "decoder", "")
    for kind in (SELF_ATTENTION, CROSS_ATTENTION, "")
]


def _exactly(function: Any, inputs: Any) -> tuple[Any, Any]:
    """The function and its inputs with every model among them, or that it is a method of, made `exact`."""

    def is_model(x: Any) -> bool:
        return isinstance(x, nnx.Module)

    def plain(x: Any) -> Any:
        return exact(x) if is_model(x) else x

    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and isinstance(owner, nnx.Module):
        function = types.MethodType(function.__func__, exact(owner))
    return jax.tree.map(plain, (function, inputs), is_leaf=is_model)


class _Program:
    """A function of given arguments as JAX's equations.

    Attributes:
      constants: all arrays that it reads.
      order: the names that the last run met.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        patterns: Sequence[str],
    ):
        if any(_fits(name, patterns) for name in _WEIGHTS):
            function, (inputs, options) = _exactly(function, (inputs, options))
        closed, shape = jax.make_jaxpr(lambda: function(*inputs, **options), return_shape=True)()
        self.jaxpr, self.constants = closed.jaxpr, closed.consts
        self.structure = jax.tree.structure(shape)
        self.order: list[str] = []

    def run(self, constants: Sequence[jax.Array], request: _Request) -> tuple[Any, dict[str, list[jax.Array]]]:
        """(the output, the values to keep by name, one for each time that they were named)."""
        outputs, seen = _evaluate(self.jaxpr, constants, [], "", None, request)
        self.order = list(request.met)
        return jax.tree.unflatten(self.structure, outputs), seen


def _evaluate(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    inputs: Sequence[Any],
    scope: str,
    turn: _Turn | None,
    request: _Request,
) -> tuple[list[Any], dict[str, list[jax.Array]]]:
    """Runs equations; see `_Program.run`. `turn` is of the innermost loop around them."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)
    seen: dict[str, list[jax.Array]] = {}

    def keep(more: Mapping[str, Sequence[jax.Array]]) -> None:
        for name, each in more.items():
            seen.setdefault(name, []).extend(each)

    for equation in jaxpr.eqns:
        arguments = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        kind, parameters = equation.primitive.name, equation.params
        own = _scope_of(equation)
        within = f"{scope}{own}/" if own else scope
        # So that inspecting this run finds the scopes again.
        with jax.named_scope(own) if own else contextlib.nullcontext():
            if kind == "name":
                name = within + parameters["name"]
                value = equation.primitive.bind(request.at(name, arguments[0], turn), **parameters)
                if _fits(name, request.kept):
                    keep({name: [value]})
                outputs = [value]
            elif not _has_names(equation):
                bound = equation.primitive.get_bind_params(parameters)
                with equation.ctx.manager:
                    result = equation.primitive.bind(*arguments, **bound)
                outputs = result if equation.primitive.multiple_results else [result]
            elif kind == "scan":
                outputs, more = _scan(parameters, arguments, within, request)
                keep(more)
            else:
                inner, fixed = _opened(parameters[_INSIDE[kind]])
                outputs, more = _evaluate(inner, fixed, arguments, within, turn, request)
                keep(more)
        values |= zip(equation.outvars, outputs, strict=True)
    return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars], seen


# Primitives that run equations once, and where they have them. Loops without a fixed number of turns, and
# branches, run as they are.
_INSIDE = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def _has_names(equation: Any) -> bool:
    """Whether named values are inside an equation that this module opens."""
    kind, parameters = equation.primitive.name, equation.params
    inner = parameters["jaxpr"] if kind == "scan" else parameters.get(_INSIDE.get(kind, ""))
    if inner is None:
        return False
    return any(e.primitive.name == "name" or _has_names(e) for e in _opened(inner)[0].eqns)


def _opened(inner: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """(equations, their constants); some primitives keep the two together, some have no constants."""
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def _scan(
    parameters: Mapping[str, Any], arguments: Sequence[Any], scope: str, request: _Request
) -> tuple[list[Any], dict[str, list[jax.Array]]]:
    """A loop over layers or time, whose named values come out stacked."""
    order: list[str] = []  # what leaves the loop does so in alphabetical order
    body, constants = _opened(parameters["jaxpr"])
    if "ft_in" in parameters:  # since JAX 0.11
        fixed, first, every = (list(x) for x in parameters["ft_in"].update(arguments).unpack())
    else:
        ends = [parameters["num_consts"], parameters["num_consts"] + parameters["num_carry"]]
        parts = arguments[: ends[0]], arguments[ends[0] : ends[1]], arguments[ends[1] :]
        fixed, first, every = (list(x) for x in parts)
    length = parameters["length"]

    def step(carry: list[Any], now: tuple[jax.Array, list[Any]]) -> tuple[list[Any], Any]:
        number, each = now
        inputs = [*fixed, *carry, *each]
        outputs, seen = _evaluate(body, constants, inputs, scope, _Turn(number, length), request)
        order[:] = seen
        values = {name: _one(name, each) for name, each in seen.items()}
        return outputs[: len(first)], (outputs[len(first) :], values)

    carry, (stacked, seen) = jax.lax.scan(
        step,
        first,
        (jnp.arange(length), every),
        length=length,
        reverse=parameters["reverse"],
        unroll=parameters["unroll"],
    )
    return [*carry, *stacked], {name: [seen[name]] for name in order}


def _scope_of(equation: Any) -> str:
    """The named scopes of an equation, "a/b", without those of transformations: "jvp(a)" is "a"."""
    scopes = re.sub(r"\w+\(|\)", "", str(equation.source_info.name_stack)).split("/")
    return "/".join(scope for scope in scopes if scope and scope != "rematted_computation")


def _like(new: Any, old: jax.Array, name: str) -> jax.Array:
    new = jnp.asarray(new, old.dtype)
    if new.shape != old.shape:
        raise ValueError(f"{name} has shape {old.shape}, and what takes its place {new.shape}")
    return new
