"""The search for options that make a step fit into memory, with a known formula for the memory."""

import types

import pytest

from transformer_jax.errors import UserError
from transformer_jax.training.ways_to_fit import Change, Layout, cheapest

MESHES = ("data=8", "data=8 sharded", "fsdp=8")


def change(parts, policy, rank):
    return Change(parts, policy, Layout("tensor=8" if rank is None else MESHES[rank], False), rank)


# The order of `changes`: remat policies by layout, parts of a batch, blocks, heads, offload.
CANDIDATES = [
    *(change(1, policy, rank) for policy in range(3) for rank in range(3) if (policy, rank) != (0, 0)),
    change(2, 0, 2), change(4, 0, 2),
    *(change(1, 3, rank) for rank in range(3)),
    change(2, 3, 2), change(4, 3, 2), change(1, 3, None), change(1, 4, 2), change(8, 3, 2),
]  # fmt: skip


def memory(candidate):
    """Return GiB: a state of 16 or its shards, and activations of 64 halved by each policy and part."""
    state = (16, 8, 2, 2)[3 if candidate.rank is None else candidate.rank]
    return state + 64 / 2**candidate.policy / candidate.splits


@pytest.mark.parametrize("room", [73, 67, 45, 35, 30, 20, 12, 9, 7, 5, 4, 3, 1])
def test_the_three_cheapest_changes_need_at_most_eight_compilations(room):
    compiled = []

    def report(candidate):
        compiled.append(candidate)
        return types.SimpleNamespace(fits=memory(candidate) <= room)

    fitting = [candidate for candidate, _ in cheapest(CANDIDATES, report)]
    assert fitting == [candidate for candidate in CANDIDATES if memory(candidate) <= room][:3]
    assert len(compiled) == len(set(compiled)) <= 8


def test_changes_that_the_run_refuses_are_skipped():
    def report(candidate):
        if candidate.splits > 1:
            raise UserError("rows are compared")
        return types.SimpleNamespace(fits=candidate.rank is None)

    assert [candidate for candidate, _ in cheapest(CANDIDATES, report)] == [change(1, 3, None)]
