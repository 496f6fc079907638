"""Run one of several processes of a test on a mesh over all of them, and write the resulting arrays to a file.

python -m tests.process_worker PORT PROCESSES PROCESS MESH OUT MODEL ...           loss and gradients
python -m tests.process_worker PORT PROCESSES PROCESS MESH OUT restore:CHECKPOINTS restored state
"""

import sys

import jax
import numpy as np

from tests.distributed.test_mesh import sharded_outcome, state_on
from transformer_jax.distributed.mesh import make_mesh, on_mesh, replicated
from transformer_jax.distributed.processes import is_first, join
from transformer_jax.distributed.sharding import state_shardings
from transformer_jax.parameter_names import named_leaves
from transformer_jax.training.checkpoints import Checkpoints


def restored_leaves(folder, mesh_text):
    """Return the leaves of the newest checkpoint, restored into a sharded state, and of the average."""
    mesh, unsharded = make_mesh(mesh_text), state_on(None)
    is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    empty = jax.tree.map(lambda x: x if is_key(x) else np.zeros(x.shape, x.dtype), unsharded)
    with on_mesh(mesh), Checkpoints(folder) as checkpoints:
        target = jax.jit(lambda state: state, out_shardings=state_shardings(unsharded, mesh))(empty)
        state, _ = checkpoints.restore(target)
        model = target.model
        mean = checkpoints.average(lambda step: checkpoints.restore_model(model, step), checkpoints.steps())
        for name, leaf in named_leaves(state).items():
            assert leaf.sharding.is_equivalent_to(named_leaves(target)[name].sharding, leaf.ndim), name
        leaves = {f"state:{name}": leaf for name, leaf in named_leaves(state).items() if not is_key(leaf)}
        leaves |= {f"mean:{name}": leaf for name, leaf in named_leaves(mean).items()}
        return {name: np.asarray(leaf) for name, leaf in jax.jit(replicated)(leaves).items()}


def main():
    port, processes, process, mesh_text, out, *names = sys.argv[1:]
    join(f"127.0.0.1:{port}", int(processes), int(process))
    arrays = {}
    for name in names:
        if name.startswith("restore:"):
            arrays |= restored_leaves(name.removeprefix("restore:"), mesh_text)
            continue
        value, gradient = sharded_outcome(name, mesh_text)
        arrays |= {f"{name}:loss": value} | {f"{name}:{leaf}": array for leaf, array in gradient.items()}
    if is_first():
        np.savez(out, **arrays)


if __name__ == "__main__":
    main()
