"""One of several processes of a test: loss and gradients of models on a mesh over all of them, in a file.

python -m tests.process_worker PORT PROCESSES PROCESS MESH OUT MODEL ...
"""

import sys

import numpy as np

from tests.test_mesh import spread_out_outcome
from transformer_jax.processes import is_first, join


def main():
    port, processes, process, cut, out, *names = sys.argv[1:]
    join(f"127.0.0.1:{port}", int(processes), int(process))
    found = {}
    for name in names:
        value, gradient = spread_out_outcome(name, cut)
        found |= {f"{name}:loss": value} | {f"{name}:{leaf}": array for leaf, array in gradient.items()}
    if is_first():
        np.savez(out, **found)


if __name__ == "__main__":
    main()
