"""Collectives read from programs, and the formulas for the bytes of each mode."""

import dataclasses

import pytest

from experiments.benchmarks.bench_communication import (
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


@pytest.mark.parametrize(
    ("operation", "groups", "crosses"),
    [
        ("all-reduce(%a), replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3)), False),
        ("all-reduce(%a), replica_groups={{0,1},{3,2},{5,6}}", ((0, 1), (3, 2), (5, 6)), True),
        ("all-reduce(%a), replica_groups=[2,2]<=[4]", ((0, 1), (2, 3)), False),
        ("all-reduce(%a), replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3)), True),
        ("all-reduce(%a), replica_groups=mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3)), True),
        ("all-reduce(%a), replica_groups=mesh['x'=2,'y'=2] {'y'}", ((0, 1), (2, 3)), False),
        ("collective-permute(%a), source_target_pairs={{0,1},{1,2}}", ((0, 1), (1, 2)), True),
    ],
)
def test_a_collective_crosses_hosts_of_two_devices_if_any_group_does(operation, groups, crosses):
    program = f"HloModule step\n\nENTRY %main () -> f32[] {{\n  %r = f32[2]{{0}} {operation}\n}}\n"
    (collective,) = collectives(program)
    assert collective.groups == groups
    assert collective.crosses(2) == crosses


# A TPU compiler's program for a scan of five layers: a loop whose length follows only from its condition, tiled
# layouts, an asynchronous gather in three fusions, a reduce-scatter as a fusion of an all-reduce.
TPU = """HloModule step, is_scheduled=true, num_partitions=4

%started (p.1: bf16[1,64,32]) -> (bf16[1,64,32], bf16[1,256,32], u32[]) {
  %p.1 = bf16[1,64,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather.1 = bf16[1,256,32]{2,1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=8, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %start = (bf16[1,64,32]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,256,32]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p.2: bf16[1,64,32], p.3: bf16[4,256]) -> (bf16[4,256], bf16[1,256,32]) {
  %p.2 = bf16[1,64,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather.2 = bf16[1,256,32]{2,1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=8, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %both = (bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[1,256,32]{2,1,0:T(8,128)(2,1)}) tuple(%p.3, %gather.2)
}

%ended (p.4: bf16[1,64,32]) -> bf16[1,256,32] {
  %p.4 = bf16[1,64,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %gather.3 = bf16[1,256,32]{2,1,0:T(8,128)(2,1)} all-gather(%p.4), channel_id=8, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %done = bf16[1,256,32]{2,1,0:T(8,128)(2,1)} custom-call(%gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (p.5: f32[256,8]) -> f32[64,8] {
  %p.5 = f32[256,8]{1,0:T(8,128)} parameter(0)
  %summed = f32[256,8]{1,0:T(8,128)} all-reduce(%p.5), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = f32[64,8]{1,0:T(8,128)S(1)} dynamic-slice(%summed, %place, %zero), dynamic_slice_sizes={64,8}
}

%body (carried: (s32[], bf16[1,64,32], /*index=2*/f32[256,8])) -> (s32[], bf16[1,64,32], f32[256,8]) {
  %carried = (s32[]{:T(128)}, bf16[1,64,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/f32[256,8]{1,0:T(8,128)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %layer = s32[]{:T(128)} get-tuple-element(%carried), index=0
  %copied = s32[]{:T(128)S(6)} copy(%layer)
  %next = s32[]{:T(128)} add(%copied, %one)
  %first = (bf16[1,64,32]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,256,32]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%started
  %meanwhile = (bf16[4,256]{1,0:T(4,128)(2,1)}, bf16[1,256,32]{2,1,0:T(8,128)(2,1)}) fusion(%x, %y), kind=kOutput, calls=%async_collective_fusion.1
  %last = bf16[1,256,32]{2,1,0:T(8,128)(2,1)} fusion(%x), kind=kCustom, calls=%ended
  %gradient = f32[64,8]{1,0:T(8,128)S(1)} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %onward = (s32[]{:T(128)}, bf16[1,64,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/f32[256,8]{1,0:T(8,128)}) tuple(%next, %x, %z)
}

%condition (state: (s32[], bf16[1,64,32], f32[256,8])) -> pred[] {
  %end = s32[]{:T(128)} constant(5)
  %state = (s32[]{:T(128)}, bf16[1,64,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/f32[256,8]{1,0:T(8,128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %end), direction=LT
}

%wrapped (q: f32[8]) -> f32[2] {
  %q = f32[8]{0:T(128)} parameter(0)
  ROOT %scattered = f32[2]{0:T(128)} reduce-scatter(%q), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[] {
  %zero = s32[]{:T(128)} constant(0)
  %begin = s32[]{:T(128)} copy(%zero)
  %before = (s32[]{:T(128)}, bf16[1,64,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/f32[256,8]{1,0:T(8,128)}) tuple(%begin, %x, %z)
  %loop = (s32[]{:T(128)}, bf16[1,64,32]{2,1,0:T(8,128)(2,1)}, /*index=2*/f32[256,8]{1,0:T(8,128)}) while(%before), condition=%condition, body=%body
  %gather-start = ((f32[2]{0:T(128)}, f32[3]{0:T(128)}), (f32[4]{0:T(128)}, f32[6]{0:T(128)})) all-gather-start(%b, %c), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %gather-done = (f32[4]{0:T(128)}, f32[6]{0:T(128)}) all-gather-done(%gather-start)
  %permute-start = (f32[5]{0:T(128)}, f32[5]{0:T(128)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%d), channel_id=3, source_target_pairs={{0,1},{1,0},{2,2},{3,3}}
  %permute-done = f32[5]{0:T(128)} collective-permute-done(%permute-start)
  %async-start = ((f32[8]{0:T(128)}), f32[2]{0:T(128)}, u32[]{:S(2)}) async-start(%a), calls=%wrapped
  %async-done = f32[2]{0:T(128)} async-done(%async-start)
  %reduce-start = f32[7]{0:T(128)} all-reduce-start(%e), replica_groups=mesh['axis_0'=2,'axis_1'=2], device_ids=([2,2]T(1,0)) {'axis_0','axis_1'}, to_apply=%add
  ROOT %everyone = f32[]{:T(128)} all-reduce(%f), replica_groups={}, to_apply=%add
}
"""  # noqa: E501  lines of a program are long


def test_collectives_of_a_program_for_a_tpu():
    assert collectives(TPU) == [
        Collective("all-gather", 256 * 32 * 2, 4, 5),
        Collective("reduce-scatter", 64 * 8 * 4, 4, 5),
        Collective("all-gather", (4 + 6) * 4, 2, 1),
        Collective("collective-permute", 5 * 4, 2, 1),
        Collective("reduce-scatter", 2 * 4, 4, 1),
        Collective("all-reduce", 7 * 4, 4, 1),
        Collective("all-reduce", 4, 4, 1),
    ]


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"direction=LT": "direction=LE"}, 6),
        ({"direction=LT": "direction=NE"}, 5),
        ({"compare(%counter, %end), direction=LT": "compare(%end, %counter), direction=GT"}, 5),
        ({"constant(1)": "constant(2)"}, 3),
        ({"constant(0)": "constant(3)"}, 2),
        ({"add(%copied, %one)": "subtract(%copied, %one)", "constant(0)": "constant(9)", "=LT": "=GE"}, 5),
    ],
)
def test_trips_of_loops_with_a_counter(changes, times):
    text = TPU
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert {collective.times for collective in collectives(text)} == {1, times}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%end = s32[]{:T(128)} constant(5)", "%end = s32[]{:T(128)} get-tuple-element(%state), index=1"),
        ("add(%copied, %one)", "multiply(%copied, %one)"),
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} parameter(1)"),
        ("direction=LT", "direction=GT"),
        ("constant(1)", "constant(0)"),
    ],
)
def test_a_loop_of_unknown_length_around_a_collective(old, new):
    assert old in TPU
    with pytest.raises(ValueError, match="a loop of unknown length around a collective: loop"):
        collectives(TPU.replace(old, new))


