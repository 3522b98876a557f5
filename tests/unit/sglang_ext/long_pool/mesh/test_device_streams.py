"""Marks over a stand-in for torch's events; real ones are in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from sglang_ext.long_pool.mesh.device_streams import CudaStreams


class Event:
    """Keeps how it was made."""

    made: ClassVar[list[bool]] = []
    used_on: ClassVar[list[int]] = []

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.made.append(blocking)

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        self.used_on.append(current.device)
        return True

    def synchronize(self) -> None:
        self.used_on.append(current.device)


class Current(threading.local):
    """The device of a thread, the first one until it has chosen another."""

    device = 0


current = Current()


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """See `torch.cuda.device`."""
    before, current.device = current.device, device.index
    try:
        yield
    finally:
        current.device = before


class Stream:
    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        pass


def test_who_waits_for_a_mark_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is not made so keeps a thread spinning until a layer is done."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(Event, "made", [])
    streams = CudaStreams(torch.device("cuda", 0))
    streams.mark()
    streams.side_stream().mark()
    assert Event.made == [True, True]


def test_a_thread_that_waits_for_a_mark_is_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of links never choose one: they would take memory of GPU 0 in every rank."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(Event, "used_on", [])
    mark = CudaStreams(torch.device("cuda", 3)).mark()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(mark.synchronize).result(60)
        assert thread.submit(mark.is_reached).result(60)
    assert Event.used_on == [3, 3]
    assert current.device == 0
