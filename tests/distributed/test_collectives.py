"""Collectives read from a program, and what the formulas say of each mode."""

import dataclasses

import pytest

from experiments.bench_communication import (
    MODES,
    Arguments,
    compiled,
    counted,
    decoder,
    formula,
    sent,
    sizes_of,
)
from transformer_jax.distributed.collectives import Collective, collectives

PROGRAM = """HloModule step, entry_computation_layout={()->f32[]}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %moved = f32[4,8]{1,0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}
}

%branch (p: f32[2]) -> f32[2] {
  ROOT %inside = f32[2]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (p: f32[2]) -> f32[] {
  %both = (f32[16,4]{1,0}, bf16[3]{0}) all-reduce(%a, %b), replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  %whole = s32[8,2]{1,0} all-gather(%c), replica_groups={{0,1},{2,3}}, dimensions={0}
  %loop = (s32[], f32[4,8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %chosen = f32[2]{0} conditional(%i, %p, %p), branch_computations={%branch, %branch}
}
"""


def test_collectives_of_a_program():
    assert collectives(PROGRAM) == [
        Collective("all-reduce", 16 * 4 * 4 + 3 * 2, 4, 1),
        Collective("all-gather", 64, 2, 1),
        Collective("collective-permute", 128, 2, 5),
        Collective("all-reduce", 8, 4, 1),
    ]
    with pytest.raises(ValueError, match="a loop of unknown length around a collective"):
        collectives(PROGRAM.replace('"known_trip_count":{"n":"5"}', ""))


def test_bytes_by_the_ring():
    assert Collective("all-reduce", 800, 8, 2).sent == 2 * 2 * 7 * 100
    assert Collective("all-gather", 800, 8, 1).sent == Collective("all-to-all", 800, 8, 1).sent == 700
    assert Collective("reduce-scatter", 100, 8, 1).sent == 700
    assert sent("collective-permute", 5, 8) == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "batch_size", "context"), [*((mode, 16, 32) for mode in MODES), ("fsdp", 64, 512)]
)
def test_a_step_sends_what_its_formula_says(mode, batch_size, context):
    arguments = Arguments(devices=(8,), width=64, batch_size=batch_size, context=context)
    config = decoder(arguments)
    wanted = formula(sizes_of(config, arguments), mode, 8)
    found, memory = compiled(config, arguments, mode, 8)
    kinds = counted(found)
    assert kinds.keys() == wanted.keys()
    for kind, size in wanted.items():
        # The loss, its weight, the gradient's norm, and their likes.
        assert 0 <= kinds[kind] - size < 512, kind
    assert memory.temp_size_in_bytes > 0


def test_the_formulas_at_many_devices():
    arguments = Arguments()
    sizes = sizes_of(decoder(arguments), arguments)
    by_devices = [sum(sent(k, s, n) for k, s in formula(sizes, "data", n).items()) for n in (8, 64, 512)]
    assert by_devices == sorted(by_devices)
    assert by_devices[-1] < 2 * sizes.parameters
    assert dataclasses.asdict(sizes)["layers"] == 2
