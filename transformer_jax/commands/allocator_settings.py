"""Settings of glibc's allocator that make training on a CPU faster: memory is kept, in large pages.

Each training step allocates its activations anew. glibc gives so large a block back to the kernel when the
step ends, and the next step faults it in again, page by page; on a virtual machine whose host has taken the
free pages meanwhile, that took longer than the step itself (GPT of 6 layers, width 384: 1.5 s a step with
the memory kept; without, 1.6 to 4.7 s, after a pause the more). glibc reads the wish to keep it, and to be
given pages of 2 MiB rather than 4 KiB, only when a process starts.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
import time

# Commands import this module first: `seconds` of a run is the complete command's.
STARTED = time.perf_counter()

_TUNABLES = "GLIBC_TUNABLES"
# Blocks of every size from one heap, which never shrinks: arenas of other threads hold 64 MiB at most, and
# take what is larger from the kernel whatever the limits say.
_KEPT = {"mmap_max": "0", "trim_threshold": str(2**40), "arena_max": "1"}
_LARGE_PAGES = {"hugetlb": "1"}
_KERNEL = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def wished_environment(environment: dict[str, str], kernel: str, libc: str) -> dict[str, str] | None:
    """The environment to restart with, or None where a restart would change nothing.

    Args:
      environment: the process's own; what it says of glibc's malloc stands.
      kernel: text of the kernel's setting; large pages are given on request under "[madvise]" only.
      libc: name of the C library.
    """
    if libc != "glibc":
        return None
    tunables = environment.get(_TUNABLES, "")
    wishes = _KEPT | (_LARGE_PAGES if "[madvise]" in kernel else {})
    missing = [f"glibc.malloc.{k}={v}" for k, v in wishes.items() if f"glibc.malloc.{k}=" not in tunables]
    if not missing:
        return None
    return environment | {_TUNABLES: ":".join(filter(None, (tunables, *missing)))}


def restart_with_allocator_settings() -> None:
    """Starts the running command again with memory kept, once; elsewhere it returns at once.

    To be called before anything is read, written or printed. A value of one's own for a tunable of glibc's
    malloc in the environment variable GLIBC_TUNABLES is left as it is.
    """
    if not sys.platform.startswith("linux"):
        return
    kernel = _KERNEL.read_text() if _KERNEL.is_file() else ""
    environment = wished_environment(dict(os.environ), kernel, platform.libc_ver()[0])
    if environment is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
