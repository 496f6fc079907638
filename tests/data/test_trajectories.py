"""Episodes from .npz, .jsonl and Minari, their windows, and one-line errors for those that cannot be read."""

import json

import numpy as np
import pytest

from transformer_jax.data.batches.decision_batches import DecisionViews
from transformer_jax.data.corpora.trajectories import Trajectories, open_trajectories
from transformer_jax.data.tokenizers.decision_processor import DecisionProcessor
from transformer_jax.errors import UserError


def episode(length, seed=0, continuous=False):
    rng = np.random.default_rng((seed, length))
    actions = rng.normal(size=(length, 2)) if continuous else rng.integers(0, 3, length)
    return rng.normal(size=(length, 4)).astype(np.float32), actions, rng.normal(size=length).astype(np.float32)


def as_lines(episodes):
    names = ("observations", "actions", "rewards")
    return [{n: np.asarray(x).tolist() for n, x in zip(names, parts, strict=True)} for parts in episodes]


def write_lines(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return str(path)


def check(trajectories, episodes):
    assert len(trajectories) == len(episodes)
    for n, (states, actions, rewards) in enumerate(episodes):
        np.testing.assert_allclose(trajectories.states[n], states, rtol=1e-6)
        np.testing.assert_allclose(trajectories.actions[n], actions, rtol=1e-6)
        np.testing.assert_allclose(trajectories.rewards[n], rewards, rtol=1e-6)


@pytest.mark.parametrize("continuous", [False, True])
def test_files_of_both_forms_are_read(tmp_path, continuous):
    episodes = [episode(length, continuous=continuous) for length in (3, 1, 5)]
    check(open_trajectories(write_lines(tmp_path / "a.jsonl", as_lines(episodes))), episodes)
    states, actions, rewards = (np.concatenate(values) for values in zip(*episodes, strict=True))
    # The second episode ends by a limit of its time, and the last one was not finished.
    terminals, timeouts = np.zeros(9, bool), np.zeros(9, bool)
    terminals[2], timeouts[3] = True, True
    arrays = dict(observations=states, actions=actions, rewards=rewards, terminals=terminals, timeouts=timeouts)
    np.savez(tmp_path / "a.npz", **arrays)
    stored = open_trajectories(str(tmp_path / "a.npz"))
    check(stored, episodes)
    assert (stored.state_width, stored.continuous) == (4, continuous)
    assert stored.action_count == (2 if continuous else 1 + max(x[1].max() for x in episodes))
    np.testing.assert_allclose(stored.returns, [x[2].sum() for x in episodes], rtol=1e-5)


# Minari warns of missing metadata and leaves a temporary folder.
@pytest.mark.filterwarnings("ignore")
def test_a_set_of_minari_is_read(tmp_path, monkeypatch):
    pytest.importorskip("minari", reason="data sets of Minari need the extra decisions")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    import gymnasium
    from minari import DataCollector

    collector = DataCollector(gymnasium.make("CartPole-v1"))
    episodes = []
    for seed in range(3):
        observation, _ = collector.reset(seed=seed)
        states, actions, rewards, ends = [], [], [], False
        while not ends:
            states.append(observation)
            actions.append(seed % 2)
            observation, reward, ends, _, _ = collector.step(seed % 2)
            rewards.append(reward)
        episodes.append((np.array(states), np.array(actions), np.array(rewards)))
    environment = gymnasium.make("CartPole-v1")
    collector.create_dataset(
        "cartpole/test-v0",
        algorithm_name="constant",
        author="-",
        author_email="-",
        code_permalink="-",
        description="-",
        eval_env=environment,
    )
    check(open_trajectories("minari:cartpole/test-v0"), episodes)
    with pytest.raises(UserError, match="minari:nothing/here-v0: the data set cannot be read"):
        open_trajectories("minari:nothing/here-v0")


def test_episodes_that_cannot_be_read(tmp_path):
    (line,) = as_lines([episode(3)])
    for change, message in (
        ({"rewards": [1.0, 2.0]}, "line 1: lists of unequal lengths: 3 observations, 3 actions, 2 rewards"),
        ({"rewards": [1.0, "a", 2.0]}, "rewards"),
        ({"actions": [0, -1, 2]}, "line 1, step 2: action -1 is negative"),
        (
            {"actions": [0, 1, 99_999_999_999]},
            "line 1, step 3: action 99999999999 is above the limit of 999,999",
        ),
        ({"rewards": [1.0, 1e300, 2.0]}, "line 1, step 2: rewards are NaN or infinite"),
        ({"observations": [[1.0], [1.0, 2.0], [1.0]]}, "line 1: observations of different sizes"),
        ({"observations": [["a"], ["b"], ["c"]]}, "line 1: observations must be numbers"),
        ({name: [] for name in line}, "line 1: an episode without steps"),
    ):
        with pytest.raises(UserError, match=message):
            open_trajectories(write_lines(tmp_path / "a.jsonl", [line | change]))
    (tmp_path / "nan.jsonl").write_text(json.dumps(line | {"rewards": [1.0, float("nan"), 2.0]}))
    with pytest.raises(UserError, match=r"nan\.jsonl, line 1"):
        open_trajectories(str(tmp_path / "nan.jsonl"))
    wide = as_lines([(np.zeros((2, 3)), np.zeros(2, int), np.zeros(2))])
    with pytest.raises(UserError, match="states have 3 and 4 values"):
        open_trajectories(write_lines(tmp_path / "a.jsonl", [line, *wide]))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "text.npz").write_text("no archive")
    arrays = dict(observations=np.zeros((3, 2)), actions=np.zeros(3, int), rewards=np.zeros(3))
    np.savez(tmp_path / "ends.npz", **arrays)
    rewards = np.array([0.0, np.nan, 0.0])
    np.savez(tmp_path / "nan.npz", **(arrays | {"rewards": rewards, "terminals": np.array([0, 0, 1])}))
    np.savez(tmp_path / "short.npz", **(arrays | {"terminals": np.zeros(2)}))
    np.savez(tmp_path / "two.npz", **(arrays | {"rewards": np.zeros((3, 2)), "terminals": np.zeros(3)}))
    np.savez(tmp_path / "number.npz", **(arrays | {"terminals": np.zeros(())}))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for name, message in (
        ("empty.jsonl", "no episodes"),
        ("text.npz", "cannot be read"),
        ("none.npz", "cannot be read"),
        ("ends.npz", "no array terminals, only actions, observations, rewards"),
        ("nan.npz", "episode 1, step 2: rewards are NaN or infinite"),
        ("short.npz", "2 terminals, but 3 rewards"),
        ("two.npz", "episode 1: a step has 2 rewards, but needs one number"),
        ("number.npz", "terminals is a single number"),
        ("array.npz", "cannot be read"),
        ("a.txt", r"episodes are a \.npz file, a \.jsonl file, or minari:NAME"),
    ):
        with pytest.raises(UserError, match=message):
            open_trajectories(str(tmp_path / name))


