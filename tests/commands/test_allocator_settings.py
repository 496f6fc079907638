"""Commands restart with settings of the allocator that keep freed memory."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from transformer_jax.commands.allocator_settings import restart_environment

ON_REQUEST = "always [madvise] never\n"
KEPT = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.arena_max=1"
ALL = f"{KEPT}:glibc.malloc.hugetlb=1"


def test_settings_are_added_to_other_tunables():
    asked = restart_environment({"HOME": "/x", "GLIBC_TUNABLES": "glibc.malloc.check=1"}, ON_REQUEST, "glibc")
    assert asked == {"HOME": "/x", "GLIBC_TUNABLES": f"glibc.malloc.check=1:{ALL}"}
    assert restart_environment({}, ON_REQUEST, "glibc") == {"GLIBC_TUNABLES": ALL}


@pytest.mark.parametrize("kernel", ["[always] madvise never", "always madvise [never]", ""])
def test_large_pages_are_requested_only_if_the_kernel_gives_them_on_request(kernel):
    assert restart_environment({}, kernel, "glibc") == {"GLIBC_TUNABLES": KEPT}


def test_a_value_of_the_user_is_kept():
    asked = restart_environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, ON_REQUEST, "glibc")
    assert asked == {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=0:{KEPT}"}


@pytest.mark.parametrize(
    ("tunables", "libc"), [(ALL, "glibc"), (ALL.replace("=0", "=65536"), "glibc"), ("", "")]
)
def test_no_restart_if_it_would_change_nothing(tunables, libc):
    assert restart_environment({"GLIBC_TUNABLES": tunables}, ON_REQUEST, libc) is None


JOB = """
import os, resource, sys
from transformer_jax.commands.allocator_settings import restart_with_allocator_settings
open("starts", "a").write("x")
if sys.argv[1] == "kept":
    restart_with_allocator_settings()
import threading
import numpy as np

def steps():
    '''Print the page faults of ten successive blocks of 200 MB, in a thread other than the main one.'''
    np.ones(25_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(25_000_000)
    print(sys.argv[2:], resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are of glibc's malloc")
def test_a_command_restarts_once_with_its_arguments_and_keeps_its_memory(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment["PYTHONPATH"] = f"{ROOT}:{tmp_path}"

    def run(kind: str) -> int:
        command = [sys.executable, "-m", "job", kind, "--text", "two words"]
        output = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
        arguments, faults = output.rsplit(" ", 1)
        assert arguments == "['--text', 'two words']"
        return int(faults)

    # Without the settings, each large page of the ten blocks costs at least one fault.
    large_page = 2**21
    assert run("default") > 10 * 200_000_000 // large_page // 2
    assert run("kept") < 10
    assert (tmp_path / "starts").read_text() == "xxx"
