"""A lock on a run folder, so that two commands do not train one run at the same time.

It is a lock of the operating system on the file `.lock`, which ends with its process, however that ends. On a
shared folder it holds between machines if the file system has locks, as NFS has; otherwise a warning says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import warnings
from collections.abc import Iterator

from transformer_jax.errors import UserError

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is created if it does not exist.

    A folder that holds nothing but the lock at the end is removed.

    Raises:
      UserError: Another process holds the lock, or the folder cannot be written.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path)
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by another command{_holder(path)}: wait until it ends, or name another "
            "`run_dir`"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); name another `run_dir`") from None
    try:
        yield
    finally:
        # The file goes while it is still locked. A process that has opened it meanwhile notices.
        with contextlib.suppress(OSError):
            path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
        os.close(descriptor)


def _holder(path: pathlib.Path) -> str:
    try:
        return f" ({path.read_text()[:200].strip()})"
    except (OSError, UnicodeDecodeError):
        return ""


def _lock(path: pathlib.Path) -> int:
    """Lock a file and return its descriptor.

    Raises:
      BlockingIOError: Another process holds the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                raise BlockingIOError from None
            reason = f"the file system of {path.parent} has no locks ({error.strerror})"
            warnings.warn(f"{reason}: do not run two commands on it", stacklevel=2)
        # The previous holder removes the file, so the locked file may not be the one that others find.
        try:
            same = os.path.samestat(os.fstat(descriptor), os.stat(path))
        except FileNotFoundError:
            same = False
        if same:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return descriptor
        os.close(descriptor)
