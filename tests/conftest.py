"""Set up all tests: eight simulated devices, fast compilation, options and common fixtures."""

import contextlib
import gc
import os
import pathlib
import shutil
import tempfile

# Compilation takes nearly all of a test's time. These flags more than halve it: they turn off optimizations of
# machine code and fusion emitters, which the tests do not depend on, and build one LLVM module per program.
# Commands in a separate process (`tests.commands.in_process`) use XLA's defaults, as users do.
FAST_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join(
    (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *FAST_TO_COMPILE)
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Workers and commands share a cache of compiled programs. JAX locks the folder during a write only if the cache
# has a maximum size.
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

# With a maximum size JAX also lists every program before each write, to choose which to evict. With thousands
# of programs this adds up to minutes, during which no other worker can read. The maximum is never reached, so
# eviction is turned off.
with contextlib.suppress(ImportError):
    from jax._src.lru_cache import LRUCache

    assert hasattr(LRUCache, "_evict_if_needed"), "JAX has renamed this method"
    LRUCache._evict_if_needed = lambda self, *, additional_size=0: None
# Commands in separate processes still evict. They share no programs with the tests and get their own folder.
CACHE_OF_COMMANDS = {
    "JAX_COMPILATION_CACHE_DIR": os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "commands")
}

ROOT = pathlib.Path(__file__).parents[1]
_LONGEST = ("test_a_notebook_runs", "test_snippets_run_unchanged")
MAX_MEMORY_MAPS = 25_000  # Linux allows a process 65,530


def without_cache(environment=os.environ):
    """Return the environment without a cache: a process that is killed might leave half a program there."""
    return {name: value for name, value in environment.items() if "CACHE" not in name}


def pytest_unconfigure(config):
    if CACHE is not None:
        shutil.rmtree(CACHE, ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")
    parser.addoption(
        "--soak", action="store_true", help="run the tests marked soak as well, and longer searches"
    )


def pytest_collection_finish(session):
    # What is imported stays, and the collector need not look at it again.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(config, items):
    excluded = {marker for marker in ("long", "soak") if not config.getoption(f"--{marker}")}
    selected = [item for item in items if not excluded & set(item.keywords)]
    config.hook.pytest_deselected(items=[item for item in items if excluded & set(item.keywords)])
    # Notebooks and the commands of a page take minutes each. They run first, because at the end they would
    # leave one worker idle.
    items[:] = sorted(selected, key=lambda item: not item.name.startswith(_LONGEST))


UNROLLED = ComputeOptions.unroll_of
# Layers are scanned as on an accelerator, because unrolled layers take four times as long to compile. The
# setting is global so that it also applies to fixtures with module scope.
ComputeOptions.unroll_of = lambda self, layers: max(1, min(self.unroll or 1, layers))


@pytest.fixture(autouse=True)
def unroll_if_marked(request, monkeypatch):
    """Unroll stacks, as on a CPU, in a test that is marked `unrolled`."""
    if "unrolled" in request.keywords:
        monkeypatch.setattr(ComputeOptions, "unroll_of", UNROLLED)


@pytest.fixture(autouse=True)
def drop_programs_before_the_map_limit():
    """Drop compiled programs before their memory maps reach the limit of a process, at which XLA crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def shared():
    """Return the folder of development data, which is next to the repository and not part of it."""
    folder = pathlib.Path(os.environ.get("TRANSFORMER_JAX_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"needs the development data in {folder}; set TRANSFORMER_JAX_SHARED")
    return folder
