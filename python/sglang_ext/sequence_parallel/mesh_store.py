"""The store through which the members of an epoch find each other, and give up a step that has failed for one.

The coordinator serves it. Each rank of an instance is connected with the same ranks of the others. The instance has a
mesh when all of its ranks have one: they write so into the store, where its first rank, which tells the coordinator,
waits for them.

A step that has failed for one is given up by all, soon. Otherwise a member that waits for one that is stopped, or whose
own peer has given up, would learn of it only at its timeout; and two ranks of one member, one in the ring and one in a
collective of the model, could wait for each other by way of others. Each rank looks for itself, in a thread of its own:
the one that computes may sit in a call.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from sglang_ext.sequence_parallel.mesh import GlooMesh, Mesh, MeshError, first_line
from sglang_ext.sequence_parallel.messages import Welcome
from sglang_ext.sequence_parallel.nccl_mesh import NcclMesh
from sglang_ext.sequence_parallel.ranks import SINGLE_RANK, Ranks

logger = logging.getLogger(__name__)

# Most steps are done before the first look, s.
LOOK_INTERVAL_S = 0.25
_STORE_TIMEOUT_S = 30.0
_EPOCH = re.compile(r"mesh/(\d+)/")
_IS_BUILT = "built"
_CPU = torch.device("cpu")


class ListenError(RuntimeError):
    """An address cannot be had; the text is one line for the user."""

    def __init__(self, option: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        super().__init__(f"{option}: {reason}")


class MeshStore:
    """Where members find each other's addresses; served by threads of its own."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0: any free one. ListenError."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(address)
                listening.listen()
                self.port = int(listening.getsockname()[1])
                # From here on the descriptor is the store's, also where it fails.
                self._store = dist.TCPStore(
                    listening.getsockname()[0],
                    self.port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=_STORE_TIMEOUT_S),
                    master_listen_fd=listening.detach(),
                )
        except (OSError, UnicodeError, RuntimeError) as error:
            raise ListenError(f"--host {host} --store-port {port}", error) from None

    def give_up(self, epoch: int, sequence: int) -> None:
        """Tell all members that compute this step to stop."""
        give_up(self._store, epoch, sequence)

    def forget_before(self, epoch: int) -> None:
        """Earlier epochs are over, but for the one before: its steps may still be given up."""
        for key in self._store.list_keys():
            if (found := _EPOCH.match(key)) and int(found[1]) < epoch - 1:
                self._store.delete_key(key)


def connect_mesh(
    welcome: Welcome,
    epoch: int,
    members: tuple[int, ...],
    timeout_s: float,
    ranks: Ranks = SINGLE_RANK,
    device: torch.device = _CPU,
) -> Mesh:
    """This rank's links to the other members in one epoch, for tensors on `device`; blocks.

    Raises MeshError without all of them within `timeout_s`, on the first rank also where another rank has failed.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        # A store of its own for each: one that waits for a lost member would keep the next epoch waiting.
        store = dist.TCPStore(welcome.store_host, welcome.store_port, is_master=False, timeout=timeout)
        key = f"mesh/{epoch}/instance{welcome.instance}/rank"
        try:
            mesh = make_mesh(store, f"mesh/{epoch}/rank{ranks.rank}", members, welcome.instance, timeout_s, device)
        except MeshError as error:
            store.set(f"{key}{ranks.rank}", str(error))
            raise
        mesh.watch(StepWatch(store, epoch, mesh.interrupt))
        store.set(f"{key}{ranks.rank}", _IS_BUILT)
        if ranks.rank == 0:
            _wait_for_others(store, [f"{key}{rank}" for rank in range(1, ranks.size)])
    except MeshError:
        raise
    except RuntimeError as error:
        raise MeshError(f"mesh {epoch}: {first_line(error)}") from None
    return mesh


def make_mesh(
    store: dist.Store, name: str, members: Sequence[int], instance: int, timeout_s: float, device: torch.device
) -> GlooMesh | NcclMesh:
    """By the kind of device: gloo for host memory, NCCL for a GPU's. Raises MeshError."""
    if device.type == "cpu":
        return GlooMesh(store, name, members, instance, timeout_s)
    return NcclMesh(store, name, members, instance, timeout_s, device)


def _wait_for_others(store: dist.Store, keys: list[str]) -> None:
    for key in keys:
        answer = store.get(key).decode()  # waits
        if answer != _IS_BUILT:
            raise MeshError(answer)


def give_up(store: dist.Store, epoch: int, sequence: int) -> None:
    """Tell all ranks that a step has come to nothing. Raises RuntimeError without the store."""
    store.set(_key(epoch, sequence), "")


class StepWatch:
    """One rank's. Belongs to the thread that takes part in steps."""

    def __init__(self, store: dist.TCPStore, epoch: int, interrupt: Callable[[], None]) -> None:
        """`interrupt` makes the calls under way fail; another thread calls it, while the object that it is of lives."""
        self._store = store
        # A client serves one call at a time.
        self._looking = store.clone()
        self._epoch = epoch
        self._interrupt = weakref.WeakMethod(interrupt)
        self._sequence: int | None = None  # of the step under way, until it fails

    @contextmanager
    def step(self, sequence: int) -> Iterator[None]:
        """Inside, a step is under way."""
        has_ended = threading.Event()
        self._sequence = sequence
        threading.Thread(target=self._look, args=(sequence, has_ended), name="cdsp-step-watch", daemon=True).start()
        try:
            yield
        finally:
            self._sequence = None
            has_ended.set()

    def fail(self) -> None:
        """The step under way has failed here: all others may give it up."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            # The step does not wait for a store that does not answer.
            threading.Thread(target=self._announce, args=(sequence,), name="cdsp-give-up", daemon=True).start()

    def _look(self, sequence: int, has_ended: threading.Event) -> None:
        try:
            while not has_ended.wait(LOOK_INTERVAL_S):
                if self._looking.check([_key(self._epoch, sequence)]):
                    interrupt = self._interrupt()
                    if interrupt is not None and not has_ended.is_set():
                        interrupt()
                    return
        except RuntimeError as error:
            logger.debug("cdsp: step %d is not watched any more: %s", sequence, error)

    def _announce(self, sequence: int) -> None:
        try:
            give_up(self._store, self._epoch, sequence)
        except RuntimeError as error:
            logger.debug("cdsp: step %d is given up without telling the others: %s", sequence, error)


def _key(epoch: int, sequence: int) -> str:
    return f"mesh/{epoch}/given_up/{sequence}"
