import os
import pathlib
import subprocess
import sys

import pytest

from experiments.huge_pages import wished_environment
from tests.conftest import ROOT

ON_REQUEST = "always [madvise] never\n"


def test_the_wish_is_added_to_other_tunables():
    asked = wished_environment({"HOME": "/x", "GLIBC_TUNABLES": "glibc.malloc.check=1"}, ON_REQUEST, "glibc")
    assert asked == {"HOME": "/x", "GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}
    assert wished_environment({}, ON_REQUEST, "glibc") == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.parametrize(
    ("environment", "kernel", "libc"),
    [
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, ON_REQUEST, "glibc"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, ON_REQUEST, "glibc"),
        ({}, "[always] madvise never", "glibc"),
        ({}, "always madvise [never]", "glibc"),
        ({}, ON_REQUEST, ""),
    ],
)
def test_no_restart_where_it_would_change_nothing(environment, kernel, libc):
    assert wished_environment(environment, kernel, libc) is None


def test_a_command_restarts_once_with_its_arguments(tmp_path):
    """A module that prints its arguments and how often it was started."""
    kernel = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not kernel.exists() or "[madvise]" not in kernel.read_text():
        pytest.skip("this kernel does not give large pages on request")
    (tmp_path / "job.py").write_text(
        "import os, sys\nfrom experiments.huge_pages import restart_with_huge_pages\n"
        f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\nrestart_with_huge_pages()\n"
        "print(sys.argv[1:], os.environ['GLIBC_TUNABLES'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment["PYTHONPATH"] = f"{ROOT}:{tmp_path}"
    output = subprocess.check_output(
        [sys.executable, "-m", "job", "--text", "two words"], env=environment, cwd=tmp_path, text=True
    )
    assert output == "['--text', 'two words'] glibc.malloc.hugetlb=1\n"
    assert (tmp_path / "starts").read_text() == "xx"
