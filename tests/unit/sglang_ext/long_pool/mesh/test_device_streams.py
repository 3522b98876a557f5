"""Marks over a stand-in for torch's events; real ones are in tests/gpu."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from sglang_ext.long_pool.mesh.device_streams import CudaStreams


class Event:
    """Keeps how it was made."""

    made: ClassVar[list[bool]] = []

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.made.append(blocking)

    def record(self, stream: object) -> None:
        pass


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
