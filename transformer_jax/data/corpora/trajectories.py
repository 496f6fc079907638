"""Recorded episodes: what an agent saw, did and was rewarded with, step by step."""

from __future__ import annotations

import dataclasses
import itertools
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from transformer_jax.data.corpora.tables import fingerprint
from transformer_jax.data.corpora.text_files import base_suffix, read_lines
from transformer_jax.errors import UserError
from transformer_jax.json_files import parse_json

_ARRAYS = ("observations", "actions", "rewards")
# Largest number of discrete actions, each of which has a row in a table.
_MAX_ACTIONS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Episodes of at least one step.

    Attributes:
      path: Path or name of the set, for messages.
      states: The states of each episode, (n, state_width) float32.
      actions: The actions, (n,) int32, or (n, A) float32 if they are continuous.
      rewards: The rewards, (n,) float32.
      names: Where each episode is in the file, such as "line 3", for messages; () numbers them.
    """

    path: str
    states: Sequence[np.ndarray]
    actions: Sequence[np.ndarray]
    rewards: Sequence[np.ndarray]
    names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def lengths(self) -> np.ndarray:
        """Number of steps of each episode, (N,)."""
        return np.array([len(rewards) for rewards in self.rewards])

    @property
    def returns(self) -> np.ndarray:
        """Sum of the rewards of each episode, (N,) float64."""
        return np.array([rewards.sum(dtype=np.float64) for rewards in self.rewards])

    @property
    def state_width(self) -> int:
        """Number of values of a state."""
        return self.states[0].shape[1]

    @property
    def continuous(self) -> bool:
        """True if actions are vectors of numbers."""
        return self.actions[0].ndim == 2

    @property
    def action_count(self) -> int:
        """Number of different actions, or of values of a continuous action."""
        if self.continuous:
            return self.actions[0].shape[1]
        return 1 + max(int(actions.max()) for actions in self.actions)

    def select(self, numbers: np.ndarray) -> Trajectories:
        """Return these episodes, in this order."""
        states, actions, rewards = (
            [values[n] for n in numbers] for values in (self.states, self.actions, self.rewards)
        )
        return Trajectories(self.path, states, actions, rewards, [self.name(n) for n in numbers])

    def name(self, number: int) -> str:
        """Return where an episode is in the file, for messages."""
        return self.names[number] if self.names else f"episode {number + 1}"

    def fingerprint(self) -> str:
        """Return a digest of all episodes."""
        arrays = (self.states, self.actions, self.rewards)
        return fingerprint([np.concatenate(values).tobytes().hex() for values in arrays])

    def check_like(self, other: Trajectories) -> None:
        """Check that states and actions have the form of those of another set.

        Raises:
          UserError: States have another width, or actions are of another kind.
        """
        if self.state_width != other.state_width:
            raise UserError(
                f"{self.path}: states have {self.state_width} values, but those of {other.path} have "
                f"{other.state_width}"
            )
        if self.continuous != other.continuous:
            raise UserError(f"{self.path} and {other.path}: one has discrete actions, one continuous ones")

    def check_actions(self, count: int) -> None:
        """Check that every action is one of `count`, or has so many values.

        Raises:
          UserError: One is not.
        """
        if self.continuous:
            if self.action_count != count:
                raise UserError(f"{self.path}: actions have {self.action_count} values instead of {count}")
            return
        for number, actions in enumerate(self.actions):
            if (outside := np.flatnonzero(actions >= count)).size:
                raise UserError(
                    f"{self.path}, {self.name(number)}, step {outside[0] + 1}: action {actions[outside[0]]} "
                    f"is outside of 0 to {count - 1}; `actions` sets another number"
                )


def open_trajectories(source: str) -> Trajectories:
    """Read recorded episodes.

    Args:
      source: A .npz file with the arrays `observations`, `actions`, `rewards` and `terminals`, and maybe
        `timeouts` (the form of D4RL: episodes one after another), a .jsonl file with an episode per line, an
        object of the lists `observations`, `actions` and `rewards`, or minari:NAME, a data set of Minari.

    Raises:
      UserError: The source is none of these or cannot be read; an episode has no steps or lists of unequal
        lengths; a value is not finite in float32; or an action is negative or above a million.
    """
    if source.startswith("minari:"):
        episodes = _minari(source)
    elif source.endswith(".npz"):
        episodes = _npz(source)
    elif base_suffix(source) == ".jsonl":
        episodes = _json_lines(source)
    else:
        raise UserError(f"{source}: episodes are a .npz file, a .jsonl file, or minari:NAME")
    if not episodes:
        raise UserError(f"{source}: no episodes")
    checked = [_checked(episode, f"{source}, {name}") for name, episode in episodes]
    names = [name for name, _ in episodes]
    states, actions, rewards = zip(*checked, strict=True)
    trajectories = Trajectories(source, states, actions, rewards, names)
    widths = {states.shape[1] for states in trajectories.states}
    if len(widths) > 1:
        raise UserError(f"{source}: states have {' and '.join(map(str, sorted(widths)))} values")
    shapes = {actions.shape[1:] for actions in trajectories.actions}
    if len(shapes) > 1:
        raise UserError(f"{source}: actions have different forms")
    return trajectories


class _Line(msgspec.Struct):
    """A line of a .jsonl file."""

    observations: list[Any]
    actions: list[Any]
    rewards: list[float]


# Where an episode is in the file, and its observations, actions and rewards.
_Episode = tuple[str, tuple[Any, Any, Any]]


def _json_lines(path: str) -> list[_Episode]:
    episodes = []
    for number, text in enumerate(read_lines(path), 1):
        if text.strip():
            line = parse_json(text, _Line, f"{path}, line {number}")
            episodes.append((f"line {number}", (line.observations, line.actions, line.rewards)))
    return episodes


def _npz(path: str) -> list[_Episode]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for name in (*_ARRAYS, "terminals"):
        if name not in arrays:
            raise UserError(f"{path}: no array {name}, only {', '.join(sorted(arrays)) or 'none'}")
        if not arrays[name].ndim:
            raise UserError(f"{path}: {name} is a single number, not an array of steps")
    steps = len(arrays["rewards"])
    for name in ("observations", "actions", "terminals", "timeouts"):
        if name in arrays and len(arrays[name]) != steps:
            raise UserError(f"{path}: {len(arrays[name]):,} {name}, but {steps:,} rewards")
    ends = arrays["terminals"].astype(bool).reshape(-1)
    if "timeouts" in arrays:
        ends = ends | arrays["timeouts"].astype(bool).reshape(-1)
    last = np.flatnonzero(ends) + 1
    # What follows the last end is an episode that was not finished.
    limits = [0, *last.tolist(), *([steps] if steps and (not len(last) or last[-1] < steps) else [])]
    return [
        (f"episode {number + 1}", tuple(arrays[name][first:end] for name in _ARRAYS))
        for number, (first, end) in enumerate(itertools.pairwise(limits))
    ]


def _minari(source: str) -> list[_Episode]:
    try:
        import minari
    except ImportError:
        raise UserError(f"{source} needs minari: pip install transformer_jax[decisions]") from None
    name = source.removeprefix("minari:")
    try:
        episodes = list(minari.load_dataset(name).iterate_episodes())
    except (ValueError, OSError, KeyError) as error:
        raise UserError(f"{source}: the data set cannot be read ({error})") from None
    if any(isinstance(episode.observations, Mapping | tuple) for episode in episodes):
        raise UserError(f"{source}: observations have several parts; only sets with one array are read")
    # The last observation is what the agent saw after its last action.
    return [
        (
            f"episode {n + 1}",
            (episode.observations[: len(episode.rewards)], episode.actions, episode.rewards),
        )
        for n, episode in enumerate(episodes)
    ]


def _checked(episode: tuple[Any, Any, Any], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the (states, actions, rewards) of an episode as arrays.

    Raises:
      UserError: See `open_trajectories`.
    """
    lengths = dict(zip(_ARRAYS, map(len, episode), strict=True))
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{count} {array_name}" for array_name, count in lengths.items())
        raise UserError(f"{name}: lists of unequal lengths: {listed}")
    if not lengths["rewards"]:
        raise UserError(f"{name}: an episode without steps")
    arrays = []
    for array_name, values in zip(_ARRAYS, episode, strict=True):
        try:
            array = np.asarray(values)
        except ValueError:
            raise UserError(f"{name}: {array_name} of different sizes") from None
        if array.dtype.kind not in "fiub":
            raise UserError(f"{name}: {array_name} must be numbers")
        # A large float64 is infinite in float32.
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(array.astype(np.float32)).reshape(len(array), -1).all(axis=1)
        if not is_finite.all():
            step = np.flatnonzero(~is_finite)[0] + 1
            raise UserError(f"{name}, step {step}: {array_name} are NaN or infinite")
        arrays.append(array)
    states, actions, rewards = arrays
    if rewards.size != len(rewards):
        raise UserError(f"{name}: a step has {rewards.size // len(rewards)} rewards, but needs one number")
    states = states.reshape(len(states), -1).astype(np.float32)
    if actions.size == len(actions) and actions.dtype.kind != "f":
        actions = actions.reshape(-1)
        outside = (actions < 0) | (actions >= _MAX_ACTIONS)
        if outside.any():
            step = np.flatnonzero(outside)[0]
            fault = "negative" if actions[step] < 0 else f"above the limit of {_MAX_ACTIONS - 1:,}"
            raise UserError(f"{name}, step {step + 1}: action {actions[step]} is {fault}")
        actions = actions.astype(np.int32)
    else:
        actions = actions.reshape(len(actions), -1).astype(np.float32)
    return states, actions, rewards.reshape(-1).astype(np.float32)
