"""One run over many processes: how they find each other, and how they agree.

Each process runs the same command and holds its part of the arrays (see `mesh`). What is no array, they agree
on through the key-value store of JAX's coordination service, which the first process keeps: what is in the
run's folder, whether to stop, which checkpoint to take. All processes call `gather` and what is made of it in
the same order; one process alone calls them for nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from transformer_jax.errors import UserError

T = TypeVar("T")

# Seconds that one process waits for another's answer: learning a vocabulary takes minutes.
PATIENCE = 3600
_PART = 1_000_000  # bytes of one value of the store; a message of gRPC has 4 MB at most
_rounds = itertools.count()


class SharedError(UserError):
    """An error that every process raises, and the first one reports."""


class ProcessLost(UserError):
    """Another process is gone: this one has to end as well, without waiting for it."""


# How the errors of collectives and of the coordination service begin when the other side is gone.
_GONE = (
    "UNKNOWN",
    "UNAVAILABLE",
    "INTERNAL",
    "ABORTED",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
)


@contextlib.contextmanager
def reporting_lost_process() -> Iterator[None]:
    """Raises `ProcessLost` in place of what a program or an answer that waits for a lost process fails with."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if jax.process_count() == 1 or not str(error).startswith(_GONE):
            raise
        line = " ".join(str(error).split())[:200]
        raise ProcessLost(
            f"process {jax.process_index()} lost the connection to another ({line}): see its output, start "
            "all again to go on from the last checkpoint"
        ) from error


def own_number() -> int:
    """The number of this process, 0 where it is alone; unlike `jax.process_index` it needs no devices."""
    return _state().process_id


def connected() -> bool:
    """Whether this process is one of several that have come together."""
    return _store() is not None


def is_first() -> bool:
    """Whether this is the process that writes what one process writes."""
    return own_number() == 0


