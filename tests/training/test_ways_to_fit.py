"""The search for what makes a step fit, on memories that are known."""

import itertools
import types

import pytest

from transformer_jax.errors import UserError
from transformer_jax.training.ways_to_fit import Change, Layout, cheapest

MESHES = ("data=8", "data=8 sharded", "fsdp=8")


def change(parts, policy, rank):
    return Change(parts, policy, Layout("tensor=8" if rank is None else MESHES[rank], False), rank)


# As `changes` orders them: what is recomputed by layout, parts of a batch, blocks, heads, offload.
CANDIDATES = [
    *(change(1, *one) for one in itertools.product((0, 1, 2), (0, 1, 2)) if one != (0, 0)),
    change(2, 0, 2), change(4, 0, 2),
    *(change(1, 3, rank) for rank in range(3)),
    change(2, 3, 2), change(4, 3, 2), change(1, 3, None), change(1, 4, 2), change(8, 3, 2),
]  # fmt: skip


def memory(one):
    """In GiB: a state of 16 in shards or not, and activations of 64 halved by each policy and part."""
    return (16, 8, 2, 2)[3 if one.rank is None else one.rank] + 64 / 2**one.policy / one.parts


def found(room):
    """(the changes that are found, those that were compiled) on a chip of so many GiB."""
    compiled = []

    def report(one):
        compiled.append(one)
        return types.SimpleNamespace(fits=memory(one) <= room)

    return [one for one, _ in cheapest(CANDIDATES, report)], compiled


@pytest.mark.parametrize("room", [73, 67, 45, 35, 30, 20, 12, 9, 7, 5, 4, 3, 1])
def test_the_three_cheapest_are_found_in_eight_compilations(room):
    ways, compiled = found(room)
    assert ways == [one for one in CANDIDATES if memory(one) <= room][:3]
    assert len(compiled) == len(set(compiled)) <= 8


def test_a_change_that_the_run_cannot_have_is_passed_over():
    def report(one):
        if one.parts > 1:
            raise UserError("rows are compared")
        return types.SimpleNamespace(fits=one.rank is None)

    assert [one for one, _ in cheapest(CANDIDATES, report)] == [change(1, 3, None)]
