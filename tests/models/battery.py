"""What every encoder-decoder of the zoo must do; a model's test file inherits the class."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformer_jax.layers.dials import Dials


class TranslatorBattery:
    """Inherit, and set `module`, `config` (small, sizes distinct) and `changes`: for each field of the
    config, another value under which something must change."""

    module: type
    config = None
    changes: dict = {}  # noqa: RUF012

    B, S, T = 3, 7, 5

    def make(self, dials=Dials(), **changes):
        return self.module(dataclasses.replace(self.config, **changes), rngs=nnx.Rngs(0), dials=dials)

    @pytest.fixture
    def inputs(self):
        rng = np.random.default_rng(1)
        source = rng.integers(3, self.config.vocab_size, (self.B, self.S)).astype(np.int32)
        target = rng.integers(3, self.config.vocab_size, (self.B, self.T)).astype(np.int32)
        mask = np.arange(self.S) < np.array([self.S, 4, 1])[:, None]
        return jnp.asarray(source), jnp.asarray(target), jnp.asarray(mask)

    def test_shape_and_dtype(self, inputs):
        source, target, mask = inputs
        logits = self.make()(source, target, source_mask=mask)
        assert logits.shape == (self.B, self.T, self.config.vocab_size)
        assert logits.dtype == jnp.float32
        assert self.make(dtype="bfloat16")(source, target, source_mask=mask).dtype == jnp.float32

    def test_low_precision_is_close(self, inputs):
        source, target, mask = inputs
        exact = self.make()(source, target, source_mask=mask)
        rough = self.make(dtype="bfloat16")(source, target, source_mask=mask)
        assert np.abs(exact - rough).max() < 0.1 * np.abs(exact).max()

    def test_no_leak_from_the_future(self, inputs):
        source, target, mask = inputs
        model = self.make()
        changed = target.at[:, 3:].set((target[:, 3:] + 1) % self.config.vocab_size)
        before, after = (model(source, t, source_mask=mask) for t in (target, changed))
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert (before[:, 3:] != after[:, 3:]).any()

    def test_padding_changes_nothing(self, inputs):
        source, target, mask = inputs
        model = self.make()
        other = jnp.where(mask, source, 3 + (source + 5) % 7)
        before, after = (model(s, target, source_mask=mask) for s in (source, other))
        np.testing.assert_array_equal(before, after)
        alone = model(source[1:2, :4], target[1:2])
        np.testing.assert_allclose(before[1:2], alone, atol=2e-5)

    def test_a_source_of_padding_alone_is_finite(self, inputs):
        source, target, _ = inputs

        def total(model):
            return model(source, target, source_mask=jnp.zeros_like(source, bool)).sum()

        value, gradient = jax.value_and_grad(total)(self.make())
        assert np.isfinite(value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))

    def test_cached_steps_equal_the_full_pass(self, inputs):
        source, target, mask = inputs
        model = self.make()
        logits, weights = model(source, target, source_mask=mask, return_weights=True)
        cache = model.start(source, source_mask=mask, max_length=self.T + 4)
        step = model.step_function(return_weights=True)
        parts = []
        for piece in (target[:, :2], target[:, 2:3], target[:, 3:]):
            output, cache = step(cache, piece)
            parts.append(output)
        np.testing.assert_allclose(jnp.concatenate([p.logits for p in parts], 1), logits, atol=2e-5)
        np.testing.assert_allclose(jnp.concatenate([p.weights for p in parts], 3), weights, atol=1e-6)

    def test_cache_follows_a_reordering(self, inputs):
        source, target, mask = inputs
        model, beams = self.make(), 2
        step = model.step_function()
        rows = jnp.arange(self.B * beams) ^ 1  # the two beams of each sentence change places
        both = jnp.stack([target, target[:, ::-1]], axis=1).reshape(self.B * beams, self.T)
        cache = model.start(source, source_mask=mask, max_length=self.T).repeat(beams)
        _, cache = step(cache, both[:, :3])
        output, _ = step(cache.reorder(rows), both[rows][:, 3:])
        expected = model(jnp.repeat(source, beams, 0), both[rows], source_mask=jnp.repeat(mask, beams, 0))
        np.testing.assert_allclose(output.logits, expected[:, 3:], atol=2e-5)

    def test_weights_sum_to_one_over_real_tokens(self, inputs):
        source, target, mask = inputs
        _, weights = self.make()(source, target, source_mask=mask, return_weights=True)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert (np.asarray(weights)[~np.broadcast_to(mask[:, None, None, None], weights.shape)] == 0).all()

    @pytest.mark.parametrize(
        "dials", [Dials(unroll=1), Dials(unroll=2), Dials(remat=True), Dials(attention="fused")]
    )
    def test_dials_change_no_result(self, inputs, dials):
        source, target, mask = inputs
        key = jax.random.key(5)

        def loss(model):
            logits = model(source, target, source_mask=mask, dropout_key=key)
            return jnp.square(logits).mean()

        expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(self.make(Dials(unroll=8)))
        value, gradient = jax.jit(jax.value_and_grad(loss))(self.make(dials))
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)

    def test_dropout_is_on_exactly_with_a_key(self, inputs):
        source, target, mask = inputs
        model = self.make(dropout=0.3)
        quiet = self.make(dropout=0.0)(source, target, source_mask=mask)
        np.testing.assert_array_equal(model(source, target, source_mask=mask), quiet)
        first, again, other = (
            model(source, target, source_mask=mask, dropout_key=jax.random.key(k)) for k in (1, 1, 2)
        )
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        assert (first != quiet).any()

    def test_every_config_field_matters(self, inputs):
        source, target, mask = inputs

        def outcome(**changes):
            model = self.make(**changes)
            try:
                logits = model(source, target, source_mask=mask, dropout_key=jax.random.key(1))
            except ValueError as error:
                return str(error)
            return jax.tree.map(jnp.shape, jax.tree.leaves(model)), logits.tolist()

        fields = {field.name for field in dataclasses.fields(self.config)}
        assert fields == set(self.changes), "a field without a test"
        usual = outcome()
        same = [name for name, value in self.changes.items() if outcome(**{name: value}) == usual]
        assert not same, f"fields that nothing reads: {same}"

    def test_too_long_is_refused(self, inputs):
        source, target, _ = inputs
        with pytest.raises(ValueError, match="longer than the model's max_length 6"):
            self.make(max_length=6)(source, target)

    def test_eight_devices_equal_one(self, inputs):
        source, target, mask = (jnp.concatenate([x] * 8)[:8] for x in inputs)
        model = self.make()

        def loss(model, source, target, mask):
            return jnp.square(model(source, target, source_mask=mask)).mean()

        expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(model, source, target, mask)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sharded = [jax.device_put(x, rows) for x in (source, target, mask)]
        value, gradient = jax.jit(jax.value_and_grad(loss))(jax.device_put(model, whole), *sharded)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
