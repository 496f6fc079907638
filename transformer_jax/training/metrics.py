"""Metrics of a run: `metrics.jsonl`, with a JSON object per line, and TensorBoard event files."""

from __future__ import annotations

import contextlib
import json
import pathlib
from typing import Any

from tensorboardX import SummaryWriter

from transformer_jax.distributed.processes import broadcast_from_first, is_first
from transformer_jax.errors import UserError
from transformer_jax.json_files import read_bytes
from transformer_jax.training.manifests import write_text_atomically

FILE = "metrics.jsonl"


def read_metrics(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Read a run's `metrics.jsonl`, skipping incomplete lines, which a killed run leaves, and foreign ones."""
    path = pathlib.Path(folder) / FILE
    rows = []
    for line in read_bytes(path).splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line.decode("utf-8"))
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append({name: value for name, value in row.items() if isinstance(value, int | float)})
    return rows


class MetricsLog:
    """Writer of a run's metrics.

    It first removes lines of steps after `step`, which a killed run may have written. Only the first process
    writes.

    Args:
      folder: The run's folder.
      step: The step that was restored, 0 for a new run.

    Raises:
      UserError: The folder cannot be written.

    Attributes:
      last: The last remaining line.
    """

    def __init__(self, folder: str | pathlib.Path, step: int = 0):
        self._path = pathlib.Path(folder) / FILE
        self.last: dict[str, Any] = broadcast_from_first(lambda: self._open(step))

    def _open(self, step: int) -> dict[str, Any]:
        folder = self._path.parent
        kept = [row for row in read_metrics(folder) if row["step"] <= step]
        try:
            write_text_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept))
            self._file = open(self._path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error})") from None
        return kept[-1] if kept else {}

    def write(self, step: int, **values: float) -> None:
        """Write a line, and a point of each TensorBoard curve.

        Raises:
          UserError: The disk is full.
        """
        if not is_first():
            return
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error}); free some space") from None

    def close(self) -> None:
        """Close both files."""
        if not is_first():
            return
        # On a full disk closing fails like the previous write, whose error was reported.
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._writer.close()
