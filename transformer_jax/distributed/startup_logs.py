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
_NO_DEVICE_LINES = re.compile(
    rb"cudart_stub\.cc|before absl::InitializeLog\(\) is called|before InitGoogle\(\) is written"
    rb"|Failed to find host bounds|could not determine TPU|Source Location Trace|libtpu_init_utils\.cc"
)


def import_jax_quietly() -> None:
    """Import JAX, and drop its log lines about a missing driver.

    Nothing happens if JAX is imported already or has no CUDA plugin, or if the driver exists.
    """
    has_plugin = any(importlib.util.find_spec(name) is not None for name in _PLUGINS)
    if "jax" in sys.modules or not has_plugin or _DRIVER.exists():
        return
    with without_startup_logs():
        importlib.import_module("jax")


@contextlib.contextmanager
def without_startup_logs() -> Iterator[None]:
    """Hold back standard error, and write it at the end without the lines about a missing device."""
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
            lines = [line for line in file if not _NO_DEVICE_LINES.search(line)]
            os.write(2, b"".join(line for line in lines if line.strip()))
