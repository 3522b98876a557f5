"""Processor time of a program and all its descendants."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from sglang_ext.cluster.process_tree import all_processes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_time_s(root_pid: int) -> float:
    """Return the user and system time in seconds that `root_pid` and its living descendants have used."""
    stats = {stat.pid: stat for stat in all_processes()}
    family = _family(root_pid)
    return sum(stats[pid].cpu_ticks for pid in family if pid in stats) / _TICKS_PER_S


def fine_processor_time_s(root_pid: int) -> float:
    """Return the same of the threads that live now, which the scheduler counts in nanoseconds and not in ticks."""
    total_ns = 0
    for pid in _family(root_pid):
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total_ns += int(task.read_text(encoding="ascii").split()[0])
            except OSError:
                continue  # it has ended meanwhile
    return total_ns / 1e9


def _family(root_pid: int) -> set[int]:
    stats = {stat.pid: stat for stat in all_processes()}
    family = {root_pid}
    # A parent may be listed after its child, so go on until no one joins.
    while True:
        children = {pid for pid, stat in stats.items() if stat.parent_pid in family} - family
        if not children:
            return family
        family |= children


class OtherLoad:
    """Describes how busy the machine is with programs that are not this one's: what a measurement suffers from."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._machine_s = _machine_busy_s()
        self._own_s = own_time_s()

    def mean_cores(self) -> float:
        """Return the mean number of cores that others have used; call it when all children have ended."""
        others_s = (_machine_busy_s() - self._machine_s) - (own_time_s() - self._own_s)
        return max(0.0, others_s) / (time.monotonic() - self._began_s)


def _machine_busy_s() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, _steal = ticks
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def own_time_s() -> float:
    """Return the processor time in seconds of this process and of those it has waited for."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in own)
