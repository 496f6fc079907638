import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.parameter_names import named_leaves, nested, with_leaves


class Model(nnx.Module):
    def __init__(self):
        self.value = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def test_names_hold_no_trace_of_flax():
    assert list(named_leaves({"a": [Model()]})) == ["a/0/value/bias", "a/0/value/kernel"]


def test_leaves_are_replaced_by_name():
    model = with_leaves(Model(), {"value/bias": jnp.ones(3), "value/kernel": jnp.zeros((2, 3))})
    np.testing.assert_array_equal(model.value(jnp.ones((1, 2))), np.ones((1, 3)))


def test_misfits_are_listed():
    with pytest.raises(
        ValueError, match=r"missing value/kernel; unknown value/kernal; value/bias is \(4,\)"
    ) as error:
        with_leaves(Model(), {"value/bias": jnp.ones(4), "value/kernal": jnp.zeros((2, 3))})
    assert "not (3,)" in str(error.value)


def test_nested():
    assert nested({"a/b": 1, "a/c/d": 2}) == {"a": {"b": 1, "c": {"d": 2}}}
