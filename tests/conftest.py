"""Shared by all tests: eight fake devices, the development data, and a small trained run."""

import contextlib
import gc
import os
import pathlib
import shutil
import tempfile

# Nearly all of a test's time is XLA's for compiling. Neither its optimizations of machine code nor its emitters
# of fused loops change what is tested here; without the emitters, and with one LLVM module a program, it takes
# less than half of the time. Commands in a process of their own have XLA as users have it
# (`tests.commands.in_process`).
FAST_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *FAST_TO_COMPILE)
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is compilation. What one worker or command has compiled the others read; the size makes
# JAX lock the folder while it writes.
CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = tempfile.mkdtemp(prefix="transformer_jax-programs-")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": CACHE,
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(8 * 2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from transformer_jax.layers.compute_options import ComputeOptions  # noqa: E402

# With a size JAX also looks at every program of the folder before it writes one, for what to drop; of thousands
# of programs that takes minutes in all, in which no other worker may read. Nothing comes near the size.
with contextlib.suppress(ImportError):
    from jax._src.lru_cache import LRUCache

    assert hasattr(LRUCache, "_evict_if_needed"), "JAX calls it otherwise now"
    LRUCache._evict_if_needed = lambda self, *, additional_size=0: None
# Commands in processes of their own are not reached by that, and have no programs in common with the tests.
CACHE_OF_COMMANDS = {
    "JAX_COMPILATION_CACHE_DIR": os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "commands")
}

ROOT = pathlib.Path(__file__).parents[1]
MAPPED = 25_000  # of the 65,530 memory maps that Linux lets a process have


def without_cache(environment=os.environ):
    """The environment for a process that is killed: it would leave half a program in the cache."""
    return {name: value for name, value in environment.items() if "CACHE" not in name}


def pytest_unconfigure(config):
    if CACHE is not None:
        shutil.rmtree(CACHE, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")
    parser.addoption(
        "--soak", action="store_true", help="run the tests marked soak as well, and longer searches"
    )


def pytest_collection_modifyitems(config, items):
    left_out = {marker for marker in ("long", "soak") if not config.getoption(f"--{marker}")}
    chosen = [item for item in items if not left_out & set(item.keywords)]
    config.hook.pytest_deselected(items=[item for item in items if left_out & set(item.keywords)])
    # Notebooks take minutes each: begun last, one worker would run them while the other has nothing left.
    items[:] = sorted(chosen, key=lambda item: "a_notebook_runs" not in item.name)


UNROLLED = ComputeOptions.unroll_of
# Layers are scanned, as on an accelerator: unrolled they take four times as long to compile. Set here, so that
# fixtures of modules scan them too.
ComputeOptions.unroll_of = lambda self, layers: max(1, min(self.unroll or 1, layers))


@pytest.fixture(autouse=True)
def stacks_are_unrolled_where_marked(request, monkeypatch):
    """A test of unrolled stacks, as a CPU has them, has the marker `unrolled`."""
    if "unrolled" in request.keywords:
        monkeypatch.setattr(ComputeOptions, "unroll_of", UNROLLED)


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
