"""One of several processes of a test: what they have on a mesh over all of them, in a file.

python -m tests.process_worker PORT PROCESSES PROCESS MESH OUT MODEL ...           loss and gradients
python -m tests.process_worker PORT PROCESSES PROCESS MESH OUT restore:CHECKPOINTS a state that is restored
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


def restored(folder, cut):
    """The leaves of the newest checkpoint, restored in parts into a state of zeros, and of its average."""
    mesh, alone = make_mesh(cut), state_on(None)
    is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    empty = jax.tree.map(lambda x: x if is_key(x) else np.zeros(x.shape, x.dtype), alone)
    with on_mesh(mesh), Checkpoints(folder) as checkpoints:
        target = jax.jit(lambda state: state, out_shardings=state_shardings(alone, mesh))(empty)
        state, _ = checkpoints.restore(target)
        model = target.model
        mean = checkpoints.average(lambda step: checkpoints.restore_model(model, step), checkpoints.steps())
        for name, leaf in named_leaves(state).items():
            assert leaf.sharding.is_equivalent_to(named_leaves(target)[name].sharding, leaf.ndim), name
        leaves = {f"state:{name}": leaf for name, leaf in named_leaves(state).items() if not is_key(leaf)}
        leaves |= {f"mean:{name}": leaf for name, leaf in named_leaves(mean).items()}
        return {name: np.asarray(leaf) for name, leaf in jax.jit(replicated)(leaves).items()}


def main():
    port, processes, process, cut, out, *names = sys.argv[1:]
    join(f"127.0.0.1:{port}", int(processes), int(process))
    found = {}
    for name in names:
        if name.startswith("restore:"):
            found |= restored(name.removeprefix("restore:"), cut)
            continue
        value, gradient = sharded_outcome(name, cut)
        found |= {f"{name}:loss": value} | {f"{name}:{leaf}": array for leaf, array in gradient.items()}
    if is_first():
        np.savez(out, **found)


if __name__ == "__main__":
    main()