def test_sets_that_do_not_fit_together():
    def of(*parts):
        return Trajectories("other", *([x] for x in parts))

    train = of(*episode(3))
    with pytest.raises(UserError, match="states have 2 values, but those of other have 4"):
        of(np.zeros((2, 2)), np.zeros(2, int), np.zeros(2)).check_like(train)
    with pytest.raises(UserError, match="one has discrete actions, one continuous ones"):
        of(*episode(3, continuous=True)).check_like(train)
    states, _, rewards = episode(3)
    with pytest.raises(UserError, match="episode 1, step 2: action 9 is outside of 0 to 2"):
        of(states, np.array([0, 9, 0]), rewards).check_actions(3)
    located = Trajectories(
        "set", [states] * 2, [np.zeros(3, int), np.full(3, 9)], [rewards] * 2, ["line 1", "line 4"]
    )
    with pytest.raises(UserError, match="set, line 4, step 1: action 9"):
        located.select(np.array([1])).check_actions(3)
    with pytest.raises(UserError, match="actions have 2 values instead of 3"):
        of(*episode(3, continuous=True)).check_actions(3)


def test_windows_hold_the_returns_to_go():
    episodes = [episode(length) for length in (3, 6)]
    trajectories = Trajectories("set", *zip(*episodes, strict=True))
    processor = DecisionProcessor.of(trajectories)
    views = DecisionViews(trajectories, processor, 4, hidden_returns=0.5)
    assert views.windows.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2]]
    window = views.window(3)
    states, actions, rewards = episodes[1]
    scale = processor.settings.return_scale
    np.testing.assert_allclose(window["returns"] * scale, [rewards[n:].sum() for n in range(2, 6)], rtol=1e-5)
    np.testing.assert_array_equal(window["actions"], actions[2:])
    np.testing.assert_array_equal(window["steps"], [2, 3, 4, 5])
    every = np.concatenate([x[0] for x in episodes])
    np.testing.assert_allclose(
        window["states"], (states[2:] - every.mean(0)) / every.std(0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(views.window(0)["is_step"], [1, 1, 1, 0])
    conditioned = [bool(views(None, 0, np.random.default_rng(n))["is_conditioned"]) for n in range(200)]
    assert 60 < sum(conditioned) < 140
    batches = list(DecisionViews(trajectories, processor, 4, step=4).batches(2))
    # Windows of validation cover every step once.
    assert sum((batch["is_step"] * batch["weight"][:, None]).sum() for batch in batches) == 9


def test_the_processor_is_stored():
    processor = DecisionProcessor.of(Trajectories("set", *([x] for x in episode(3))), "key_door")
    assert DecisionProcessor.from_files(processor.files()) == processor
    states, actions, rewards = episode(3)
    other = processor.with_episodes(Trajectories("set", [states], [actions], [rewards + 1]), "cart_pole")
    assert other.settings.environment == "cart_pole"
    assert other.settings.target_return == pytest.approx(rewards.sum() + 3)
    assert other.settings.return_scale == processor.settings.return_scale
