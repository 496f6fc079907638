"""Log lines of accelerators' runtimes that say only that there is no device.

The CUDA plugin and libtpu write them to the standard error of the process when JAX is imported and when a
topology is described, whatever the log level.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_DRIVER = pathlib.Path("/dev/nvidiactl")
_EXPECTED = re.compile(
    rb"cudart_stub\.cc|before absl::InitializeLog\(\) is called|before InitGoogle\(\) is written"
    rb"|Failed to find host bounds|could not determine TPU|Source Location Trace|libtpu_init_utils\.cc"
)


def import_jax_quietly() -> None:
    """Import JAX without the log lines about a missing driver, if its CUDA plugin is installed without one."""
    has_plugin = any(importlib.util.find_spec(name) is not None for name in _PLUGINS)
    if "jax" in sys.modules or not has_plugin or _DRIVER.exists():
        return
    with without_startup_logs():
        importlib.import_module("jax")


@contextlib.contextmanager
def without_startup_logs() -> Iterator[None]:
    """Drop the log lines about a missing driver from standard error; other lines follow at the end."""
    sys.stderr.flush()
    standard_error = os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(standard_error, 2)
            os.close(standard_error)
            file.seek(0)
            lines = [line for line in file if not _EXPECTED.search(line)]
            os.write(2, b"".join(line for line in lines if line.strip()))
