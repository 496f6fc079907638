"""Train a model that predicts a property of each graph, such as a molecule, and predict with it.

    python -m experiments.graphs                                   # triangles of random graphs
    python -m experiments.graphs --drawn diameter
    python -m experiments.graphs --data MOLECULES.tsv [--valid FILE] [--test FILE]   # smiles, score or label
    python -m experiments.graphs --data GRAPHS.jsonl               # nodes, edges, score or label
    python -m experiments.graphs --run-dir RUN --predict CCO FILE... [--json] [--plot-attention FILE]

`--help` lists the flags; docs/graphs.md lists scores.
"""

from __future__ import annotations

from transformer_jax.commands.allocator_settings import restart_with_allocator_settings

if __name__ == "__main__":
    restart_with_allocator_settings()

import sys

from transformer_jax.commands import graphs
from transformer_jax.commands.run_command import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: graphs.main(prog="python -m experiments.graphs")))
