"""The tests of every causal decoder; a model's test file inherits the class."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.cases import others_soak
from tests.models.battery import make
from tests.models.traces import trace_of
from transformer_jax.distributed.sharding import rule_of
from transformer_jax.layers.compute_options import ComputeOptions
from transformer_jax.parameter_names import named_leaves
from transformer_jax.tasks.decoders.language_modeling import NextToken
from transformer_jax.training.checkpoints import Checkpoints
from transformer_jax.training.step import create_state, make_train_step


@functools.partial(jax.jit, static_argnames="return_weights")
def forward(model, tokens, **arguments):
    return model(tokens, **arguments)


@functools.partial(jax.jit, static_argnames=("return_weights", "prompt"))
def step(model, cache, tokens, return_weights=False, prompt=False):
    return model.step_function(return_weights=return_weights)(cache, tokens, prompt=prompt)


@functools.cache
def loss_and_gradient(battery, compute):
    """Compute loss and gradient with dropout; the cache compiles the reference of all options only once."""
    tokens = battery().draw()

    def loss(model):
        return jnp.square(model(tokens, dropout_key=jax.random.key(5))).mean()

    return jax.jit(jax.value_and_grad(loss))(battery().make(compute))


class DecoderBattery:
    """Tests of a causal decoder.

    A subclass sets `module`, `config` (small, with distinct sizes) and `changes`: for each field of the config,
    another value that must change something, or (the value, other fields to set for it).
    """

    module: type
    config = None
    changes: dict = {}  # noqa: RUF012
    # True if the model has attention weights to return.
    attends = True
    # The reference for other options.
    default_compute = ComputeOptions(unroll=8)
    # Training steps after the first 40 of the test that memorizes one batch.
    further_steps = 60

    B, T = 5, 13

    def forward(self, model, tokens, **arguments):
        """Return the logits, and the weights or None."""
        if self.attends:
            return forward(model, tokens, return_weights=True, **arguments)
        return forward(model, tokens, **arguments), None

    def make(self, compute=ComputeOptions(), **changes):
        """Create the model with noise on its initial values, because zeros and ones would hide errors."""
        model = make(self.module, dataclasses.replace(self.config, **changes), compute)
        key = jax.random.key(3)
        leaves, tree = jax.tree.flatten(model)
        noise = [jax.random.normal(jax.random.fold_in(key, n), x.shape) for n, x in enumerate(leaves)]
        return tree.unflatten([x + 0.1 * e for x, e in zip(leaves, noise, strict=True)])

    @pytest.fixture
    def tokens(self):
        return self.draw()

    def draw(self):
        """Draw tokens (B, T)."""
        rng = np.random.default_rng(1)
        return jnp.asarray(rng.integers(0, self.config.vocab_size, (self.B, self.T)), jnp.int32)

    def test_shape_and_dtype(self, tokens):
        logits, weights = self.forward(self.make(), tokens)
        assert logits.shape == (self.B, self.T, self.config.vocab_size)
        assert logits.dtype == jnp.float32
        if weights is not None:
            assert weights.shape == (self.B, self.config.layers, self.config.heads, self.T, self.T)
            assert weights.dtype == jnp.float32
        rough = forward(self.make(dtype="bfloat16"), tokens)
        assert rough.dtype == jnp.float32
        assert np.abs(rough - logits).max() < 0.1 * np.abs(logits).max()

    def test_no_leak_from_the_future(self, tokens):
        model = self.make()
        changed = tokens.at[:, 3:].set((tokens[:, 3:] + 1) % self.config.vocab_size)
        before, after = forward(model, tokens), forward(model, changed)
        np.testing.assert_array_equal(before[:, :3], after[:, :3])
        assert (before[:, 3:] != after[:, 3:]).any()

    def test_packed_rows_equal_single_documents(self, tokens):
        """Pack two documents and padding in one row."""
        packed = jnp.concatenate([tokens[0], tokens[1, :6], jnp.zeros(2, jnp.int32)])[None]
        segments = jnp.array([[1] * self.T + [2] * 6 + [0] * 2])
        logits = forward(self.make(), packed, segments=segments)
        expected = forward(self.make(), tokens)
        np.testing.assert_allclose(logits[0, : self.T], expected[0], atol=2e-5)
        np.testing.assert_allclose(logits[0, self.T : self.T + 6], expected[1, :6], atol=2e-5)

    def test_cached_steps_equal_the_full_pass(self, tokens):
        model = self.make()
        logits, weights = self.forward(model, tokens)
        cache = model.start(self.B, max_length=self.T + 4)
        done = 0
        for piece in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
            output, cache = step(model, cache, piece, return_weights=self.attends)
            size = piece.shape[1]
            np.testing.assert_allclose(output.logits, logits[:, done : done + size], atol=2e-5)
            if self.attends:
                step_weights = output.weights[..., : self.T]
                np.testing.assert_allclose(step_weights, weights[..., done : done + size, :], atol=1e-6)
            done += size

    def test_texts_that_start_at_different_positions(self, tokens):
        """Prompts of unequal length end at the same position."""
        model = self.make().for_decoding()
        first = jnp.arange(self.B)
        shifted = jnp.stack([jnp.roll(row, n) for n, row in enumerate(tokens)])
        cache = model.start(self.B, max_length=self.T, first=first)
        output, cache = step(model, cache, shifted[:, :8])
        rest, _ = step(model, cache, shifted[:, 8:])
        logits = jnp.concatenate([output.logits, rest.logits], axis=1)
        expected = forward(self.make(), tokens)
        for n in range(self.B):
            np.testing.assert_allclose(logits[n, n:], expected[n, : self.T - n], atol=2e-5)
        # The tokens of a prompt attend to each other without the cache.
        cache = model.start(self.B, max_length=self.T, first=first)
        last, cache = step(model, cache, shifted[:, :8], prompt=True)
        rest, _ = step(model, cache, shifted[:, 8:])
        after = jnp.concatenate([last.logits, rest.logits], axis=1)
        np.testing.assert_allclose(after, logits[:, 7:], atol=2e-5)

    def test_decoding_continues_from_a_truncated_cache(self, tokens):
        model = self.make()
        cache = model.start(self.B, max_length=self.T)
        _, cache = step(model, cache, tokens[:, :9])
        output, _ = step(model, cache.truncate(jnp.int32(4)), tokens[:, 4:7])
        np.testing.assert_allclose(output.logits, forward(model, tokens)[:, 4:7], atol=2e-5)

    def test_cache_follows_beams(self, tokens, rng):
        model, beams = self.make(), 3
        cache = model.start(self.B, max_length=self.T + 1)
        _, cache = step(model, cache, tokens[:, :2])
        cache, history = cache.repeat(beams), jnp.repeat(tokens[:, :2], beams, axis=0)
        for length in range(2, 6):
            new = jnp.asarray(rng.integers(0, self.config.vocab_size, (self.B * beams, 1)), jnp.int32)
            output, cache = step(model, cache, new)
            history = jnp.concatenate([history, new], axis=1)
            if length < 5:
                rows = np.arange(self.B)[:, None] * beams + rng.integers(0, beams, (self.B, beams))
                cache, history = cache.reorder(rows.reshape(-1)), history[rows.reshape(-1)]
        np.testing.assert_allclose(output.logits[:, 0], forward(model, history)[:, -1], atol=2e-5)

    def test_weights_sum_to_one_and_look_back(self, tokens):
        _, weights = self.forward(self.make(), tokens)
        if weights is None:
            return
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
        assert (np.asarray(weights)[..., ~np.tri(self.T, dtype=bool)] == 0).all()

    @pytest.mark.long
    @pytest.mark.parametrize(
        "compute",
        others_soak(
            [
                ComputeOptions(unroll=1),
                ComputeOptions(unroll=2, remat="blocks"),
                ComputeOptions(attention="fused"),
                ComputeOptions(attention="chunked", remat="blocks"),
            ],
            ComputeOptions(attention="chunked", remat="blocks"),
        ),
    )
    def test_compute_options_change_no_result(self, compute):
        expected, expected_gradient = loss_and_gradient(type(self), self.default_compute)
        value, gradient = loss_and_gradient(type(self), compute)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)

    def test_dropout_is_on_exactly_with_a_key(self, tokens):
        model = self.make(dropout=0.3)
        quiet = forward(self.make(dropout=0.0), tokens)
        np.testing.assert_array_equal(forward(model, tokens), quiet)
        first, repeated, second = (forward(model, tokens, dropout_key=jax.random.key(k)) for k in (1, 1, 2))
        np.testing.assert_array_equal(first, repeated)
        assert (first != second).any()
        assert (first != quiet).any()

    def trace(self, tokens, **changes):
        """Return the initial values and the forward pass with dropout as text, for the changed config."""

        def init_and_apply(key):
            model = self.module(dataclasses.replace(self.config, **changes), rngs=nnx.Rngs(key))
            return model(tokens, dropout_key=key)

        return trace_of(init_and_apply)

    def test_every_config_field_matters(self, tokens):
        fields = {field.name for field in dataclasses.fields(self.config)}
        assert fields == set(self.changes), "a field without a test"
        unread = []
        for field, value in self.changes.items():
            value, base_changes = value if isinstance(value, tuple) else (value, {})
            if self.trace(tokens, **base_changes) == self.trace(tokens, **base_changes, **{field: value}):
                unread.append(field)
        assert not unread, f"fields that nothing reads: {unread}"

    def test_too_long_is_refused(self, tokens):
        with pytest.raises(ValueError, match="a text of 13 tokens is longer than the model's max_length 6"):
            self.make(max_length=6)(tokens)

    def test_every_parameter_has_a_rule(self):
        for name, leaf in named_leaves(self.make()).items():
            assert len(rule_of(name).axes) == leaf.ndim, name

    def test_padding_of_the_vocabulary_is_unseen(self, tokens):
        """Logits and parameter count do not depend on the padding of the table."""
        wide, narrow = (
            self.make(),
            make(self.module, dataclasses.replace(self.config, vocab_multiple=1), ComputeOptions()),
        )
        plain = make(self.module, self.config, ComputeOptions())
        assert narrow.parameter_count == wide.parameter_count == sum(x.size for x in jax.tree.leaves(narrow))
        np.testing.assert_allclose(forward(plain, tokens), forward(narrow, tokens), atol=1e-6)

    def test_eight_devices_equal_one(self, tokens):
        rows = jnp.concatenate([tokens] * 2)[:8]
        model = self.make()

        def loss(model, tokens):
            return jnp.square(model(tokens)).mean()

        expected, expected_gradient = jax.jit(jax.value_and_grad(loss))(model, rows)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        value, gradient = jax.jit(jax.value_and_grad(loss))(
            jax.device_put(model, replicated), jax.device_put(rows, split)
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)

    def test_one_batch_is_learned_and_a_checkpoint_resumes_bit_for_bit(self, tokens, tmp_path):
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch["weights"] = jnp.ones(batch["targets"].shape)
        optimizer = optax.adam(1e-2)
        train_step = make_train_step(NextToken(), optimizer)

        def fresh():
            return create_state(make(self.module, self.config, ComputeOptions()), optimizer, jax.random.key(0))

        def train(state, steps):
            for _ in range(steps):
                state, metrics = train_step(state, batch)
            return state, float(metrics["loss"])

        # The step donates its state, and the model of `fresh` is cached.
        state, _ = train(jax.tree.map(jnp.copy, fresh()), 40)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(state)
            checkpoints.wait()
            restored, _ = checkpoints.restore(fresh())
        state, loss = train(state, self.further_steps)
        resumed, _ = train(restored, self.further_steps)
        assert loss < 0.3
        for ours, theirs in zip(jax.tree.leaves(state.model), jax.tree.leaves(resumed.model), strict=True):
            np.testing.assert_array_equal(ours, theirs)
