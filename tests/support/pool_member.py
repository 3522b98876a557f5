"""Members of a long pool as processes of their own, with a toy engine: fast to start, and they can be killed.

with MemberProcesses("127.0.0.1:8990") as members:
    member = members.start(MemberSpec("a"))
    ended = member.outcome(member.offer(token_ids))
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from support.preloaded import preloaded_context

ANSWER_TIMEOUT_S = 30.0
_TOLERANCE = 1e-4


class MemberSpec(NamedTuple):
    """How a member is."""

    name: str
    page_tokens: int = 1
    layer_s: float = 0.0
    pool_tokens: int = 8192
    reported_tokens: int = 8192
    model: str = "toy"
    step_timeout_s: float = 2.0
    key: bytes = b""


class MemberState(NamedTuple):
    free_tokens: int
    is_joined: bool
    is_busy: bool


class Ended(NamedTuple):
    """What has become of a request."""

    kind: str  # "collected", or why it was declined
    tokens: int  # behind the cached prefix, whose KV has come, and is right


class MemberProcess:
    """One of them."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self._unread: list[tuple[str, Any]] = []

    def offer(self, token_ids: Sequence[int], cached_tokens: int = 0) -> int:
        """Offer a prompt; the number of its outcome."""
        self._pipe.send(("offer", (list(token_ids), cached_tokens)))
        number: int = self._wait("offered")
        return number

    def outcome(self, request: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Ended:
        """What has become of it."""
        return self._wait(f"outcome {request}", timeout_s)  # type: ignore[no-any-return]

    def withdraw(self, request: int) -> None:
        self._pipe.send(("withdraw", request))

    def watch(self) -> None:
        """Have it say when the next layer of a chunk begins there; in a chunk it does not listen."""
        self._pipe.send(("watch", None))
        self._wait("watching")

    def wait_for_layer(self) -> None:
        """Until the first layer since `watch` has begun."""
        self._wait("layer")

    def state(self) -> MemberState:
        self._pipe.send(("state", None))
        return self._wait("state")  # type: ignore[no-any-return]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def _wait(self, kind: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while True:
            for one in self._unread:
                if one[0] == kind:
                    self._unread.remove(one)
                    return one[1]
            assert self._pipe.poll(max(0.0, deadline_s - time.monotonic())), f"no {kind} from a member"
            self._unread.append(self._pipe.recv())


class MemberProcesses:
    """All of them; those that are left are killed at the end."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = preloaded_context()  # there is one fork server to a process: the first decides what it has
        self._processes: list[Any] = []

    def __enter__(self) -> MemberProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def start(self, spec: MemberSpec) -> MemberProcess:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._address, spec), daemon=True)
        process.start()
        self._processes.append(process)
        theirs.close()
        return MemberProcess(process, ours)


def _serve(pipe: Connection, address: str, spec: MemberSpec) -> None:
    member = _Member(pipe, address, spec)
    while member.turn():
        pass


class _Member:
    """Inside the process."""

    def __init__(self, pipe: Connection, address: str, spec: MemberSpec) -> None:
        import torch

        from sglang_ext.long_pool.decide.orders import MemberReport
        from sglang_ext.long_pool.member.pool_link import TcpLink
        from sglang_ext.long_pool.member.pool_member import PoolMember
        from sglang_ext.long_pool.mesh.peer_links import PeerLinks
        from sglang_ext.long_pool.messages import PROTOCOL_VERSION, Hello
        from support.toy_engine import LAYERS, ToyEngine, ToyPool

        torch.set_num_threads(1)
        self._pipe = pipe
        self._pool = ToyPool(spec.pool_tokens, spec.page_tokens)
        self._is_watched = False
        self._lent: dict[int, tuple[list[int], Any]] = {}
        host, _, port = address.rpartition(":")
        report = MemberReport(0.0, spec.reported_tokens)
        hello = Hello(PROTOCOL_VERSION, spec.name, "node", spec.model, LAYERS, spec.page_tokens, report)
        links = PeerLinks("127.0.0.1", spec.key, spec.step_timeout_s)
        hello = hello._replace(addresses=links.rank_addresses)
        self._member = PoolMember(
            ToyEngine(self._pool, spec.layer_s, self._on_layer),
            TcpLink(
                *(host, int(port), lambda: hello, spec.key),
                silent_s=lambda: links.silent_s,
                give_up=links.give_up_now,
            ),
            links,
        )

    def turn(self) -> bool:
        select.select([self._pipe, self._member.wake_descriptor], [], [], 0.5)
        try:
            while self._pipe.poll():
                self._obey(*self._pipe.recv())
        except EOFError:
            return False
        for outcome in self._member.take_orders():
            self._end(outcome)
        for outcome in self._member.compute():
            self._end(outcome)
        return True

    def _obey(self, what: str, argument: Any) -> None:
        if what == "offer":
            self._offer(*argument)
        elif what == "withdraw":
            self._member.withdraw(argument)
            self._free_prefix(argument)
        elif what == "watch":
            self._is_watched = True
            self._pipe.send(("watching", None))
        elif what == "state":
            member = self._member
            state = MemberState(self._pool.free_tokens, member.is_joined, member.is_busy)
            self._pipe.send(("state", state))

    def _offer(self, token_ids: list[int], cached_tokens: int) -> None:
        from support.toy_engine import kv_of

        while not self._member.is_joined:  # the coordinator lists a member before that has read its welcome
            select.select([self._member.wake_descriptor], [], [], 0.05)
            for outcome in self._member.take_orders():
                self._end(outcome)
        prefix = self._pool.allocate(cached_tokens)
        if cached_tokens:
            kv = kv_of(token_ids[:cached_tokens])
            for layer in range(self._pool.layers):
                self._pool.write(layer, prefix, kv[layer])
        number = self._member.offer(tuple(token_ids), cached_tokens, prefix, waited_s=0.0, slack_s=None)
        self._lent[number] = token_ids, prefix
        self._pipe.send(("offered", number))

    def _end(self, outcome: Any) -> None:
        from sglang_ext.long_pool.member.pool_member import Collected
        from support.toy_engine import kv_of

        token_ids, prefix = self._lent[outcome.request]
        ended = Ended(str(getattr(outcome, "reason", "")), 0)
        if isinstance(outcome, Collected):
            end = prefix.numel() + outcome.slots.numel()
            wanted = kv_of(token_ids)[:, :, prefix.numel() : end]
            if outcome.slots.numel():
                # torch.testing takes seconds to import, for which this member would not answer.
                assert float((self._pool.kv(outcome.slots) - wanted).abs().max()) < _TOLERANCE
                self._pool.free(outcome.slots)
            ended = Ended("collected", outcome.slots.numel())
        self._free_prefix(outcome.request)
        self._pipe.send((f"outcome {outcome.request}", ended))

    def _free_prefix(self, request: int) -> None:
        _, prefix = self._lent.pop(request)
        if prefix.numel():
            self._pool.free(prefix)

    def _on_layer(self, layer: int) -> None:
        if self._is_watched:
            self._is_watched = False
            self._pipe.send(("layer", layer))
