"""Programs as text: whether a field of a config is read is seen without compiling anything."""

import jax
import numpy as np


def trace_of(init_and_apply):
    """Return what a function of a random key computes as text, or the message of its ValueError.

    Args:
      init_and_apply: Function (key) -> output, which creates a model and calls it with dropout.
    """
    try:
        traced = jax.make_jaxpr(init_and_apply)(jax.random.key(1))
    except ValueError as error:
        return str(error)
    # The text lacks the values of constants, and a changed frequency has the same shape.
    numbers = (np.asarray(c) for c in traced.consts if _is_number(c))
    return str(traced) + "".join(str(number.tolist()) for number in numbers)


def _is_number(constant):
    return not jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key)


def unread_fields(trace, changes):
    """Return the fields whose changed values change no program.

    Args:
      trace: Function (**changed fields) -> a program's text, see `trace_of`.
      changes: Another value of each field.
    """
    expected = trace()
    assert trace() == expected
    return [field for field, value in changes.items() if trace(**{field: value}) == expected]
