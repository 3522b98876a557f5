"""A step that has failed for one is given up by all, soon: through the store that the meshes are built with.

Otherwise a member that waits for one that is stopped, or whose own peer has given up, would learn of it only when its
patience ends; and two ranks of one member, one in the ring and one in a collective of the model, could wait for each
other by way of others. Each rank looks for itself, in a thread of its own: the one that computes may sit in a call.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

logger = logging.getLogger(__name__)

# Most steps are done before anybody looks, s.
LOOK_INTERVAL_S = 0.25


def give_up(store: dist.Store, epoch: int, sequence: int) -> None:
    """Tell everybody that a step has come to nothing. Raises RuntimeError without the store."""
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
            # Nobody waits for a store that does not answer.
            threading.Thread(target=self._tell, args=(sequence,), name="cdsp-give-up", daemon=True).start()

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

    def _tell(self, sequence: int) -> None:
        try:
            give_up(self._store, self._epoch, sequence)
        except RuntimeError as error:
            logger.debug("cdsp: step %d is given up without a word: %s", sequence, error)


def _key(epoch: int, sequence: int) -> str:
    return f"mesh/{epoch}/given_up/{sequence}"
