"""Shared by all tests: eight fake devices, the development data, and a small trained run."""

import gc
import os
import pathlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAPPED = 25_000  # of the 65,530 memory maps that Linux lets a process have


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        chosen = [item for item in items if "long" not in item.keywords]
        config.hook.pytest_deselected(items=[item for item in items if "long" in item.keywords])
        items[:] = chosen


@pytest.fixture(autouse=True)
def programs_are_dropped_in_time():
    """Each compiled program holds some memory maps; those of hundreds of tests reach the limit: XLA crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPED:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def shared():
    """The folder of development data, which lies beside the project and is not part of it."""
    folder = pathlib.Path(os.environ.get("TRANSFORMER_JAX_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs the development data in {folder}; set TRANSFORMER_JAX_SHARED")
    return folder
