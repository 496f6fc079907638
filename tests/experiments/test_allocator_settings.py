import os
import subprocess
import sys

import pytest
from experiments.allocator_settings import wished_environment

from tests.conftest import ROOT

ON_REQUEST = "always [madvise] never\n"
KEPT = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}:glibc.malloc.arena_max=1"
ALL = f"{KEPT}:glibc.malloc.hugetlb=1"


def test_wishes_are_added_to_other_tunables():
    asked = wished_environment({"HOME": "/x", "GLIBC_TUNABLES": "glibc.malloc.check=1"}, ON_REQUEST, "glibc")
    assert asked == {"HOME": "/x", "GLIBC_TUNABLES": f"glibc.malloc.check=1:{ALL}"}
    assert wished_environment({}, ON_REQUEST, "glibc") == {"GLIBC_TUNABLES": ALL}


@pytest.mark.parametrize("kernel", ["[always] madvise never", "always madvise [never]", ""])
def test_large_pages_are_asked_for_where_a_wish_decides(kernel):
    assert wished_environment({}, kernel, "glibc") == {"GLIBC_TUNABLES": KEPT}


def test_a_value_of_ones_own_stands():
    asked = wished_environment({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, ON_REQUEST, "glibc")
    assert asked == {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=0:{KEPT}"}


@pytest.mark.parametrize(
    ("tunables", "libc"), [(ALL, "glibc"), (ALL.replace("=0", "=65536"), "glibc"), ("", "")]
)
def test_no_restart_where_it_would_change_nothing(tunables, libc):
    assert wished_environment({"GLIBC_TUNABLES": tunables}, ON_REQUEST, libc) is None


JOB = """
import os, resource, sys
from experiments.allocator_settings import restart_with_kept_memory
open("starts", "a").write("x")
if sys.argv[1] == "kept":
    restart_with_kept_memory()
import threading
import numpy as np

def steps():
    '''Faults of ten blocks of 200 MB, one after the other, in a thread that is not the first.'''
    np.ones(25_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.ones(25_000_000)
    print(sys.argv[2:], resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is what is told to keep it")
def test_a_command_restarts_once_with_its_arguments_and_its_memory_stays(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment["PYTHONPATH"] = f"{ROOT}:{tmp_path}"

    def run(kind: str) -> int:
        command = [sys.executable, "-m", "job", kind, "--text", "two words"]
        output = subprocess.check_output(command, env=environment, cwd=tmp_path, text=True)
        arguments, faults = output.rsplit(" ", 1)
        assert arguments == "['--text', 'two words']"
        return int(faults)

    # At least one fault for each of the ten blocks' large pages where they are given back.
    large_page = 2**21
    assert run("as it is") > 10 * 200_000_000 // large_page // 2
    assert run("kept") < 10
    assert (tmp_path / "starts").read_text() == "xxx"
