"""Run notebooks in new kernels and save them with their outputs.

    python notebooks/execute.py [NOTEBOOK ...]

Without arguments all notebooks are run. Execution times and version numbers are not saved.
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
    """Run all cells of a notebook and return it with the new outputs.

    Args:
      path: File of the notebook.
      steps: Number of steps of every training, for a quick test of the cells; None means that of the notebook.
      xla_flags: XLA_FLAGS of the kernel.

    Raises:
      nbclient.exceptions.CellExecutionError: A cell raised an error.
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
    # The kernel uses its default devices and plots, as a user's kernel does, and can import the project.
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "MPLBACKEND")}
    client.execute(env=env | {"PYTHONPATH": str(FOLDER.parent), "XLA_FLAGS": xla_flags})
    notebook.metadata = METADATA
    return notebook


if __name__ == "__main__":
    for path in map(pathlib.Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        start_time = time.monotonic()
        nbformat.write(executed(path.resolve()), path)
        print(f"{path.name}: {time.monotonic() - start_time:.0f} s", flush=True)
