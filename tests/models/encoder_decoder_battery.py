"""What every model with an encoder of images or sounds and a causal decoder must satisfy."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.distributed.mesh import make_mesh, on_mesh
from transformer_jax.distributed.sharding import model_shardings, rule_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import named_leaves


@functools.partial(jax.jit, static_argnames="return_weights")
def forward(model, inputs, tokens, **arguments):
    return model(inputs, tokens, **arguments)


@jax.jit
def step(model, cache, tokens):
    return model.step_function(return_weights=True)(cache, tokens)


class EncoderDecoderBattery:
    """Base class of the tests of a model; a subclass defines `model_of` and `arrays`.

    Attributes:
      model_of: Function (compute options, **changed fields) -> the model.
      arrays: Function () -> (inputs of the encoder with B rows, token ids (B, T)).
      texts: The same with `texts_per_input` adjacent rows of tokens for each input.
      texts_per_input: Number of texts of each input in the tests of the cache.
      changed: Fields of the config in which the sharded model differs.
      dropout: Field of the decoder's dropout rate.
    """

    texts_per_input = 1
    changed: ClassVar = {}
    dropout = "dropout"

    def texts(self):
        """Return the inputs and their texts."""
        return self.arrays()

    def test_no_leak_from_the_future_and_every_token_sees_the_input(self):
        model, (inputs, tokens) = self.model_of(), self.arrays()
        before = forward(model, inputs, tokens)
        after = forward(model, inputs, tokens.at[:, 4:].set((tokens[:, 4:] + 1) % 53))
        np.testing.assert_array_equal(before[:, :4], after[:, :4])
        assert (before[:, 4:] != after[:, 4:]).any()
        other_input = forward(model, inputs.at[1].add(1.0), tokens)
        np.testing.assert_array_equal(before[0], other_input[0])
        assert (before[1] != other_input[1]).any(axis=-1).all()

    @pytest.mark.parametrize("form", ["trained", "inference"])
    def test_cached_steps_equal_the_full_pass(self, form):
        model = self.model_of()
        inputs, tokens = self.texts()
        logits, weights = forward(model, inputs, tokens, return_weights=True)
        model = model if form == "trained" else model.for_inference()
        start = jax.jit(lambda m, x: m.start(x, max_length=tokens.shape[1] + 2))
        cache = start(model, inputs).repeat(self.texts_per_input)
        parts = []
        for piece in (tokens[:, :1], tokens[:, 1:2], tokens[:, 2:]):
            output, cache = step(model, cache, piece)
            parts.append(output)
        np.testing.assert_allclose(jnp.concatenate([p.logits for p in parts], 1), logits, atol=2e-5)
        np.testing.assert_allclose(jnp.concatenate([p.weights for p in parts], 3), weights, atol=1e-6)

    def loss(self, model):
        """Compute a number that depends on every parameter."""
        return jnp.square(model(*self.arrays(), dropout_key=jax.random.key(2))).mean()

    def test_scan_and_unrolled_forms_have_the_same_gradients(self):
        gradients = [
            jax.jit(jax.grad(self.loss))(self.model_of(compute, **{self.dropout: 0.3}))
            for compute in (ComputeOptions(unroll=1), ComputeOptions(unroll=8, remat="blocks"))
        ]
        expected, result = map(named_leaves, gradients)
        for name, leaf in expected.items():
            np.testing.assert_allclose(result[name], leaf, atol=2e-5, err_msg=name)

    def test_parameters_match_one_rule_and_are_sharded(self):
        model, arrays = self.model_of(**self.changed), self.arrays()
        for name, leaf in named_leaves(model).items():
            assert len(rule_of(name, model).axes) == leaf.ndim, name
        mesh = make_mesh("data=2,fsdp=2,tensor=2")
        with on_mesh(mesh):
            sharded = jax.device_put(model, model_shardings(model, mesh))
            logits = forward(sharded, *(jnp.concatenate([x, x[:1]]) for x in arrays))
        np.testing.assert_allclose(logits[: len(arrays[0])], forward(model, *arrays), atol=2e-5)
