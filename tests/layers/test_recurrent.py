import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.oracles import recurrent as oracle
from transformer_jax.layers.recurrent import (
    CELLS,
    RecurrentStack,
    hidden_of,
    make_cell,
    run_cell,
    zero_state,
)

B, T, D, H = 5, 11, 7, 13
LENGTHS = np.array([11, 4, 1, 7, 2])


def random(module, seed=0):
    """Return the module with random values, since initial zeros and ones could hide an error."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.4, size=x.shape), jnp.float32), module)


@pytest.fixture(params=CELLS)
def kind(request):
    return request.param


@pytest.fixture
def cell(kind):
    return random(make_cell(kind, D, H, dtype="float32", rngs=nnx.Rngs(0)))


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_cell_over_time_is_the_formula(kind, cell, x, reverse):
    states, last = run_cell(cell, x, zero_state(cell, B), reverse=reverse)
    for b in range(B):
        expected = oracle.run(kind, cell, np.asarray(x[b], np.float64), reverse=reverse)
        np.testing.assert_allclose(hidden_of(states)[b], expected, atol=1e-5)
        np.testing.assert_allclose(hidden_of(last)[b], expected[0 if reverse else -1], atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_flax_steps_its_own_cell_to_the_same(cell, x, reverse):
    state = zero_state(cell, B)
    states, _ = run_cell(cell, x, state, reverse=reverse)
    for t in reversed(range(T)) if reverse else range(T):
        state, output = cell(state, x[:, t])
        np.testing.assert_allclose(hidden_of(states)[:, t], output, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_padding_is_skipped(kind, cell, x, reverse):
    """The reverse pass starts at each sentence's true end."""
    valid = jnp.arange(T) < LENGTHS[:, None]
    states, last = run_cell(cell, x, zero_state(cell, B), valid=valid, reverse=reverse)
    for b, length in enumerate(LENGTHS):
        expected = oracle.run(kind, cell, np.asarray(x[b, :length], np.float64), reverse=reverse)
        np.testing.assert_allclose(hidden_of(states)[b, :length], expected, atol=1e-5)
        np.testing.assert_allclose(hidden_of(last)[b], expected[0 if reverse else -1], atol=1e-5)


def test_the_state_restarts_for_each_sentence_of_a_packed_row(kind, cell, x):
    """Three sentences of 4, 2 and 5 steps in one row, forwards and backwards."""
    begins = jnp.zeros((B, T), bool).at[:, jnp.array([0, 4, 6])].set(True)
    ends = jnp.zeros((B, T), bool).at[:, jnp.array([3, 5, 10])].set(True)
    for restart, reverse in ((begins, False), (ends, True)):
        states, _ = run_cell(cell, x, zero_state(cell, B), restart=restart, reverse=reverse)
        parts = [
            oracle.run(kind, cell, np.asarray(part, np.float64), reverse=reverse)
            for part in np.split(np.asarray(x[1]), [4, 6])
        ]
        np.testing.assert_allclose(hidden_of(states)[1], np.concatenate(parts), atol=1e-5)


def test_a_restart_takes_the_state_that_it_is_given(cell, x):
    start = jax.tree.map(lambda s: s + 0.5, zero_state(cell, B))
    fresh = jax.tree.map(lambda s: jnp.repeat(s[:, None], T, axis=1), start)
    restart = jnp.zeros((B, T), bool).at[:, 3].set(True)
    states, _ = run_cell(cell, x, zero_state(cell, B), restart=restart, fresh=fresh)
    expected, _ = run_cell(cell, x[:, 3:], start)
    np.testing.assert_allclose(hidden_of(states)[:, 3:], hidden_of(expected), atol=1e-6)


def test_gradients_of_one_step_are_finite(cell, x):
    def total(cell, x):
        states, _ = run_cell(cell, x, zero_state(cell, B), valid=jnp.zeros((B, 1), bool).at[0].set(True))
        return jnp.square(hidden_of(states)).sum()

    gradients = jax.grad(total, argnums=(0, 1))(cell, x[:, :1])
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    assert (np.asarray(gradients[1])[1:] == 0).all(), "padding has no gradient"


def test_unrolling_changes_no_result(cell, x):
    states, _ = run_cell(cell, x, zero_state(cell, B))
    unrolled, _ = run_cell(cell, x, zero_state(cell, B), unroll=4)
    np.testing.assert_allclose(hidden_of(states), hidden_of(unrolled), atol=1e-6)


def test_dropout_is_between_layers_only(x):
    """Dropout changes a stack of two layers, but not a stack of one."""
    for layers, same in ((1, True), (2, False)):
        stack = random(RecurrentStack("gru", D, H, layers, dropout=0.5, dtype="float32", rngs=nnx.Rngs(0)))
        expected, _, _ = stack(x, stack.zero_states(B))
        dropped, _, _ = stack(x, stack.zero_states(B), dropout_key=jax.random.key(0))
        assert (expected == dropped).all() == same


def test_forget_gates_start_open():
    cell = make_cell("lstm", D, H, dtype="float32", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(np.split(np.asarray(cell.dense_h.bias[...]), 4)[1], np.ones(H))
    assert np.asarray(cell.dense_h.bias[...]).sum() == H


def test_an_unknown_cell():
    with pytest.raises(ValueError, match="cell 'rnn' is not one of lstm, gru"):
        make_cell("rnn", D, H, dtype="float32", rngs=nnx.Rngs(0))


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 3])
def test_stacks_equal_torch(kind, x, layers):
    """torch.nn.LSTM and GRU with copied weights, over packed sequences of unequal length."""
    torch = pytest.importorskip("torch", reason="parity needs torch, which is no dependency")
    stack = random(RecurrentStack(kind, D, H, layers, dropout=0.0, dtype="float32", rngs=nnx.Rngs(0)))
    theirs = dict(lstm=torch.nn.LSTM, gru=torch.nn.GRU)[kind](D, H, layers, batch_first=True)
    for n, cell in enumerate(stack.cells):
        W, U, b, hidden_bias = (
            None if p is None else torch.tensor(p, dtype=torch.float32) for p in oracle.cell_parameters(cell)
        )
        getattr(theirs, f"weight_ih_l{n}").data = W.T.contiguous()
        getattr(theirs, f"weight_hh_l{n}").data = U.T.contiguous()
        getattr(theirs, f"bias_ih_l{n}").data = torch.zeros_like(hidden_bias) if b is None else b
        getattr(theirs, f"bias_hh_l{n}").data = hidden_bias
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.tensor(np.asarray(x)), LENGTHS, batch_first=True, enforce_sorted=False
    )
    expected, last = theirs(packed)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(expected, batch_first=True)
    valid = jnp.arange(T) < LENGTHS[:, None]
    outputs, _, states = stack(x, stack.zero_states(B), valid=valid)
    np.testing.assert_allclose(outputs * valid[..., None], expected.detach(), atol=1e-5)
    hidden = last[0] if kind == "lstm" else last
    for ours, their in zip(states, hidden, strict=True):
        np.testing.assert_allclose(hidden_of(ours), their.detach(), atol=1e-5)
