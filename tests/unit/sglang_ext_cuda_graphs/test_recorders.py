"""How CUDA graphs are captured, over a stand-in for torch's CUDA that keeps its rules; the real one is in tests/gpu."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sglang_ext_cuda_graphs.recorders import CudaRecorder, collection_frozen
from support.fake_cuda import Cuda, Stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    cuda.install(monkeypatch)
    return cuda


def nothing() -> None:
    pass


def test_the_pool_the_stream_and_the_context_are_those_that_were_given(cuda: Cuda) -> None:
    stream, entered = Stream("shared"), []

    @contextmanager
    def context(given: Any) -> Iterator[None]:
        entered.append(given)
        with cuda.stream(given):
            yield

    recorder = CudaRecorder((0, 7), stream, context)  # type: ignore[arg-type]
    with recorder.session():
        assert cuda.current is stream
        recorder.warm_up(nothing)
        recorder.record(nothing)
        recorder.record(nothing)
    assert cuda.pools_of_captures == [(0, 7)] * 2
    assert entered == [stream]
    assert [one.name for one in stream.waited] == ["forward"]  # what was launched before is seen by the captures
    assert cuda.current.name == "forward"


def test_two_warm_ups_and_then_one_for_each(cuda: Cuda) -> None:
    recorder = CudaRecorder()
    runs = []
    with recorder.session():
        for _ in range(3):
            runs.append(0)

            def compute() -> None:
                runs[-1] += 1

            recorder.warm_up(compute)
            recorder.record(nothing)
    assert runs == [2, 1, 1]


def test_no_garbage_is_collected_in_a_session(cuda: Cuda) -> None:
    assert gc.isenabled()
    recorder = CudaRecorder()
    with recorder.session():
        recorder.record(nothing)
    assert cuda.gc_in_captures == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("is_ended", [True, False])
def test_after_a_failure_captures_go_on_and_numbers_are_drawn(cuda: Cuda, is_ended: bool) -> None:
    def computation_fails() -> None:
        raise ValueError("the model has no such layer")

    told: list[Any] = []
    recorder = CudaRecorder((0, 7), on_new_pool=told.append)
    with recorder.session():
        with pytest.raises((ValueError, RuntimeError)):
            recorder.record(computation_fails if is_ended else cuda.break_capture)
        cuda.draw()
        recorder.record(nothing)
    assert cuda.current.name == "forward"
    assert not cuda.recording
    # SGLang's own graphs, which come later, share the pool, or the one that takes its place.
    assert told == ([] if is_ended else [recorder.pool])
    assert is_ended == (recorder.pool == (0, 7))
    CudaRecorder(recorder.pool).record(nothing)


def test_a_device_that_is_lost_says_the_first_error(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CudaRecorder()

    @contextmanager
    def lost(*args: Any, **kwargs: Any) -> Iterator[None]:
        raise RuntimeError("an illegal memory access was encountered")
        yield

    monkeypatch.setattr(torch.cuda, "graph", lost)
    with recorder.session(), pytest.raises(RuntimeError, match="illegal memory access"):
        recorder.record(nothing)


def collections_during(context: Callable[[], Any]) -> list[int]:
    with context():
        return [gc.get_freeze_count()]


@pytest.mark.slow
def test_what_a_process_has_frozen_stays_frozen() -> None:
    gc.collect()
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        almost_all = pytest.approx(count, rel=1e-3)  # other threads may let go of some
        assert collections_during(collection_frozen) == [almost_all]
        assert gc.get_freeze_count() == almost_all
        assert count > 0
    finally:
        gc.unfreeze()
    assert collections_during(collection_frozen)[0] > 0
    assert gc.get_freeze_count() == 0