# One slice's program of three slices of four devices: hosts send between slices.
SLICES = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[16,8]) -> bf16[16,8] {
  %reduced = (bf16[16,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) send(%p, %t), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.24_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %gathered = (bf16[16,512]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1:2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}
  %scattered = (f32[6,2]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2,3}x{0:3}",_xla_megascale_transfer_type="REDUCE_SCATTER"}
  %spread = (s32[6]{0}, u32[], token[]) send(%p, %t), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_TO_ALL"}
  %offloaded = (s32[6]{0}, u32[], token[]) send(%p, %t), is_host_transfer=true
}
"""  # noqa: E501


def test_collectives_between_slices():
    operations = collectives(SLICES)
    assert operations == [
        Collective("all-reduce", 16 * 8 * 128 * 2, 3, 1),
        Collective("all-gather", 2 * 16 * 512 * 2, 2, 1),
        Collective("reduce-scatter", 4 * 2 * 2, 3, 1),
        Collective("all-to-all", 6 * 4, 3, 1),
    ]
    assert operations[0].groups == ((0, 4, 8),)
    assert all(operation.crosses(4) for operation in operations)


def test_a_conditional_counts_the_branch_that_sends_the_most():
    quiet = "%quiet (p: f32[2]) -> f32[2] {\n  ROOT %same = f32[2]{0} copy(%p)\n}\n\nENTRY"
    text = PROGRAM.replace("ENTRY", quiet)
    for branches in (
        "branch_computations={%quiet, %branch}",
        "true_computation=%branch, false_computation=%quiet",
    ):
        changed = text.replace("branch_computations={%branch, %branch}", branches)
        assert collectives(changed) == collectives(PROGRAM)


def test_a_text_that_is_not_a_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("module @jit_step {}")


def test_bytes_of_the_ring_algorithm():
    assert Collective("all-reduce", 800, 8, 2).sent == 2 * 2 * 7 * 100
    assert Collective("all-gather", 800, 8, 1).sent == Collective("all-to-all", 800, 8, 1).sent == 700
    assert Collective("reduce-scatter", 100, 8, 1).sent == 700
    assert sent("collective-permute", 5, 8) == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "batch_size", "context"), [*((mode, 16, 32) for mode in MODES), ("fsdp", 64, 512)]
)
def test_bytes_of_a_step_follow_the_formula(mode, batch_size, context):
    arguments = Arguments(devices=(8,), width=64, batch_size=batch_size, context=context)
    config = decoder(arguments)
    expected = formula(sizes_of(config, arguments), mode, 8)
    operations, memory = compiled(config, arguments, mode, 8)
    sizes = counted(operations)
    assert sizes.keys() == expected.keys()
    for kind, size in expected.items():
        # The formula omits scalars such as the loss, its weight and the gradient's norm.
        assert 0 <= sizes[kind] - size < 512, kind
    assert memory.temp_size_in_bytes > 0


def test_formulas_for_more_devices():
    arguments = Arguments()
    sizes = sizes_of(decoder(arguments), arguments)
    by_devices = [sum(sent(k, s, n) for k, s in formula(sizes, "data", n).items()) for n in (8, 64, 512)]
    assert by_devices == sorted(by_devices)
    assert by_devices[-1] < 2 * sizes.parameters
    assert dataclasses.asdict(sizes)["layers"] == 2
