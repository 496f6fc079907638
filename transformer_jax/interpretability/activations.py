"""Return or replace the named values of a model.

A model's named points (`layers.named_points`) are part of its traced JAX program. Both functions in this file
trace the model, evaluate the program equation by equation, and return or replace the values at these points.
The model stores nothing, and a model that is not inspected has no additional cost.
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

# A function from (value, layer number) to a value of the same shape. The number is the index of the innermost
# loop, a traced integer; outside of loops it counts the previous values with the same name.
Replacement = Callable[[jax.Array, Any], jax.Array]


def exact(model: nnx.Module) -> Any:
    """Return a copy with plain attention, because chunked and fused attention compute no weights."""
    copy = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, MultiHeadAttention):
            module.implementation = "plain"
    return copy


def activations(
    function: Callable[..., Any], *inputs: Any, only: str | Sequence[str] = "*", **options: Any
) -> tuple[Any, dict[str, jax.Array]]:
    """Run a model and return its output and its named values.

    Names are paths, such as "decoder/residual" or "encoder/self_attention/weights". A value inside a loop over
    layers has a leading axis of L, a value inside a loop over time an axis of T, with the outer loop first.
    Values with the same name outside of loops are stacked too. Values inside a loop with a variable number of
    iterations, as in decoding, are not returned. Each call traces and compiles, so wrap frequent calls in
    `jax.jit`.

    Args:
      function: Model, method of a model, or any function of arrays. To return attention weights, models run
        with `exact` attention, including models among the inputs; a model in the function's closure runs
        unchanged.
      *inputs: Positional arguments of the function.
      only: Shell patterns of the names to return.
      **options: Keyword arguments of the function.

    Returns:
      The function's output, and a dict of values by name in the order of computation.

    Raises:
      ValueError: A pattern matches no name, or a selected name has values of different shapes.
    """
    patterns = [only] if isinstance(only, str) else list(only)
    program = _Program(function, inputs, options, patterns)

    @jax.jit
    def run(constants: Sequence[jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        request = _Request(patterns, {})
        output, values_by_name = program.run(constants, request)
        _check(patterns, request.counts)
        return output, {name: _stack(name, values) for name, values in values_by_name.items()}

    output, values = run(program.constants)
    # A compiled function returns dicts in alphabetical order.
    return output, {name: values[name] for name in program.order if name in values}


def replaced(function: Callable[..., Any], replacements: Mapping[str, Replacement]) -> Callable[..., Any]:
    """Return the function with some named values replaced; later values are computed from the new ones.

    The result supports gradients, `jax.jit`, `jax.vmap`, `activations` and `replaced`. Each call compiles, so
    wrap frequent calls in `jax.jit`.

    Args:
      function: Model, or any function of arrays; see `activations`.
      replacements: Replacements by shell pattern of the names.

    Returns:
      A function of the same arguments. It raises ValueError if a pattern matches no name, or if a new value has
      another shape.
    """
    patterns = list(replacements)

    def run(*inputs: Any, **options: Any) -> Any:
        program = _Program(function, inputs, options, patterns)

        @jax.jit
        def with_new_values(constants: Sequence[jax.Array]) -> Any:
            request = _Request([], replacements)
            output, _ = program.run(constants, request)
            _check(patterns, request.counts)
            return output

        return with_new_values(program.constants)

    return run


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check(patterns: Sequence[str], names: Mapping[str, Any]) -> None:
    for pattern in patterns:
        if not any(_matches(name, [pattern]) for name in names):
            remedy = f"choose from {', '.join(names)}" if names else "the function names none"
            raise ValueError(f"no value is named {pattern!r}: {remedy}")


def _stack(name: str, values: Sequence[jax.Array]) -> jax.Array:
    shapes = list(dict.fromkeys(value.shape for value in values))
    if len(shapes) > 1:
        raise ValueError(f"{name} names {len(values)} values with shapes {', '.join(map(str, shapes))}")
    return values[0] if len(values) == 1 else jnp.stack(values)


class _Request:
    """The values that a run returns or replaces.

    Attributes:
      selected: Patterns of the names to return.
      replacements: See `replaced`.
      counts: Number of values per name so far, outside of loops, in the order of the names.
    """

    def __init__(self, selected: Sequence[str], replacements: Mapping[str, Replacement]):
        self.selected, self.replacements = selected, replacements
        self.counts: dict[str, int] = {}

    def replace(self, name: str, value: jax.Array, loop: _Loop | None) -> jax.Array:
        """Count the name, and return the value or its replacement."""
        number = self.counts.setdefault(name, 0) if loop is None else loop.step
        self.counts[name] = self.counts.get(name, 0) + 1
        for pattern, replacement in self.replacements.items():
            if _matches(name, [pattern]):
                check = getattr(replacement, "check", None)
                if check is not None:
                    check(name, value, None if loop is None else loop.length)
                value = _cast(replacement(value, number), value, name)
        return value


class _Loop(NamedTuple):
    """The iteration number and the length of the innermost loop."""

    step: jax.Array
    length: int


# Paths of attention weights. To inspect one of them, models run with plain attention.
_WEIGHTS = [
    "/".join(filter(None, (side, kind, WEIGHTS)))
    for side in ("encoder", "decoder", "")
    for kind in (SELF_ATTENTION, CROSS_ATTENTION, "")
]


def _with_exact_models(function: Any, inputs: Any) -> tuple[Any, Any]:
    """Make all models among the inputs `exact`, and the model of which the function is a method."""

    def is_model(x: Any) -> bool:
        return isinstance(x, nnx.Module)

    def to_exact(x: Any) -> Any:
        return exact(x) if is_model(x) else x

    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and isinstance(owner, nnx.Module):
        function = types.MethodType(function.__func__, exact(owner))
    return jax.tree.map(to_exact, (function, inputs), is_leaf=is_model)


class _Program:
    """The JAX equations of a function with fixed arguments.

    Attributes:
      constants: All arrays that the function reads.
      order: Names of the last run in the order of computation.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        patterns: Sequence[str],
    ):
        if any(_matches(name, patterns) for name in _WEIGHTS):
            function, (inputs, options) = _with_exact_models(function, (inputs, options))
        closed, shape = jax.make_jaxpr(lambda: function(*inputs, **options), return_shape=True)()
        self.jaxpr, self.constants = closed.jaxpr, closed.consts
        self.structure = jax.tree.structure(shape)
        self.order: list[str] = []

    def run(self, constants: Sequence[jax.Array], request: _Request) -> tuple[Any, dict[str, list[jax.Array]]]:
        """Return the output and the selected values, as a list per name."""
        outputs, named_values = _evaluate(self.jaxpr, constants, [], "", None, request)
        self.order = list(request.counts)
        return jax.tree.unflatten(self.structure, outputs), named_values


