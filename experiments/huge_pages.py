"""Memory in large pages: on Linux, a command that is started once more for them trains faster on a CPU.

Each training step allocates its activations anew, and where the kernel hands them out in pages of 4 KiB
much of the time goes into faulting them in one by one. glibc can ask for pages of 2 MiB, but reads
that wish only when a process starts.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys

_TUNABLES, _WISH = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
_KERNEL = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wished_environment(environment: dict[str, str], kernel: str, libc: str) -> dict[str, str] | None:
    """The environment to restart with, or None where a restart would change nothing.

    Args:
      environment: the process's own.
      kernel: text of the kernel's setting; large pages are given on request under "[madvise]" only.
      libc: name of the C library.
    """
    tunables = environment.get(_TUNABLES, "")
    if _WISH in tunables or "[madvise]" not in kernel or libc != "glibc":
        return None
    return environment | {_TUNABLES: ":".join(filter(None, (tunables, f"{_WISH}=1")))}


def restart_with_huge_pages() -> None:
    """Starts the running command again with large pages, once; elsewhere it returns at once.

    To be called before anything is read, written or printed. Setting glibc.malloc.hugetlb to 0 in the
    environment variable GLIBC_TUNABLES keeps the pages as they are.
    """
    try:
        kernel = _KERNEL.read_text()
    except OSError:
        return
    environment = wished_environment(dict(os.environ), kernel, platform.libc_ver()[0])
    if environment is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
