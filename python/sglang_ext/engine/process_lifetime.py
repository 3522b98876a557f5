"""Processes that end with the process that started them, also when that process is killed with SIGKILL (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import MutableMapping

PARENT_VARIABLE = "SGLANG_EXT_PARENT_PID"
_PR_SET_PDEATHSIG = 1


class OrphanError(RuntimeError):
    """The parent process ended before this process could ask to end with it."""


def end_with_parent(parent_pid: int, sent: signal.Signals) -> None:
    """Ask the kernel for the signal `sent` when the parent ends; survives execve, not fork.

    The kernel means the thread that started this process: that one has to live as long as the parent.
    Raises OrphanError when `parent_pid` is no longer the parent.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sent), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise OrphanError(f"the parent process {parent_pid} has ended")


def join_process_tree(environment: MutableMapping[str, str], *, is_child: bool) -> None:
    """Call first in each process of an engine, so that no child outlives its parent.

    SGLang does the same only after its imports; a parent that is killed in those seconds would leave its
    children behind. Each process leaves its id in `environment` for the children that it starts.
    Raises OrphanError in a child whose parent has ended.
    """
    parent = environment.get(PARENT_VARIABLE)
    if is_child and parent is not None:
        end_with_parent(int(parent), signal.SIGKILL)
    environment[PARENT_VARIABLE] = str(os.getpid())
