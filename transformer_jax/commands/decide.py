"""Train a policy on recorded episodes, score it, and play episodes with it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transformer_jax.commands.parsing import Parsed, flag_value, parse_run
from transformer_jax.commands.terminal import one_line
from transformer_jax.commands.train import PlanFlags, planned, run_dir_of, train
from transformer_jax.distributed.processes import is_first
from transformer_jax.errors import UserError
from transformer_jax.tasks import load
from transformer_jax.tasks.decisions.environments import ENVIRONMENTS
from transformer_jax.tasks.decisions.offline_decisions import ENTRY
from transformer_jax.tasks.decisions.trained import TrainedPolicy, target_returns

DESCRIPTION = (
    "Train a policy on recorded episodes that is conditioned on their returns, score it next to behavior "
    "cloning, and play episodes. Without --data it learns from random and mixed episodes of a grid world."
)


@dataclasses.dataclass(frozen=True)
class Arguments(PlanFlags):
    """The flags of this command."""

    run_dir: str | None = None
    """Folder of the run; an existing run is resumed. None: runs/DATA-MODEL."""
    play: int = 0
    """Play so many episodes for each return in --targets with the run in --run-dir; no training."""
    play_seed: int = 0
    """With --play: seed of the episodes and the actions."""
    plot_returns: str | None = None
    """With --play: draw the mean returns over the target returns, to this picture."""
    plot_attention: str | None = None
    """With --play: draw an episode with the last of the --targets, and the earlier steps that each action
    attends to, to this picture."""
    json: bool = False
    """With --play: print a JSON object per line. With --dry-run --topology: print a JSON object last."""


def default_recipe(argv: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
    """Return the function that chooses "fine_tune" for a start, "recorded" for data, or else an environment."""

    def choose(keywords: Mapping[str, Any]) -> str:
        if keywords.get("start"):
            return "fine_tune"
        if flag_value(argv, "--data"):
            return "recorded"
        return "cart_pole" if flag_value(argv, "--environment") == "cart_pole" else "key_door"

    return choose


def _check(parsed: Parsed) -> None:
    flags: Arguments = parsed.flags
    if "play" in parsed.named and flags.play < 1:
        raise UserError(f"`play` {flags.play} is below 1")
    pictures = {name: getattr(flags, name) for name in ("plot_returns", "plot_attention")}
    for name, path in pictures.items():
        if path is not None and not flags.play:
            raise UserError(f"`{name}` needs `play`")
        if path is not None:
            from transformer_jax.plotting.page import check_writable

            check_writable(path, name)
    if not flags.play and "play_seed" in parsed.named:
        raise UserError("`play_seed` needs `play`")
    if flags.play and flags.run_dir is None:
        raise UserError("name the trained run with `run_dir`")


def use(parsed: Parsed) -> None:
    """Play episodes for each return, print their mean returns, and draw them.

    Raises:
      UserError: The folder holds another kind of model or no environment, or a picture cannot be written.
    """
    flags: Arguments = parsed.flags
    assert flags.run_dir is not None
    policy = load(flags.run_dir, compute=parsed.execution.compute)
    if not isinstance(policy, TrainedPolicy):
        raise UserError(f"{flags.run_dir} holds a {type(policy.model).__name__}, not a policy")
    task, settings = parsed.config.task, policy.processor.settings
    temperature = task.temperature if "temperature" in parsed.named else None
    targets = target_returns(task.targets if "targets" in parsed.named else (), settings)
    options: dict[str, Any] = {"temperature": temperature, "seed": flags.play_seed}
    played = {target: policy.play(flags.play, target=target, **options) for target in targets}
    baseline = policy.play(flags.play, conditioned=False, **options)
    for target, episodes in played.items():
        mean, steps = float(np.mean(episodes.returns)), float(np.mean(episodes.lengths))
        if flags.json:
            print(json.dumps({"target": target, "return": mean, "steps": steps}))
        else:
            print(one_line(f"target {target:8.3f}   : mean return {mean:8.3f}, {steps:6.1f} steps"))
    mean = float(np.mean(baseline.returns))
    line = {"target": None, "return": mean, "steps": float(np.mean(baseline.lengths))}
    print(json.dumps(line) if flags.json else f"behavior cloning  : mean return {mean:8.3f}")
    for name in ("plot_returns", "plot_attention"):
        if (path := getattr(flags, name)) is None:
            continue
        from transformer_jax.plotting.decisions import plot_episode, plot_returns

        try:
            if name == "plot_returns":
                means = {target: float(np.mean(episodes.returns)) for target, episodes in played.items()}
                plot_returns(means, baseline=mean, optimal=float(np.mean(baseline.optimal)), path=path)
            else:
                episodes = played[targets[-1]]
                plot_episode(
                    episodes, policy.attention(episodes, target=targets[-1]), settings.environment,
                    action_names=ENVIRONMENTS[settings.environment].action_names
                    if settings.environment in ENVIRONMENTS else (), path=path,
                )  # fmt: skip
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: the picture cannot be written ({error})") from None


def main(argv: Sequence[str] | None = None, *, prog: str = "transformer-jax decide") -> None:
    """Run the command."""
    argv = sys.argv[1:] if argv is None else argv
    parsed = parse_run(
        ENTRY, argv, Arguments, prog=prog, description=DESCRIPTION, default_recipe=default_recipe(argv)
    )
    flags: Arguments = parsed.flags
    if planned(ENTRY, parsed, answers=bool(flags.play)):
        return
    _check(parsed)
    if flags.play:
        parsed.check_no_training(used=("targets", "temperature"))
        if is_first():
            use(parsed)
        return
    parsed.execution.processes.join()
    run_dir = run_dir_of(ENTRY, parsed, embedded=parsed.config.task.environment)
    train(ENTRY, parsed.config, pathlib.Path(run_dir), parsed.execution)
