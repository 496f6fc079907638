"""Runs the notebooks from clean kernels and saves them with their outputs.

    python notebooks/execute.py [NOTEBOOK ...]

Without names it runs all. What differs from machine to machine, times and versions, is not saved.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import time
from typing import Any

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def executed(path: pathlib.Path, steps: int | None = None, xla_flags: str = "") -> Any:
    """A notebook after a run of all its cells, which began without outputs.

    Args:
      path: of the notebook.
      steps: of every training in it, in place of its own number: all cells run, and results mean nothing.
      xla_flags: of the kernel.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count, cell.metadata = [], None, {}
            if steps is not None:
                cell.source = re.sub(r"\bsteps=\d[\d_]*", f"steps={steps}", cell.source)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    # A user's kernel has the devices and the pictures that it has by itself, and the project beside it.
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "MPLBACKEND")}
    client.execute(env=env | {"PYTHONPATH": str(FOLDER.parent), "XLA_FLAGS": xla_flags})
    notebook.metadata = METADATA
    return notebook


if __name__ == "__main__":
    for path in map(pathlib.Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        began = time.monotonic()
        nbformat.write(executed(path.resolve()), path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)