@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes of one run, each started with the same command."""

    coordinator: str | None = None
    """HOST:PORT of process 0, for a run over several processes. SLURM, Open MPI, Kubernetes and TPU pods are
    detected and need none of these three flags."""
    num_processes: int | None = None
    """Number of processes, with --coordinator."""
    process_id: int | None = None
    """Number of this process, from 0, with --coordinator."""
    join_timeout: float = 300.0
    """Seconds to wait for the other processes at the start."""

    def join(self) -> None:
        """Makes this process one of several if it is one; the first one alone prints results.

        Raises:
          UserError: see `join`.
        """
        join(self.coordinator, self.num_processes, self.process_id, timeout=self.join_timeout)
        if jax.process_count() == 1:
            return
        # Libraries below Python report their connections on standard output, which is for results.
        results = os.dup(1) if is_first() else os.open(os.devnull, os.O_WRONLY)
        os.dup2(2, 1)
        sys.stdout = open(results, "w", encoding="utf-8", buffering=1)  # noqa: SIM115


def _launched(environment: Mapping[str, str]) -> str | None:
    """What has started this process as one of several, as far as its environment says."""

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
    """Makes this process one of several, before any device is used; one process alone stays as it is.

    Args:
      coordinator: HOST:PORT of process 0, where all can reach it. None: as SLURM, Open MPI, Kubernetes or a TPU
        pod say, where one of them has started several processes, else a run of one process.
      num_processes: in all.
      process_id: of this one, from 0.
      timeout: seconds to wait for the others.
      environment: of this process.

    Raises:
      UserError: some of the three but not all, a malformed value, a coordinator that cannot be reached, or
        processes that do not come.
    """
    given = {"`coordinator`": coordinator, "`num_processes`": num_processes, "`process_id`": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    launcher = _launched(environment) if missing else None
    if len(missing) == 3 and launcher is None:
        return
    if missing and launcher is None:
        raise UserError(
            f"{', '.join(missing)} must be set together with {' and '.join(sorted(set(given) - set(missing)))}"
        )
    if num_processes is not None and num_processes < 1:
        raise UserError(f"`num_processes` {num_processes} is below 1")
    if process_id is not None and not 0 <= process_id < (num_processes or process_id + 1):
        raise UserError(f"`process_id` {process_id} is not one of 0 to {(num_processes or 1) - 1}")
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            raise UserError(f"`coordinator` {coordinator} is not HOST:PORT, as in 10.0.0.1:9876")
        began = time.monotonic()
        if process_id == 0:
            _check_free(coordinator, int(port))
        elif process_id is not None:
            _reach(coordinator, host, int(port), timeout)
        timeout -= time.monotonic() - began
    # Its handler of SIGTERM would hide the signal from Python until training begins.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=max(1, int(timeout))
        )
    except (RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        how = f"as {launcher} started them: " if launcher else ""
        raise UserError(f"the processes of the run did not come together {how}({line})") from None
    # Two programs in flight could meet each other's messages on a CPU: they run one after another.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _check_free(coordinator: str, port: int) -> None:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            raise UserError(
                f"`coordinator` {coordinator}: port {port} cannot be used ({error.strerror})"
            ) from None


def _reach(coordinator: str, host: str, port: int, timeout: float) -> None:
    """Waits until process 0 listens. JAX itself would end the process with a stack of C++ lines."""
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
    # The one way to it; Orbax goes it too.
    from jax._src import distributed

    return distributed.global_state


def _store() -> Any:
    return _state().client


def _put(key: str, text: str) -> None:
    packed = zlib.compress(text.encode("utf-8"))
    parts = [packed[at : at + _PART] for at in range(0, len(packed), _PART)]
    for number, part in enumerate(parts):
        _store().key_value_set_bytes(f"transformer_jax/{key}/{number}", part)
    _store().key_value_set_bytes(f"transformer_jax/{key}/parts", str(len(parts)).encode())


def _get(key: str) -> str:
    def value(name: str) -> bytes:
        return _store().blocking_key_value_get_bytes(f"transformer_jax/{key}/{name}", PATIENCE * 1000)

    packed = b"".join(value(str(number)) for number in range(int(value("parts"))))
    return zlib.decompress(packed).decode("utf-8")


def gather(text: str) -> list[str]:
    """The text that each process gives, by its number."""
    if jax.process_count() == 1:
        return [text]
    number = next(_rounds)
    _put(f"{number}/{jax.process_index()}", text)
    return [_get(f"{number}/{process}") for process in range(jax.process_count())]


def broadcast_from_first(make: Callable[[], T]) -> T:
    """What `make` gives in the first process, where alone it is called: a value that JSON can hold.

    Raises:
      UserError: what it raised there, in all processes.
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
    """What `make` gives here, once it has given something in every process.

    Raises:
      UserError: what it raised in one of them, in all.
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


def on_first_then_every_process(make: Callable[[], T]) -> T:
    """What `make` gives here, called in the first process before the others: it downloads what they then find.

    Raises:
      UserError: what it raised in one of them, in all.
    """
    if jax.process_count() > 1:
        broadcast_from_first(lambda: make() is None)
    return on_every_process(make)


def check_same(described: Mapping[str, Any]) -> None:
    """Checks that every process has the same description of the run, values by name.

    Raises:
      UserError: one has another, with what differs.
    """
    texts = gather(json.dumps(described))
    first = json.loads(texts[0])
    for process, other in enumerate(map(json.loads, texts)):
        differ = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differ:
            name = differ[0]
            raise SharedError(
                f"process {process} has another config than process 0 ({name.replace('_', '-')} is "
                f"{other.get(name)!r} there, not {first.get(name)!r}): start all with the same command"
            )


def new_name(kind: str) -> str:
    """A name for `publish` that was not used before, the same in every process."""
    return f"{kind}-{next(_rounds)}"


def publish(name: str, value: str, *, overwrite: bool = True) -> None:
    """Leaves a value that every process can look up; any thread, at any time.

    Args:
      name: "kind-3/part", see `new_name`.
      value: any text.
      overwrite: replace an existing value; otherwise the existing one stays.
    """
    try:
        _store().key_value_set(f"transformer_jax/{name}", value, allow_overwrite=overwrite)
    except RuntimeError:
        if overwrite:
            raise


def published(name: str) -> dict[str, str]:
    """What was left so far below a name of `new_name`, by part."""
    return {
        key.rsplit("/", 1)[-1]: value for key, value in _store().key_value_dir_get(f"transformer_jax/{name}/")
    }
