"""Environments, and the training, resuming, sharding, loading and use of a policy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tasks.resuming import check_devices_and_micro_batches, losses, resumed_results
from transformer_jax import tasks
from transformer_jax.data.corpora.trajectories import open_trajectories
from transformer_jax.errors import UserError
from transformer_jax.parameter_names import named_leaves
from transformer_jax.plotting.decisions import plot_episode, plot_returns
from transformer_jax.tasks.decisions.data import sampled_episodes
from transformer_jax.tasks.decisions.environments import CART_POLE, KEY_DOOR
from transformer_jax.tasks.decisions.environments.key_door import KeyDoorState
from transformer_jax.tasks.decisions.offline_decisions import OfflineDecisions
from transformer_jax.tasks.decisions.rollouts import episodes_of_behavior
from transformer_jax.training import plan
from transformer_jax.training.execution import Execution

SIZES = dict(
    width=16, layers=1, heads=2, feed_forward=16, context=8, batch_size=8, steps=8, evaluate_every=4,
    save_every=2, learning_rate=3e-3, warmup=2, episodes=60, score_episodes=8,
)  # fmt: skip


def config_of(**changes):
    return tasks.configure("offline_decisions", "key_door", **(SIZES | changes))


def train(config, folder, mesh=None):
    return tasks.train(config, folder, execution=Execution(mesh=mesh), note=lambda line: None)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, train(config_of(), folder)


def shortest_way(agent, key, door):
    """Return the number of steps to the key and then to the door, by trying all paths level by level."""
    positions, steps = {(*agent, agent == key)}, 0
    while (*door, True) not in positions:
        following = set()
        for (row, column, has_key), (down, right) in itertools.product(
            positions, ((1, 0), (-1, 0), (0, 1), (0, -1))
        ):
            cell = (min(max(row + down, 0), 4), min(max(column + right, 0), 4))
            following.add((*cell, has_key or cell == key))
        positions, steps = following, steps + 1
    return steps


def test_the_door_opens_only_with_the_key():
    cells = [jnp.array(cell) for cell in ((0, 0), (0, 2), (0, 1))]
    state = KeyDoorState(*cells, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    rewards = []
    # Over the closed door to the key, and back.
    for action in (3, 3, 2):
        state, reward, ends = KEY_DOOR.step(state, jnp.array(action))
        rewards.append(float(reward))
    assert bool(ends)
    np.testing.assert_allclose(rewards, [0, 0, 1 - 0.9 * 3 / 30], atol=1e-6)
    np.testing.assert_allclose(KEY_DOOR.optimal_return(KeyDoorState(*cells, False, 0)), rewards[-1], atol=1e-6)


def test_good_actions_reach_the_optimal_return():
    keys = jax.random.split(jax.random.key(3), 20)
    episodes = episodes_of_behavior(KEY_DOOR, keys, jnp.ones(20))
    np.testing.assert_allclose(episodes.returns, episodes.optimal, atol=1e-6)
    for states, optimal in zip(np.asarray(episodes.states, int), episodes.optimal, strict=True):
        ways = states[0, :6].reshape(3, 2) + np.array([[0], [1], [1]]) * states[0, :2]
        agent, key, door = (tuple(cell) for cell in ways)
        np.testing.assert_allclose(optimal, 1 - 0.9 * shortest_way(agent, key, door) / 30, atol=1e-6)
    assert episodes_of_behavior(CART_POLE, keys, jnp.ones(20)).returns.min() > 190
    random = episodes_of_behavior(CART_POLE, keys, jnp.zeros(20))
    assert 10 < random.returns.mean() < 40
    np.testing.assert_array_equal(random.returns, random.lengths)


def test_the_cart_moves_as_in_gymnasium():
    gymnasium = pytest.importorskip("gymnasium", reason="the reference of the environment: the extra decisions")
    environment = gymnasium.make("CartPole-v1").unwrapped
    environment.reset(seed=0)
    state = CART_POLE.reset(jax.random.key(0)).replace(values=jnp.asarray(environment.state))
    rng, ends = np.random.default_rng(0), False
    while not ends:
        action = int(rng.integers(2))
        observation, _, expected, _, _ = environment.step(action)
        state, reward, ends = CART_POLE.step(state, jnp.array(action))
        np.testing.assert_allclose(CART_POLE.observe(state), observation, rtol=1e-4, atol=1e-5)
        assert (bool(ends), float(reward)) == (expected, 1.0)


def test_sampled_episodes_are_random_and_mixed():
    episodes = sampled_episodes(KEY_DOOR, 400, 0.7)
    assert episodes.returns[::2].mean() < episodes.returns[1::2].mean()
    assert episodes.returns.mean() < 0.4 * 0.8
    assert all(len(rewards) == 30 or rewards[-1] > 0 for rewards in episodes.rewards)


def test_it_is_trained(trained):
    folder, results = trained
    expected = {"return_mean", "baseline_return", "return_at_target", "optimal_return", "data_return"}
    assert expected <= set(results)
    assert len(results["return_at_target"]) == 5
    assert np.isfinite(losses(folder)).all()


@pytest.mark.long
def test_it_is_resumed_bit_for_bit(trained, tmp_path, monkeypatch):
    complete, results = trained
    resumed = resumed_results(
        lambda folder: train(config_of(), folder), OfflineDecisions, complete, tmp_path / "run", monkeypatch
    )
    assert resumed["return_at_target"] == results["return_at_target"]


@pytest.mark.long
def test_eight_devices_and_micro_batches_learn_the_same(trained, tmp_path):
    check_devices_and_micro_batches(train, config_of, trained[0], tmp_path)


def test_it_is_planned():
    for recipe in ("key_door", "cart_pole", "recorded"):
        config = tasks.configure("offline_decisions", recipe)
        lines = dict(plan.describe(tasks.TASKS["offline_decisions"], config, "data=2,tensor=2"))
        assert lines["work"].endswith("in total")


def test_actions_and_episodes_agree(trained, tmp_path):
    """`act` on the history of an episode that was played without chance returns its actions."""
    policy = tasks.load(trained[0])
    episodes = policy.play(3, target=0.7, temperature=0.0, seed=4)
    length = int(episodes.lengths[1])
    for step in {0, length // 2, length - 1}:
        history = episodes.states[1][: step + 1], episodes.actions[1][:step], episodes.rewards[1][:step]
        assert policy.act(*history, target=0.7) == episodes.actions[1][step]
    weights = policy.attention(episodes, 1, target=0.7)
    count = min(length, 8)
    assert weights.shape == (1, 2, count, count)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
    assert np.triu(weights, 1).max() == 0
    plot_episode(
        episodes, weights, "key_door", number=1, action_names=KEY_DOOR.action_names, path=tmp_path / "a.png"
    )
    plot_returns({0.1: 0.2, 0.9: 0.8}, baseline=0.3, optimal=0.85, path=tmp_path / "b.png")
    assert min((tmp_path / name).stat().st_size for name in ("a.png", "b.png")) > 10_000


def test_histories_that_do_not_fit(trained):
    policy = tasks.load(trained[0])
    for history, message in (
        (([[0.0] * 7] * 2, [1]), "2 observations need 1 actions and rewards before them, got 1 and 0"),
        (([],), "0 observations need 0"),
        (([[0.0] * 5],), "an observation has 5 values, but the model takes 7"),
        (([[0.0] * 7] * 2, [7], [0.0]), "actions must be 0 to 3"),
        (([[0.0] * 7] * 31, [0] * 30, [0.0] * 30), "step 31 is beyond `max_steps` 30"),
    ):
        with pytest.raises(UserError, match=message):
            policy.act(*history)


def test_continuous_actions_and_no_environment(tmp_path):
    """Recorded actions, which are a function of the state, are learned without an environment."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(400, 3)).astype(np.float32)
    terminals = np.arange(400) % 10 == 9
    np.savez(
        tmp_path / "a.npz",
        observations=states,
        actions=states[:, :2],
        rewards=states[:, 0],
        terminals=terminals,
    )
    assert len(open_trajectories(str(tmp_path / "a.npz"))) == 40
    config = tasks.configure(
        "offline_decisions",
        "recorded",
        **(SIZES | dict(data=str(tmp_path / "a.npz"), episodes=4_000, steps=60, evaluate_every=30)),
    )
    results = train(config, tmp_path / "run")
    assert "return_mean" not in results
    assert losses(tmp_path / "run")[-1] < 0.8 * losses(tmp_path / "run")[0]
    policy = tasks.load(tmp_path / "run")
    assert policy.act(states[:1]).shape == (2,)
    with pytest.raises(UserError, match="names no `environment` to play in"):
        policy.play()
    fine = tasks.configure(
        "offline_decisions", "fine_tune", start=(str(tmp_path / "run"),), environment="key_door"
    )
    with pytest.raises(UserError, match="do not fit the model"):
        train(fine, tmp_path / "other")


