"""Start-up and agreement of the processes of one run.

Each process runs the same command and holds its part of the arrays (see `mesh`). The processes agree on
everything else (contents of the run's folder, whether to stop, which checkpoint to read) through the key-value
store of JAX's coordination service, which the first process hosts. All processes must call `gather` and the
functions built on it in the same order; in a run of one process they return at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax

from transformer_jax.errors import UserError

T = TypeVar("T")
P = ParamSpec("P")

# Seconds to wait for another process's answer; training a tokenizer takes minutes.
PATIENCE = 3600
_PART = 1_000_000  # bytes of one value in the store; gRPC limits a message to 4 MB
_rounds = itertools.count()


class SharedError(UserError):
    """Error that every process raises and only the first reports."""


class ProcessLost(UserError):
    """Error after another process has died: this one must end too, without waiting for it."""


# Status codes that start the errors of collectives and the coordination service when a process has died.
_LOST = (
    "UNKNOWN", "UNAVAILABLE", "INTERNAL", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION",
)  # fmt: skip


@contextlib.contextmanager
def reporting_lost_process() -> Iterator[None]:
    """Raise `ProcessLost` instead of the errors of programs and calls that wait for a lost process."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if jax.process_count() == 1 or not str(error).startswith(_LOST):
            raise
        line = " ".join(str(error).split())[:200]
        raise ProcessLost(
            f"process {jax.process_index()} lost the connection to another one ({line}): read its output, and "
            "start all processes again to resume from the last checkpoint"
        ) from error


def process_number() -> int:
    """Return the number of this process, 0 in a single process, without initializing devices."""
    return _state().process_id


def connected() -> bool:
    """Return whether this process has joined a run of several processes."""
    return _store() is not None


def is_first() -> bool:
    """Return whether this is the process that writes files and results."""
    return process_number() == 0


@dataclasses.dataclass(frozen=True)
class Processes:
    """Settings for a run of several processes, each started with the same command."""

    coordinator: str | None = None
    """HOST:PORT of process 0, for a run over several processes. SLURM, Open MPI, Kubernetes and TPU pods are
    detected and need none of these three flags."""
    num_processes: int | None = None
    """Number of processes; set it with --coordinator."""
    process_id: int | None = None
    """Number of this process, from 0; set it with --coordinator."""
    join_timeout: float = 300.0
    """Seconds to wait for the other processes at start-up."""

    def join(self) -> None:
        """Join the run's processes, if there are several; only the first then prints results.

        Raises:
          UserError: See the function `join`.
        """
        join(self.coordinator, self.num_processes, self.process_id, timeout=self.join_timeout)
        if jax.process_count() == 1:
            return
        # C++ libraries report their connections on standard output, which is reserved for results.
        results = os.dup(1) if is_first() else os.open(os.devnull, os.O_WRONLY)
        os.dup2(2, 1)
        sys.stdout = open(results, "w", encoding="utf-8", buffering=1)  # noqa: SIM115


