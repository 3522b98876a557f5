"""Two members on one GPU, each in a process of its own: tensors go from memory to memory."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from support.gpu_members import TIMEOUT_S, take_part

pytestmark = pytest.mark.gpu


def members(steps: list[bool]) -> list[Any]:
    """What each of two members found in each step."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for instance in range(2):
        here, there = context.Pipe()
        pipes.append(here)
        processes.append(context.Process(target=take_part, args=(instance, steps, there), daemon=True))
        processes[-1].start()

    def receive(pipe: Any) -> Any:
        assert pipe.poll(2 * TIMEOUT_S), "no answer"
        return pipe.recv()

    try:
        addresses = dict(enumerate(receive(pipe) for pipe in pipes))
        for pipe in pipes:
            pipe.send(addresses)
        found = [receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        return found
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_tensors_of_members_on_one_gpu_stay_in_its_memory() -> None:
    for found in members([False, True, False]):
        first, lost, last = found
        assert first == last == ("SharedDeviceMesh", 30)
        assert "on purpose" in lost