def test_a_policy_is_fine_tuned(trained, tmp_path):
    folder, _ = trained
    changes = SIZES | dict(steps=1, evaluate_every=1, save_every=1, warmup=0, learning_rate=0.0)
    changes = {
        n: v for n, v in changes.items() if n not in ("width", "layers", "heads", "feed_forward", "context")
    }
    config = tasks.configure(
        "offline_decisions", "fine_tune", start=(str(folder),), environment="key_door", **changes
    )
    train(config, tmp_path / "run")
    expected = named_leaves(tasks.load(folder).model)
    for name, leaf in named_leaves(tasks.load(tmp_path / "run").model).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("share", "absent"), [(1.0, {"return_mean", "return_at_target"}), (0.0, {"baseline_return"})]
)
def test_inputs_that_were_not_trained_are_not_scored(share, absent, tmp_path):
    results = train(config_of(hidden_returns=share, steps=1, targets=(0.5, 0.5)), tmp_path / "run")
    every = {"return_mean", "return_at_target", "baseline_return"}
    assert every - results.keys() == absent
    assert results["optimal_return"] > 0


def test_values_that_cannot_be():
    for changes, message in (
        (dict(valid="a.npz"), "`valid` and `test` need `data`"),
        (dict(environment="maze"), "unknown environment 'maze': choose one of key_door, cart_pole"),
        (dict(held_out=0.0), "`held_out` 0.0 must be above 0"),
        (dict(hidden_returns=1.5), "`hidden_returns` 1.5 must be at most 1"),
        (dict(temperature=-1.0), "`temperature` -1.0 is below 0"),
        (dict(targets=(float("nan"),)), "`targets` nan must be finite"),
        (dict(data="a.npz", episodes=7), "`episodes` and `max_skill` are for sampled episodes"),
        (dict(data="a.npz", episodes=4_000, environment="", targets=(1.0,)), "`targets` need an `environment`"),
    ):
        with pytest.raises(UserError, match=message):
            config_of(**changes)
