"""Settings of glibc's allocator that make training on a CPU faster: memory is kept, in large pages.

Each training step allocates its activations. By default glibc returns blocks of this size to the kernel after
the step, and the next step causes page faults for all of them (GPT with 6 layers and width 384 on a virtual
machine: 1.5 s per step with the memory kept, 1.6 to 4.7 s without). Only a starting process reads glibc's
settings, which keep the memory and request pages of 2 MiB instead of 4 KiB.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
import time

# Commands import this module first, so that `seconds` of a run covers the complete command.
START_TIME = time.perf_counter()

_TUNABLES = "GLIBC_TUNABLES"
# All blocks come from one heap that never shrinks: arenas of other threads hold at most 64 MiB and request
# larger blocks from the kernel regardless of the limits.
_KEPT = {"mmap_max": "0", "trim_threshold": str(2**40), "arena_max": "1"}
_LARGE_PAGES = {"hugetlb": "1"}
_KERNEL = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_environment(environment: dict[str, str], kernel: str, libc: str) -> dict[str, str] | None:
    """Return the environment to restart with, or None if a restart would change nothing.

    Args:
      environment: Environment of the process; its values for glibc's malloc take precedence.
      kernel: Text of the kernel's setting; only "[madvise]" grants large pages on request.
      libc: Name of the C library.
    """
    if libc != "glibc":
        return None
    tunables = environment.get(_TUNABLES, "")
    settings = _KEPT | (_LARGE_PAGES if "[madvise]" in kernel else {})
    missing = [f"glibc.malloc.{k}={v}" for k, v in settings.items() if f"glibc.malloc.{k}=" not in tunables]
    if not missing:
        return None
    return environment | {_TUNABLES: ":".join(filter(None, (tunables, *missing)))}


def restart_with_allocator_settings() -> None:
    """Restart the running command once with these settings on Linux; otherwise do nothing.

    Call it before anything is read, written or printed. Tunables of glibc's malloc that the environment
    variable GLIBC_TUNABLES already sets are preserved.
    """
    if not sys.platform.startswith("linux"):
        return
    kernel = _KERNEL.read_text() if _KERNEL.is_file() else ""
    environment = restart_environment(dict(os.environ), kernel, platform.libc_ver()[0])
    if environment is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