def _launcher(environment: Mapping[str, str]) -> str | None:
    """Return the launcher that started several processes, judged by the environment, or None."""

    def number(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdigit() else 0

    if number("SLURM_STEP_NUM_TASKS") > 1:
        return "SLURM"
    if number("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    several = "," in environment.get("TPU_WORKER_HOSTNAMES", "") or number("MEGASCALE_NUM_SLICES") > 1
    if several and importlib.util.find_spec("libtpu"):
        return "a TPU pod"
    return None


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout: float = 300,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Join the processes of a run, before any device is used; do nothing in a run of one process.

    Args:
      coordinator: HOST:PORT of process 0, reachable by all processes. None uses the settings of SLURM, Open
        MPI, Kubernetes or a TPU pod if they started several processes.
      num_processes: Number of processes.
      process_id: Number of this process, from 0.
      timeout: Seconds to wait for the other processes.
      environment: Environment variables of this process.

    Raises:
      UserError: Only some of the first three arguments are set, a value is malformed, the coordinator cannot be
        reached, or a process does not join in time.
    """
    values = {"`coordinator`": coordinator, "`num_processes`": num_processes, "`process_id`": process_id}
    missing = [flag for flag, value in values.items() if value is None]
    launcher = _launcher(environment) if missing else None
    if len(missing) == 3 and launcher is None:
        return
    if missing and launcher is None:
        raise UserError(
            f"{', '.join(missing)} must be set together with {' and '.join(sorted(set(values) - set(missing)))}"
        )
    if num_processes is not None and num_processes < 1:
        raise UserError(f"`num_processes` {num_processes} is below 1")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        raise UserError(f"`process_id` {process_id} is not one of 0 to {(num_processes or 1) - 1}")
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise UserError(f"`coordinator` {coordinator} is not HOST:PORT, as in 10.0.0.1:9876")
        start_time = time.monotonic()
        if process_id == 0:
            _check_free(coordinator, int(port))
        elif process_id is not None:
            _reach(coordinator, host, int(port), timeout)
        timeout -= time.monotonic() - start_time
    # JAX's preemption service would hide SIGTERM from Python until training starts.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=max(1, int(timeout))
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        started = f" as started by {launcher}" if launcher else ""
        raise UserError(f"the processes of the run could not connect{started} ({reason})") from None
    # On CPUs, two programs in flight could receive each other's messages.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _check_free(coordinator: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"`coordinator` {coordinator}: port {port} cannot be used ({error.strerror})"
            ) from None


def _reach(coordinator: str, host: str, port: int, timeout: float) -> None:
    """Wait until process 0 listens; JAX itself would abort with a C++ stack trace."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(10, end - time.monotonic()))).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                reason = error.strerror or error
                raise UserError(
                    f"`coordinator` {coordinator} cannot be reached for {timeout:.0f} s ({reason}): is process "
                    "0 running there, and the port open?"
                ) from None
        time.sleep(0.5)


def _state() -> Any:
    # JAX has no public interface to the coordination client; Orbax imports it in this way too.
    from jax._src import distributed

    return distributed.global_state


def _store() -> Any:
    return _state().client


def _put(key: str, text: str) -> None:
    packed = zlib.compress(text.encode("utf-8"))
    parts = [packed[start : start + _PART] for start in range(0, len(packed), _PART)]
    for number, part in enumerate(parts):
        _store().key_value_set_bytes(f"transformer_jax/{key}/{number}", part)
    _store().key_value_set_bytes(f"transformer_jax/{key}/parts", str(len(parts)).encode())


def _get(key: str) -> str:
    def value(name: str) -> bytes:
        return _store().blocking_key_value_get_bytes(f"transformer_jax/{key}/{name}", PATIENCE * 1000)

    packed = b"".join(value(str(number)) for number in range(int(value("parts"))))
    return zlib.decompress(packed).decode("utf-8")


def gather(text: str) -> list[str]:
    """Return the texts of all processes, in the order of their numbers."""
    if jax.process_count() == 1:
        return [text]
    number = next(_rounds)
    _put(f"{number}/{jax.process_index()}", text)
    return [_get(f"{number}/{process}") for process in range(jax.process_count())]


def broadcast_from_first(make: Callable[[], T]) -> T:
    """Call `make` in the first process and return its value, which must be JSON, in all processes.

    Raises:
      UserError: `make` raised it; all processes raise the same error.
    """
    if jax.process_count() == 1:
        return make()
    key = str(next(_rounds))
    if not is_first():
        answer = json.loads(_get(key))
        if "error" in answer:
            raise SharedError(answer["error"])
        return answer["value"]
    try:
        value = make()
    except UserError as error:
        _put(key, json.dumps({"error": str(error)}))
        raise SharedError(str(error)) from error
    except BaseException as error:
        _put(key, json.dumps({"error": f"process 0 ended with {type(error).__name__}: {error}"}))
        raise
    _put(key, json.dumps({"value": value}))
    return value


def on_every_process(make: Callable[[], T]) -> T:
    """Call `make` in every process and return its value here, after it has succeeded in all of them.

    Raises:
      UserError: `make` raised it in any process; all processes raise the error.
    """
    if jax.process_count() == 1:
        return make()
    try:
        value, message = make(), ""
    except UserError as error:
        message = str(error)
    except BaseException as error:
        gather(f"ended with {type(error).__name__}: {error}")
        raise
    messages = gather(message)
    failed = [number for number, message in enumerate(messages) if message]
    if failed:
        same = len(set(messages)) == 1
        raise SharedError(messages[0] if same else f"process {failed[0]}: {messages[failed[0]]}")
    return value


def agreed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that every process calls: it returns only after it has succeeded in all of them.

    See `on_every_process`.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        return on_every_process(lambda: function(*args, **kwargs))

    return wrapped


def on_first_then_every_process(make: Callable[[], T]) -> T:
    """Call `make` in the first process, for example to download files, and then in every process.

    Raises:
      UserError: `make` raised it in any process; all processes raise the error.
    """
    if jax.process_count() > 1:
        broadcast_from_first(lambda: make() is None)
    return on_every_process(make)


def check_same(described: Mapping[str, Any]) -> None:
    """Check that every process describes the run by the same values.

    Raises:
      UserError: A process has a different value; the message names it.
    """
    texts = gather(json.dumps(described))
    first = json.loads(texts[0])
    for process, peer in enumerate(map(json.loads, texts)):
        different = [name for name in {**first, **peer} if first.get(name) != peer.get(name)]
        if different:
            name = different[0]
            raise SharedError(
                f"process {process} has a different config from process 0 ({name.replace('_', '-')} is "
                f"{peer.get(name)!r}, not {first.get(name)!r}): start all processes with the same command"
            )


def new_name(kind: str) -> str:
    """Return an unused name for `publish`, the same in every process."""
    return f"{kind}-{next(_rounds)}"


def publish(name: str, value: str, *, overwrite: bool = True) -> None:
    """Store a value that every process can look up, from any thread at any time.

    Args:
      name: "kind-3/part", see `new_name`.
      value: Any text.
      overwrite: Replace an existing value; otherwise keep it.
    """
    try:
        _store().key_value_set(f"transformer_jax/{name}", value, allow_overwrite=overwrite)
    except RuntimeError:
        if overwrite:
            raise


def read_published(name: str) -> dict[str, str]:
    """Return the values published so far under a name of `new_name`, by part."""
    return {
        key.rsplit("/", 1)[-1]: value for key, value in _store().key_value_dir_get(f"transformer_jax/{name}/")
    }
