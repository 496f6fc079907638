"""Train a pickled run that kills itself at named points: `python -m tests.killed_run CONFIG FOLDER POINT...`.

Each point runs in a forked child, so that Python starts only once. A last child runs to the end.
"""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import signal
import sys

from transformer_jax import tasks
from transformer_jax.distributed import mesh
from transformer_jax.training import checkpoints, driver, loop, metrics, run_folder

POINTS = {
    "creation": signal.SIGKILL,
    "first step": signal.SIGKILL,
    "first save": signal.SIGKILL,
    "evaluation": signal.SIGKILL,
    "best save": signal.SIGKILL,
    "later step": signal.SIGTERM,
    "averaging": signal.SIGKILL,
    "averaging again": signal.SIGKILL,
    "results": signal.SIGKILL,
}


def kill_at(point: str) -> None:
    """Patch the package so that this process receives the point's signal when it reaches the point."""

    def kill() -> None:
        os.kill(os.getpid(), POINTS[point])

    if point in ("first step", "later step"):
        steps = {"first step": 2, "later step": 3}[point]
        placed = []

        def place(*arguments, **options):
            placed.append(1)
            if len(placed) == steps:
                kill()
            return mesh.place_batch(*arguments, **options)

        driver.place_batch = place
    elif point == "creation":
        write_json = run_folder.write_json

        def write_other_files(path, value):
            if path.name == run_folder.CONFIG:
                kill()
            write_json(path, value)

        run_folder.write_json = write_other_files
    elif point == "evaluation":
        write = metrics.MetricsLog.write

        def write_losses(self, step, **values):
            if any(name.startswith("valid") for name in values):
                kill()
            write(self, step, **values)

        metrics.MetricsLog.write = write_losses
    elif point == "results":
        run_folder.RunFolder.finish = lambda *_: kill()
    else:
        # When digests are computed, the files of a checkpoint are complete and its manifest is still missing.
        digests, save = checkpoints.digests, checkpoints.Checkpoints.save
        best_steps = set()

        @functools.wraps(save)
        def note_best(self, state, *arguments, best=False):
            if best:
                best_steps.add(str(int(state.step)))
            return save(self, state, *arguments, best=best)

        def kill_before_manifest(folder: pathlib.Path):
            averaged = folder.name.endswith(".draft")
            saving = (folder.parent / f"{folder.name}.begun").exists()
            if saving and not (folder / checkpoints.MANIFEST).exists():
                reached = {"first save": not averaged, "best save": folder.name in best_steps}
                if reached.get(point, averaged):
                    kill()
            return digests(folder)

        checkpoints.Checkpoints.save = note_best
        checkpoints.digests = kill_before_manifest


def main() -> None:
    """Run one child per point and check its exit status, then run one that completes training."""
    path, folder, *points = sys.argv[1:]
    config = pickle.loads(pathlib.Path(path).read_bytes())
    for point in [*points, None]:
        child = os.fork()
        if child == 0:
            if point is not None:
                kill_at(point)
            try:
                tasks.train(config, folder)
            except loop.Stopped:
                os._exit(99)
            except BaseException:  # noqa: BLE001  a child must never return from here
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        expected = {None: 0, "later step": 99}.get(point, -signal.SIGKILL)
        if status != expected:
            sys.exit(f"killed at {point!r}: the process ended with {status}, not {expected}")


if __name__ == "__main__":
    main()