def _evaluate(
    jaxpr: Jaxpr,
    constants: Sequence[Any],
    inputs: Sequence[Any],
    scope: str,
    loop: _Loop | None,
    request: _Request,
) -> tuple[list[Any], dict[str, list[jax.Array]]]:
    """Evaluate equations inside a scope and the innermost loop; see `_Program.run`."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, inputs, strict=True)
    named_values: dict[str, list[jax.Array]] = {}

    def keep(more: Mapping[str, Sequence[jax.Array]]) -> None:
        for name, new_values in more.items():
            named_values.setdefault(name, []).extend(new_values)

    for equation in jaxpr.eqns:
        arguments = [x.val if isinstance(x, Literal) else values[x] for x in equation.invars]
        primitive, parameters = equation.primitive.name, equation.params
        equation_scope = _scope_of(equation)
        inner_scope = f"{scope}{equation_scope}/" if equation_scope else scope
        # The scopes are entered again, so that `activations` and `replaced` can be nested.
        with jax.named_scope(equation_scope) if equation_scope else contextlib.nullcontext():
            if primitive == "name":
                name = inner_scope + parameters["name"]
                value = equation.primitive.bind(request.replace(name, arguments[0], loop), **parameters)
                if _matches(name, request.selected):
                    keep({name: [value]})
                outputs = [value]
            elif not _has_names(equation):
                bind_parameters = equation.primitive.get_bind_params(parameters)
                with equation.ctx.manager:
                    result = equation.primitive.bind(*arguments, **bind_parameters)
                outputs = result if equation.primitive.multiple_results else [result]
            elif primitive == "scan":
                outputs, inner_values = _scan(parameters, arguments, inner_scope, request)
                keep(inner_values)
            else:
                jaxpr_inside, inner_constants = _unpack(parameters[_INNER_JAXPRS[primitive]])
                outputs, inner_values = _evaluate(
                    jaxpr_inside, inner_constants, arguments, inner_scope, loop, request
                )
                keep(inner_values)
        values |= zip(equation.outvars, outputs, strict=True)
    return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars], named_values


# Parameters that hold the equations of primitives which run them once. Branches, and loops with a variable
# number of iterations, run unchanged.
_INNER_JAXPRS = {
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
    """Return whether an equation that can be evaluated here contains named values."""
    primitive, parameters = equation.primitive.name, equation.params
    inner = parameters["jaxpr"] if primitive == "scan" else parameters.get(_INNER_JAXPRS.get(primitive, ""))
    if inner is None:
        return False
    return any(e.primitive.name == "name" or _has_names(e) for e in _unpack(inner)[0].eqns)


def _unpack(inner: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Return the equations and constants of a closed or an open jaxpr."""
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def _scan(
    parameters: Mapping[str, Any], arguments: Sequence[Any], scope: str, request: _Request
) -> tuple[list[Any], dict[str, list[jax.Array]]]:
    """Run a loop over layers or time, and return its named values stacked."""
    order: list[str] = []  # because a loop returns dicts in alphabetical order
    body, body_constants = _unpack(parameters["jaxpr"])
    if "ft_in" in parameters:  # since JAX 0.11
        inputs = parameters["ft_in"].update(arguments).unpack()
    else:
        first_carry = parameters["num_consts"]
        first_x = first_carry + parameters["num_carry"]
        inputs = arguments[:first_carry], arguments[first_carry:first_x], arguments[first_x:]
    constants, start, xs = map(list, inputs)
    length = parameters["length"]

    def step(carry: list[Any], x: tuple[jax.Array, list[Any]]) -> tuple[list[Any], Any]:
        number, slices = x
        outputs, named_values = _evaluate(
            body, body_constants, [*constants, *carry, *slices], scope, _Loop(number, length), request
        )
        order[:] = named_values
        stacked = {name: _stack(name, values) for name, values in named_values.items()}
        return outputs[: len(start)], (outputs[len(start) :], stacked)

    carry, (stacked, named_values) = jax.lax.scan(
        step,
        start,
        (jnp.arange(length), xs),
        length=length,
        reverse=parameters["reverse"],
        unroll=parameters["unroll"],
    )
    return [*carry, *stacked], {name: [named_values[name]] for name in order}


def _scope_of(equation: Any) -> str:
    """Return the named scopes of an equation, "a/b", without transformations: "jvp(a)" becomes "a"."""
    scopes = re.sub(r"\w+\(|\)", "", str(equation.source_info.name_stack)).split("/")
    return "/".join(scope for scope in scopes if scope and scope != "rematted_computation")


def _cast(new: Any, old: jax.Array, name: str) -> jax.Array:
    new = jnp.asarray(new, old.dtype)
    if new.shape != old.shape:
        raise ValueError(f"the new {name} has shape {new.shape}: return shape {old.shape}")
    return new
