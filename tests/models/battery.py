"""The tests of every encoder-decoder; a model's test file inherits the class."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.models.traces import trace_of, unread_fields
from transformer_jax.distributed.sharding import rule_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import named_leaves


@functools.cache
def make(module, config, compute):
    """Create a model once for all tests that use it."""
    return jax.jit(lambda: module(config, rngs=nnx.Rngs(0), compute=compute))()


# As users call a model: jitted, and compiled once for all tests with these shapes.
@functools.partial(jax.jit, static_argnames="return_weights")
def forward(model, source, target, **arguments):
    return model(source, target, **arguments)


@functools.partial(jax.jit, static_argnames="max_length")
def start(model, source, **arguments):
    return model.start(source, **arguments)


@functools.partial(jax.jit, static_argnames="return_weights")
def step(model, cache, tokens, return_weights=False):
    return model.step_function(return_weights=return_weights)(cache, tokens)


@functools.cache
def loss_and_gradient(battery, compute):
    """Compute loss and gradient with dropout; the cache compiles the reference of all options only once."""
    source, target, mask = battery().draw()

    def loss(model):
        logits = model(source, target, source_mask=mask, dropout_key=jax.random.key(5))
        return jnp.square(logits).mean()

    return jax.jit(jax.value_and_grad(loss))(battery().make(compute))


class TranslatorBattery:
    """Tests of an encoder-decoder.

    A subclass sets `module`, `config` (small, with distinct sizes) and `changes`: for each field of the config,
    another value that must change something.
    """

    module: type
    config = None
    changes: dict = {}  # noqa: RUF012
    # True if the model has attention weights to return.
    attends = True
    # The reference for other options.
    default_compute = ComputeOptions(unroll=8)

    # Smaller sizes would compile twice as long, because XLA's CPU backend unrolls tiny matrix products.
    B, S, T = 7, 13, 11
    source_lengths = (13, 4, 1, 9, 13, 2, 6)

    def forward(self, model, source, target, **arguments):
        """Return the logits, and the weights or None."""
        if self.attends:
            return forward(model, source, target, return_weights=True, **arguments)
        return forward(model, source, target, **arguments), None

    def make(self, compute=ComputeOptions(), **changes):
        return make(self.module, dataclasses.replace(self.config, **changes), compute)

    @pytest.fixture
    def inputs(self):
        return self.draw()

    def draw(self):
        """Draw source (B, S), target (B, T) and the source's mask."""
        rng = np.random.default_rng(1)
        source = rng.integers(3, self.config.vocab_size, (self.B, self.S)).astype(np.int32)
        target = rng.integers(3, self.config.vocab_size, (self.B, self.T)).astype(np.int32)
        mask = np.arange(self.S) < np.array(self.source_lengths)[:, None]
        return jnp.asarray(source), jnp.asarray(target), jnp.asarray(mask)

    def test_shape_and_dtype(self, inputs):
        source, target, mask = inputs
        logits = forward(self.make(), source, target, source_mask=mask)
        assert logits.shape == (self.B, self.T, self.config.vocab_size)
        assert logits.dtype == jnp.float32
        assert forward(self.make(dtype="bfloat16"), source, target, source_mask=mask).dtype == jnp.float32

    def test_low_precision_is_close(self, inputs):
        source, target, mask = inputs
        exact = forward(self.make(), source, target, source_mask=mask)
        rough = forward(self.make(dtype="bfloat16"), source, target, source_mask=mask)
        assert np.abs(exact - rough).max() < 0.1 * np.abs(exact).max()

    def test_no_leak_from_the_future(self, inputs):
        source, target, mask = inputs
        model = self.make()
        changed = target.at[:, 3:].set((target[:, 3:] + 1) % self.config.vocab_size)
        before, after = (forward(model, source, t, source_mask=mask) for t in (target, changed))
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert (before[:, 3:] != after[:, 3:]).any()

    def test_padding_changes_nothing(self, inputs):
        source, target, mask = inputs
        model = self.make()
        changed = jnp.where(mask, source, 3 + (source + 5) % 7)
        before, after = (forward(model, s, target, source_mask=mask) for s in (source, changed))
        np.testing.assert_array_equal(before, after)
        unpadded = forward(model, source[1:2, :4], target[1:2])
        np.testing.assert_allclose(before[1:2], unpadded, atol=2e-5)

    def test_packed_rows_equal_single_sentences(self, inputs):
        """Pack sentences 0 and 1 in a row, and sentence 2 with padding in another."""
        source, target, mask = inputs
        sizes, lengths = self.source_lengths, (11, 3, 2)
        packed_source = jnp.zeros((2, 19), jnp.int32).at[0, :13].set(source[0]).at[0, 13:17].set(source[1, :4])
        packed_source = packed_source.at[1, :1].set(source[2, :1])
        packed_target = jnp.zeros((2, 17), jnp.int32).at[0, :11].set(target[0]).at[0, 11:14].set(target[1, :3])
        packed_target = packed_target.at[1, :2].set(target[2, :2])
        logits, weights = self.forward(
            self.make(),
            packed_source,
            packed_target,
            source_segments=jnp.array([[1] * 13 + [2] * 4 + [0] * 2, [1] + [0] * 18]),
            target_segments=jnp.array([[1] * 11 + [2] * 3 + [0] * 3, [1] * 2 + [0] * 15]),
        )
        expected, expected_weights = self.forward(self.make(), source, target, source_mask=mask)
        for sentence, row, s, t in ((0, 0, 0, 0), (1, 0, 13, 11), (2, 1, 0, 0)):
            T, S = lengths[sentence], sizes[sentence]
            np.testing.assert_allclose(logits[row, t : t + T], expected[sentence, :T], atol=2e-5)
            if weights is not None:
                sentence_weights = weights[row, :, :, t : t + T, s : s + S]
                np.testing.assert_allclose(
                    sentence_weights, expected_weights[sentence, :, :, :T, :S], atol=1e-5
                )

    def test_segments_need_both_sides_and_no_mask(self, inputs):
        source, target, mask = inputs
        with pytest.raises(ValueError, match="source_segments and target_segments, or neither"):
            self.make()(source, target, source_segments=mask)
        with pytest.raises(ValueError, match="segments mark padding already"):
            self.make()(source, target, source_mask=mask, source_segments=mask, target_segments=target)

    def test_a_source_of_padding_alone_is_finite(self, inputs):
        source, target, _ = inputs

        def total(model):
            return model(source, target, source_mask=jnp.zeros_like(source, bool)).sum()

        value, gradient = jax.jit(jax.value_and_grad(total))(self.make())
        assert np.isfinite(value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))

    def test_cached_steps_equal_the_full_pass(self, inputs):
        source, target, mask = inputs
        model = self.make()
        logits, weights = self.forward(model, source, target, source_mask=mask)
        cache = start(model, source, source_mask=mask, max_length=self.T + 4)
        parts = []
        for piece in (target[:, :2], target[:, 2:3], target[:, 3:]):
            output, cache = step(model, cache, piece, return_weights=self.attends)
            parts.append(output)
        np.testing.assert_allclose(jnp.concatenate([p.logits for p in parts], 1), logits, atol=2e-5)
        if self.attends:
            np.testing.assert_allclose(jnp.concatenate([p.weights for p in parts], 3), weights, atol=1e-6)

    def test_cache_follows_a_reordering(self, inputs):
        source, target, mask = inputs
        model, beams = self.make(), 2
        rows = jnp.arange(self.B * beams) ^ 1  # the two beams of each sentence change places
        both = jnp.stack([target, target[:, ::-1]], axis=1).reshape(self.B * beams, self.T)
        cache = start(model, source, source_mask=mask, max_length=self.T).repeat(beams)
        _, cache = step(model, cache, both[:, :3])
        output, _ = step(model, cache.reorder(rows), both[rows][:, 3:])
        sources, masks = jnp.repeat(source, beams, 0), jnp.repeat(mask, beams, 0)
        expected = forward(model, sources, both[rows], source_mask=masks)
        np.testing.assert_allclose(output.logits, expected[:, 3:], atol=2e-5)

    def test_cache_follows_beams(self, inputs, rng):
        """After a shared prefix, each step keeps random parents: some beams double, some are dropped."""
        source, target, mask = inputs
        model, beams = self.make(), 6
        cache = start(model, source, source_mask=mask, max_length=self.T + 1)
        _, cache = step(model, cache, target[:, :2])
        # Repeating twice gives six beams.
        cache, history = cache.repeat(2).repeat(3), jnp.repeat(target[:, :2], beams, axis=0)
        for length in range(2, self.T):
            tokens = jnp.asarray(rng.integers(3, self.config.vocab_size, (self.B * beams, 1)), jnp.int32)
            output, cache = step(model, cache, tokens)
            history = jnp.concatenate([history, tokens], axis=1)
            if length < self.T - 1:
                rows = np.arange(self.B)[:, None] * beams + rng.integers(0, beams, (self.B, beams))
                cache, history = cache.reorder(rows.reshape(-1)), history[rows.reshape(-1)]
        sources, masks = jnp.repeat(source, beams, 0), jnp.repeat(mask, beams, 0)
        expected = forward(model, sources, history, source_mask=masks)
        np.testing.assert_allclose(output.logits[:, 0], expected[:, -1], atol=2e-5)

    def test_weights_sum_to_one_over_real_tokens(self, inputs):
        source, target, mask = inputs
        _, weights = self.forward(self.make(), source, target, source_mask=mask)
        if weights is None:
            return
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert (np.asarray(weights)[~np.broadcast_to(mask[:, None, None, None], weights.shape)] == 0).all()

    @pytest.mark.long
    @pytest.mark.parametrize(
        "compute",
        others_soak(
            [
                ComputeOptions(unroll=1),
                ComputeOptions(unroll=2),
                ComputeOptions(remat="blocks"),
                ComputeOptions(attention="fused"),
                ComputeOptions(attention="chunked"),
            ],
            ComputeOptions(attention="chunked"),
        ),
    )
    def test_compute_options_change_no_result(self, compute):
        expected, expected_gradient = loss_and_gradient(type(self), self.default_compute)
        value, gradient = loss_and_gradient(type(self), compute)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)

    def test_dropout_is_on_exactly_with_a_key(self, inputs):
        source, target, mask = inputs
        model = self.make(dropout=0.3)
        quiet = forward(self.make(dropout=0.0), source, target, source_mask=mask)
        np.testing.assert_array_equal(forward(model, source, target, source_mask=mask), quiet)
        first, repeated, second = (
            forward(model, source, target, source_mask=mask, dropout_key=jax.random.key(k)) for k in (1, 1, 2)
        )
        np.testing.assert_array_equal(first, repeated)
        assert (first != second).any()
        assert (first != quiet).any()

    def test_every_config_field_matters(self, inputs):
        source, target, mask = inputs

        def outcome(**changes):
            """Return the initial values and the forward pass with dropout as text."""

            def init_and_apply(key):
                model = self.module(dataclasses.replace(self.config, **changes), rngs=nnx.Rngs(key))
                return model(source, target, source_mask=mask, dropout_key=key)

            return trace_of(init_and_apply)

        fields = {field.name for field in dataclasses.fields(self.config)}
        assert fields == set(self.changes), "a field without a test"
        assert unread_fields(outcome, self.changes) == []

    def test_too_long_is_refused(self, inputs):
        source, target, _ = inputs
        for empty in ((source[:, :0], target), (source, target[:, :0])):
            with pytest.raises(ValueError, match="of no tokens: even an empty sentence has its end token"):
                self.make()(*empty)
        with pytest.raises(ValueError, match="longer than the model's max_length 6"):
            self.make(max_length=6)(source, target)

    def test_every_parameter_has_a_rule(self):
        for name, leaf in named_leaves(self.make()).items():
            assert len(rule_of(name).axes) == leaf.ndim, name

    def test_eight_devices_equal_one(self, inputs):
        source, target, mask = (jnp.concatenate([x] * 8)[:8] for x in inputs)
        model = self.make()

        def loss(model, source, target, mask):
            return jnp.square(model(source, target, source_mask=mask)).mean()

        expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(model, source, target, mask)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sharded = [jax.device_put(x, rows) for x in (source, target, mask)]
        value, gradient = jax.jit(jax.value_and_grad(loss))(jax.device_put(model, replicated), *sharded)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
