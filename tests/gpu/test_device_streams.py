"""Marks of a real stream."""

from __future__ import annotations

import time

import pytest
import torch

from sglang_ext.long_pool.mesh.device_streams import CudaStreams

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 1_000_000_000  # more than 0.3 s at the clock rate of any GPU of today


def test_a_thread_that_waits_for_a_mark_takes_no_core() -> None:
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda._sleep(SPIN_CYCLES)
    mark = streams.mark()
    assert not mark.is_reached()
    began_s, core_began_s = time.perf_counter(), time.thread_time()
    mark.synchronize()
    waited_s, core_s = time.perf_counter() - began_s, time.thread_time() - core_began_s
    assert mark.is_reached()
    assert waited_s > 0.1
    assert core_s < 0.2 * waited_s


def test_a_device_has_an_identity_of_sixteen_bytes() -> None:
    streams = CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    assert len(streams.identity) == 16
    assert streams.identity != bytes(16)
