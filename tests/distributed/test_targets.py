"""Topologies, GPU descriptions, program reports and the errors for missing compilers."""

import os

import pytest

from transformer_jax.distributed import targets
from transformer_jax.distributed.collectives import collectives
from transformer_jax.distributed.program_flops import Flops
from transformer_jax.distributed.program_report import _needed_bytes, _report
from transformer_jax.distributed.program_traffic import Traffic
from transformer_jax.distributed.startup_logs import without_startup_logs
from transformer_jax.distributed.targets import (
    CHIPS,
    EFFICIENCIES,
    Topology,
    chip_of,
    target_mesh,
    topology_of,
)
from transformer_jax.errors import UserError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x100:8", "chips are v4, v5e, v5p, v6e, tpu7x, t4, l4, rtx4090, a100, h100, h200, b200, gb200"),
        ("h100", "unknown `topology`"),
        ("h100:8x", "unknown `topology`"),
        ("v5e:4 x 4", "unknown `topology`"),
        ("h100:0", "has no device"),
        ("0*v5e:2x2", "has no device"),
    ],
)
def test_invalid_topologies(text, message):
    with pytest.raises(UserError, match=message):
        topology_of(text)


@pytest.mark.parametrize(("text", "extra"), [("2*v5e:4x4", "tpu-compiler"), ("h100:4x8", "gpu-compiler")])
def test_a_missing_compiler_names_the_extra(text, extra, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"pip install 'transformer_jax\[{extra}\]'"):
        topology_of(text)


def test_a_description_has_the_numbers_of_the_data_sheet():
    text = targets._description(CHIPS["h100"])
    for part in ("core_count: 132", "clock_rate_ghz: 1.98", "memory_bandwidth: 3352000000000", "major: 9"):
        assert part in text
    assert chip_of("2*v5e:4x4").memory == int(15.75 * 2**30)
    assert "major: 8 minor: 9" in targets._description(CHIPS["rtx4090"])
    assert "threads_per_core_limit: 1024" in targets._description(CHIPS["t4"])


def test_lines_about_absent_devices_are_dropped(capfd):
    with without_startup_logs():
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers on your machine\n\na warning\n")
    assert capfd.readouterr().err == "a warning\n"

    def fail():
        with without_startup_logs():
            os.write(2, b"before the error\n")
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert capfd.readouterr().err == "before the error\n"


def test_a_mesh_covers_the_devices():
    topology = Topology("h100:4", CHIPS["h100"], tuple(range(4)), 4)
    with pytest.raises(UserError, match="data=2 does not cover the 4 devices of h100:4"):
        target_mesh(topology, "data=2")


PROGRAM = """HloModule m, num_partitions=8

ENTRY %main (p: f32[8,4]) -> f32[64,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %a = f32[8,4]{1,0} all-reduce(%p), replica_groups=GROUPS, to_apply=%add
  ROOT %g = f32[64,4]{1,0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", (0, 2, 4, 6)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("mesh['a'=4,'b'=2] {'a'}", (0, 2, 4, 6)),
        ("mesh['a'=4,'b'=2] {'b'}", (0, 1)),
    ],
)
def test_groups_determine_which_links_are_used(groups, devices):
    reduced, gathered = collectives(PROGRAM.replace("GROUPS", groups))
    assert reduced.groups[0] == devices
    assert reduced.crosses(4) == (max(devices) >= 4)
    assert gathered.crosses(4)
    assert not gathered.crosses(8)


def test_a_permutation_between_hosts_crosses():
    line = "%a = f32[8,4]{1,0} collective-permute(%p), source_target_pairs={{0,1},{3,4},{1,0}}"
    program = PROGRAM.replace("%a = f32[8,4]{1,0} all-reduce(%p), replica_groups=GROUPS, to_apply=%add", line)
    permuted = collectives(program)[0]
    assert (permuted.group, permuted.sent) == (2, 8 * 4 * 4)
    assert not permuted.crosses(8)
    far = collectives(program.replace("{1,0}}", "{0,7}}"))[0]
    assert far.crosses(4)


def test_the_time_is_the_sum_of_compute_and_memory_or_that_of_the_links():
    topology = Topology("h100:8", CHIPS["h100"], tuple(range(8)), 8)
    operations = collectives(PROGRAM.replace("GROUPS", "[2,4]<=[8]"))
    efficiency = EFFICIENCIES["gpu"]

    def report(products=0.0, kernels=0.0, traffic=(0.0, 0.0), arguments=1, model_flops=1.0):
        work = Flops(products, kernels)
        return _report(topology, object(), arguments, 0, work, model_flops, Traffic(*traffic), operations, [])

    peak = 989e12
    compute = report(products=peak, kernels=peak, model_flops=peak)
    seconds = 1 / efficiency.products + 1 / efficiency.kernels
    assert (compute.limit, compute.seconds_modelled) == ("compute", pytest.approx(seconds))
    assert compute.utilisation_modelled == pytest.approx(1 / seconds), "of the model's operations alone"
    # The traffic of products is hidden behind them, unless it takes longer.
    both = report(products=peak, traffic=(1e9, 3352e9))
    assert both.seconds_modelled == pytest.approx(1 / efficiency.products + 1 / efficiency.memory)
    memory = report(products=1.0, traffic=(3352e9, 3352e9))
    assert (memory.limit, memory.seconds_modelled) == ("memory", pytest.approx(2 / efficiency.memory))
    assert memory.bytes_accessed == 2 * 3352e9
    sent = 2 * 3 / 4 * 128 + 7 / 8 * 1024
    links = report()
    assert (links.limit, links.link_bytes) == ("links", {"within": sent, "between": 0.0})
    assert links.seconds_modelled == pytest.approx(sent / 450e9 / efficiency.links)
    assert compute.fits
    assert not report(arguments=80 * 2**30).fits
    assert "program" not in compute.as_json()


def test_memory_is_read_from_a_refusal():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 22.31G of 15.75G hbm. Exceeded"
    assert _needed_bytes(message) == int(22.31 * 2**30)
    assert _needed_bytes("INTERNAL: something else") is None
