"""Processor time of a program and all its descendants."""

from __future__ import annotations

import os

from sglang_ext.cluster.process_tree import all_processes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_time_s(root_pid: int) -> float:
    """Return the user and system time in seconds that `root_pid` and its living descendants have used."""
    stats = {stat.pid: stat for stat in all_processes()}
    family = {root_pid}
    # A parent may be listed after its child, so go on until no one joins.
    while True:
        children = {pid for pid, stat in stats.items() if stat.parent_pid in family} - family
        if not children:
            break
        family |= children
    return sum(stats[pid].cpu_ticks for pid in family if pid in stats) / _TICKS_PER_S
