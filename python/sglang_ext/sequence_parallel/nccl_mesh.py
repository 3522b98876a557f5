"""A mesh over NCCL for tensors in the memory of GPUs. No member of a pool uses it yet: see docs/long-pool.md.

NCCL knows no tags and runs what a pair of members starts in the order in which both have started it, in kernels that
wait for each other. So calls that must not wait for each other are started as one group (`batch`), and all go through
one communicator, which has a stream of its own and connects all pairs before anything is computed. Waiting makes the
computation's stream wait and returns at once; only `settle` blocks, and only there a lost peer is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang_ext.sequence_parallel.mesh import MeshError, Pending, first_line

# The timeouts of torch.distributed end the process; ours ends the step.
_NEVER = timedelta(days=365)
_POLL_S = 0.0002


class NcclMesh:
    """See `mesh.Mesh`. Belongs to one thread; only `interrupt` may be called from others."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        members: Sequence[int],
        instance: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Connect to all members, which must do the same, on `device`; raises MeshError.

        `timeout_s` bounds the wait for the others here, and every `settle`.
        """
        self.members = tuple(members)
        self._rank = {member: rank for rank, member in enumerate(self.members)}
        self._instance = instance
        self._device = device
        self._timeout_s = timeout_s
        self._works: list[dist.Work] = []  # that `settle` waits for
        self._batch: list[_NcclCall] | None = None
        self._is_interrupted = False
        try:
            self._group = _connect(store, name, self._rank[instance], len(self.members), timeout_s, device)
            self._greet()
        except RuntimeError as error:
            raise MeshError(f"{name} of instances {list(members)}: {first_line(error)}") from None

    def send(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._start(self._group.send, tensor, instance)

    def receive(self, tensor: torch.Tensor, instance: int, tag: int) -> Pending:
        return self._start(self._group.recv, tensor, instance)

    @contextmanager
    def batch(self) -> Iterator[None]:
        calls = self._batch = []
        self._group._start_coalescing()
        try:
            yield
        finally:
            self._batch = None
            work = self._end_coalescing(has_calls=bool(calls))
        for call in calls:
            call.work = work

    def settle(self) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        try:
            for work in self._works:
                while not work.is_completed() and not self._is_interrupted:
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(f"nothing has come for {self._timeout_s:g} s")
                    time.sleep(_POLL_S)
            if self._is_interrupted:
                raise RuntimeError("the step has been given up")
        except RuntimeError as error:
            self.interrupt()
            raise self.fail("settle", error) from None
        finally:
            self._works = []

    def interrupt(self) -> None:
        """End what is under way; the mesh is of no use any more."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._group.abort()

    def fail(self, what: str, error: RuntimeError) -> MeshError:
        """The error for a call that failed."""
        return MeshError(f"{what}: {first_line(error)}")

    def _start(self, call: Callable[..., dist.Work], tensor: torch.Tensor, instance: int) -> Pending:
        if self._batch is None:
            with self.batch():
                return self._start(call, tensor, instance)
        try:
            if self._is_interrupted:
                raise RuntimeError("the step has been given up")
            call([tensor.view(-1)], self._rank[instance], 0)
        except RuntimeError as error:
            raise self.fail(f"instance {instance}", error) from None
        pending = _NcclCall(self, tensor)
        self._batch.append(pending)
        return pending

    def _end_coalescing(self, *, has_calls: bool) -> dist.Work | None:
        try:
            work: dist.Work | None = self._group._end_coalescing()
        except RuntimeError as error:
            raise self.fail("batch", error) from None
        if not has_calls:
            return None
        if work is not None:
            self._works.append(work)
        return work

    def _greet(self) -> None:
        """Send a byte to every member and receive one, so that no pair connects in the middle of a layer."""
        others = [member for member in self.members if member != self._instance]
        ours = torch.zeros(1, dtype=torch.uint8, device=self._device)
        theirs = [torch.empty_like(ours) for _ in others]
        with self.batch():
            calls = [self.receive(tensor, member, 0) for member, tensor in zip(others, theirs, strict=True)]
            calls += [self.send(ours, member, 0) for member in others]
        for call in calls:
            call.wait()
        self.settle()


class _NcclCall:
    def __init__(self, mesh: NcclMesh, tensor: torch.Tensor) -> None:
        self._mesh = mesh
        self._tensor = tensor  # until it has been waited for
        self.work: dist.Work | None = None  # of the batch

    def wait(self) -> None:
        if self.work is None:
            raise self._mesh.fail("wait", RuntimeError("its batch has not been started"))
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._mesh.fail("wait", error) from None


def _connect(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float, device: torch.device
) -> dist.ProcessGroupNCCL:
    if not dist.is_nccl_available():
        raise RuntimeError("this PyTorch has no NCCL")
    prefixed = dist.PrefixStore(name, store)
    # NCCL waits for missing ranks for ever: so that it need not, all are there first.
    prefixed.set(f"here/{rank}", "")
    prefixed.wait([f"here/{other}" for other in range(size)], timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    options.is_high_priority_stream = True
    group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    group.eager_connect_single_device(device)
    return group
