"""One thread of another process is held still, while the process's other threads go on."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WAIT_ALL = 0x40000000  # also for threads that are no children


@contextmanager
def held_thread(thread_id: int) -> Iterator[None]:
    """Hold a thread; the first one of a process has the process's id. Raises OSError where ptrace is not allowed."""
    held, release = threading.Event(), threading.Event()
    errors: list[OSError] = []

    def trace() -> None:
        # Who traces a thread is a thread, too.
        try:
            _ptrace(_SEIZE, thread_id)
            try:
                _ptrace(_INTERRUPT, thread_id)
                os.waitpid(thread_id, _WAIT_ALL)
                held.set()
                release.wait()
            finally:
                _ptrace(_DETACH, thread_id)
        except OSError as error:
            errors.append(error)
        finally:
            held.set()

    tracer = threading.Thread(target=trace)
    tracer.start()
    try:
        held.wait()
        if errors:
            raise errors[0]
        yield
    finally:
        release.set()
        tracer.join()


def _ptrace(request: int, thread_id: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    library.ptrace.restype = ctypes.c_long
    if library.ptrace(request, thread_id, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
