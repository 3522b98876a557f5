"""Links over loopback: made when used, in any order; what one gives up all give up; a failure breaks nothing else."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import torch

from sglang_ext.long_pool.link_frames import Greeting, LinkError, PeerAddress, PeerId, send_greeting
from sglang_ext.long_pool.mesh.mesh import Membership, MeshError
from sglang_ext.long_pool.mesh.peer_links import LinkMesh, PeerLinks, route_to
from sglang_ext.shared_key import NONCE_BYTES, Caller

KEY = b"a key that all members know"
POOL = 16 * b"p"
# Far longer than any test may take: what ends sooner was not ended by it.
TIMEOUT_S = 300.0
SOON_S = 60.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(16)
    yield pool
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def make() -> Iterator[Callable[..., list[PeerLinks]]]:
    with ExitStack() as stack:

        def links(count: int, timeout_s: float = TIMEOUT_S, key: bytes = KEY, rank: int = 0) -> list[PeerLinks]:
            made = []
            for instance in range(count):
                one = PeerLinks("127.0.0.1", key, timeout_s, rank)
                stack.callback(one.close)
                one.enter(Membership(POOL, instance))
                made.append(one)
            return made

        yield links


def addresses(links: list[PeerLinks]) -> dict[int, PeerAddress]:
    return {instance: one.address for instance, one in enumerate(links)}


def swap(links: list[PeerLinks], instance: int, sequence: int, size: int = 1000) -> list[float]:
    """A step in which everybody sends everybody a tensor; the first values of what has come."""
    others = [other for other in range(len(links)) if other != instance]
    with links[instance].step(sequence, addresses(links)) as mesh:
        theirs = {other: torch.empty(size) for other in others}
        calls = [mesh.receive(tensor, other, other) for other, tensor in theirs.items()]
        calls += [mesh.send(torch.full((size,), float(100 * sequence + instance)), other, instance) for other in others]
        for call in calls:
            call.wait()
        mesh.settle()
    assert all((tensor == tensor[0]).all() for tensor in theirs.values())
    return [float(tensor[0]) for tensor in theirs.values()]


def swap_all(threads: ThreadPoolExecutor, links: list[PeerLinks], sequence: int, size: int = 1000) -> None:
    done = [threads.submit(swap, links, instance, sequence, size) for instance in range(len(links))]
    for instance, future in enumerate(done):
        expected = [100.0 * sequence + other for other in range(len(links)) if other != instance]
        assert future.result(SOON_S) == expected


def waiting(
    threads: ThreadPoolExecutor, links: list[PeerLinks], instance: int, source: int, sequence: int
) -> Future[str]:
    """Wait in vain in a step; resolves to the error."""
    has_begun = threading.Event()

    def wait() -> str:
        try:
            with links[instance].step(sequence, addresses(links)) as mesh:
                call = mesh.receive(torch.empty(1), source, 1)
                has_begun.set()
                call.wait()
        except MeshError as error:
            has_begun.set()
            return str(error)
        return "received"

    future = threads.submit(wait)
    assert has_begun.wait(SOON_S)
    return future


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def connections(links: PeerLinks) -> dict[PeerId, object]:
    return {peer: link for peer, link in links._links.items() if link.is_connected}


def test_tensors_go_to_where_they_were_posted(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    first, second = links = make(2)
    sent = {tag: torch.randn(size).to(dtype) for tag, size, dtype in ((7, 3, torch.bfloat16), (2, 5000, torch.float32))}
    got = {tag: torch.empty_like(tensor) for tag, tensor in sent.items()}

    def send() -> None:
        with first.step(1, addresses(links)) as mesh:
            for call in [mesh.send(tensor, 1, tag) for tag, tensor in sent.items()]:
                call.wait()

    def receive() -> None:
        with second.step(1, addresses(links)) as mesh:
            # Not in the order in which they come.
            for call in [mesh.receive(tensor, 0, tag) for tag, tensor in reversed(got.items())]:
                call.wait()

    for future in (threads.submit(send), threads.submit(receive)):
        future.result(SOON_S)
    assert all(torch.equal(sent[tag], got[tag]) for tag in sent)


def test_members_that_meet_wait_for_all_others(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    links = make(3)
    order: list[str] = []

    def meet(instance: int) -> None:
        with links[instance].step(1, addresses(links)) as mesh:
            mesh.meet()
            order.append("met")

    early = [threads.submit(meet, instance) for instance in (0, 2)]
    time.sleep(0.2)
    order.append("the last one comes")
    last = threads.submit(meet, 1)
    for future in (*early, last):
        future.result(SOON_S)
    assert order == ["the last one comes", "met", "met", "met"]


def test_connections_are_made_when_they_are_used_and_kept(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    links = make(4)
    assert not any(connections(one) for one in links)
    swap_all(threads, links[:2], 1)
    assert [len(connections(one)) for one in links] == [1, 1, 0, 0]
    before = connections(links[0])
    swap_all(threads, links, 2, size=300_000)
    swap_all(threads, links, 3)
    assert [len(connections(one)) for one in links] == [3, 3, 3, 3]
    assert before.items() <= connections(links[0]).items()


def test_a_step_that_has_been_given_up_ends_for_who_waits_and_costs_no_connection(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    """As it is with a member that is stopped: it closes nothing, and others wait for it."""
    links = make(3)
    swap_all(threads, links, 1)
    before = [connections(one) for one in links]
    one, other = (waiting(threads, links, instance, 2, sequence=2) for instance in (0, 1))
    links[0].give_up(2, "it hangs")
    assert one.result(SOON_S) == "instance 2: it hangs"
    # Who waited for it tells the others.
    assert other.result(SOON_S).startswith("instance 2: a peer has failed: instance 2: it hangs")
    swap_all(threads, links, 3)
    assert [connections(one) for one in links] == before


def test_only_that_step_is_given_up(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor) -> None:
    links = make(2)
    future = waiting(threads, links, 0, 1, sequence=5)
    links[0].give_up(4, "another one")
    links[0].give_up(6, "a later one")
    time.sleep(0.2)
    assert not future.done()
    links[0].give_up(5, "this one")
    assert future.result(SOON_S) == "instance 1: this one"
    with pytest.raises(MeshError, match="a later one"), links[0].step(6, addresses(links)):
        pass


def test_who_fails_before_it_has_sent_anything_lets_no_peer_wait(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    """Its KV pool is full, say."""
    links = make(3)
    swap_all(threads, links, 1)
    before = [connections(one) for one in links]
    others = [waiting(threads, links, instance, 2, sequence=2) for instance in (0, 1)]
    with pytest.raises(ValueError, match="full"), links[2].step(2, addresses(links)):
        raise ValueError("the pool is full")
    for future in others:
        assert "a peer has failed: the pool is full" in future.result(SOON_S)
    swap_all(threads, links, 3)
    assert [connections(one) for one in links] == before


def test_the_others_are_told_when_a_call_fails_not_when_the_step_ends(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    """A rank whose ring is broken goes on with the other ranks of its instance to the end of the model."""
    links = make(3)
    swap_all(threads, links, 1)
    future = waiting(threads, links, 0, 2, sequence=2)
    with links[2].step(2, addresses(links)) as mesh:
        assert str(mesh.broken("its call has failed", 1)) == "its call has failed"
        assert future.result(SOON_S) == "instance 2: a peer has failed: its call has failed"


def test_what_comes_of_a_step_that_is_over_is_thrown_away(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    """More than the sockets hold, of a step that the receiver has given up before."""
    first, second = links = make(2)
    second.give_up(1, "given up before")

    def send() -> None:
        with first.step(1, addresses(links)) as mesh:
            for call in [mesh.send(torch.ones(4_000_000), 1, tag) for tag in range(4)]:
                call.wait()

    assert threads.submit(send).result(SOON_S) is None
    swap_all(threads, links, 2)


def test_a_peer_that_is_ahead_waits(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor) -> None:
    first, second = links = make(2)
    with second.step(1, addresses(links)) as mesh:
        early = threads.submit(swap, links, 0, 2)
        until(lambda: bool(connections(first)))
        time.sleep(0.1)
        del mesh
    assert swap(links, 1, 2) == [200.0]
    assert early.result(SOON_S) == [201.0]


def test_nothing_comes_in_time(make: Callable[..., list[PeerLinks]]) -> None:
    links = make(2, timeout_s=0.2)
    with (
        pytest.raises(MeshError, match=r"instance 1: nothing has come for 0\.2 s") as failed,
        links[0].step(1, addresses(links)) as mesh,
    ):
        mesh.receive(torch.empty(1), 1, 0).wait()
    assert failed.value.instance == 1


@pytest.mark.slow
def test_a_peer_that_is_not_there(make: Callable[..., list[PeerLinks]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.long_pool.mesh.peer_link.CONNECT_TIMEOUT_S", 0.3)
    (one,) = make(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nowhere = PeerAddress("127.0.0.1", probe.getsockname()[1])
    expected = re.escape(f"instance 1: 127.0.0.1:{nowhere.port}: Connection refused")
    with pytest.raises(MeshError, match=expected) as failed, one.step(1, {0: one.address, 1: nowhere}) as mesh:
        mesh.send(torch.empty(1), 1, 0).wait()
    assert failed.value.instance == 1


@pytest.mark.slow
def test_a_peer_that_does_not_connect(make: Callable[..., list[PeerLinks]]) -> None:
    _, second = links = make(2, timeout_s=0.3)
    with (
        pytest.raises(MeshError, match=r"instance 0: (it has not connected within|nothing has come for) 0\.3 s"),
        second.step(1, addresses(links)) as mesh,
    ):
        mesh.receive(torch.empty(1), 0, 0).wait()


@pytest.mark.slow
def test_who_is_connected_to_waits_as_long_as_a_step_does(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.long_pool.mesh.peer_link.CONNECT_TIMEOUT_S", 0.1)
    links = make(2)
    waits = threads.submit(swap, links, 1, 1)
    time.sleep(0.5)  # the first one has other work
    monkeypatch.undo()
    comes = threads.submit(swap, links, 0, 1)
    assert waits.result(SOON_S) == [100.0]
    assert comes.result(SOON_S) == [101.0]


def test_a_peer_that_dies_is_noticed_and_another_one_connects(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    links = make(3)
    swap_all(threads, links, 1)
    future = waiting(threads, links, 0, 1, sequence=2)
    links[1].close()
    assert future.result(SOON_S).startswith("instance 1: ")
    until(lambda: not any(PeerId(1, 0) in connections(one) for one in (links[0], links[2])))
    kept = connections(links[2])
    again = PeerLinks("127.0.0.1", KEY, TIMEOUT_S)
    again.enter(Membership(POOL, 1))
    links[1] = again
    swap_all(threads, links, 3)
    assert kept.items() <= connections(links[2]).items(), "the others were not concerned"
    again.close()


def test_another_pool_is_another_network(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor) -> None:
    links = make(2)
    swap_all(threads, links, 8)
    for instance, one in enumerate(links):
        one.enter(None)
        until(lambda one=one: not connections(one))  # type: ignore[misc]
        with pytest.raises(MeshError, match="has left the pool"), one.step(9, addresses(links)) as mesh:
            mesh.send(torch.empty(1), 1 - instance, 0)
    # Not at the same time.
    links[0].enter(Membership(16 * b"q", 0))
    early = threads.submit(swap, links, 0, 1)
    time.sleep(0.2)
    links[1].enter(Membership(16 * b"q", 1))
    assert swap(links, 1, 1) == [100.0]
    assert early.result(SOON_S) == [101.0]


@pytest.mark.parametrize("callers_key", [b"", b"another key than that of the others"])
def test_who_does_not_know_the_key_is_no_peer(make: Callable[..., list[PeerLinks]], callers_key: bytes) -> None:
    one = make(2)[1]
    greeting = Greeting(POOL, PeerId(0, 0), PeerId(1, 0))
    with socket.create_connection(one.address) as caller, pytest.raises(LinkError, match="another key"):
        send_greeting(caller, greeting, callers_key)
    assert not connections(one)
    with socket.create_connection(one.address) as caller:
        send_greeting(caller, greeting, KEY)
        until(lambda: bool(connections(one)))


def test_who_calls_without_a_proof_is_no_peer(
    make: Callable[..., list[PeerLinks]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that does not care who answers, and sends the answer's own proof back."""
    one = make(2)[1]
    greeting = Greeting(POOL, PeerId(0, 0), PeerId(1, 0))
    monkeypatch.setattr(Caller, "answer", lambda caller, challenge: challenge[NONCE_BYTES:])
    with socket.create_connection(one.address) as caller, pytest.raises((LinkError, OSError)):
        send_greeting(caller, greeting, KEY)
    assert not connections(one)


@pytest.mark.parametrize(
    "greeting",
    [
        Greeting(16 * b"x", PeerId(0, 0), PeerId(1, 0)),
        Greeting(POOL, PeerId(0, 0), PeerId(2, 0)),
        Greeting(POOL, PeerId(0, 0), PeerId(1, 1)),
        Greeting(POOL, PeerId(2, 0), PeerId(1, 0)),  # of these two the other one connects
    ],
)
def test_who_means_another_one_is_no_peer(make: Callable[..., list[PeerLinks]], greeting: Greeting) -> None:
    one = make(2)[1]
    with socket.create_connection(one.address) as caller, pytest.raises((LinkError, OSError)):
        send_greeting(caller, greeting, KEY)
    assert not connections(one)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 40, b"sxpl", b"\0" * 5000])
def test_noise_is_no_peer(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor, noise: bytes) -> None:
    links = make(2)
    with socket.create_connection(links[1].address) as caller:
        caller.sendall(noise)
        swap_all(threads, links, 1)


def test_noise_behind_the_greeting_ends_that_link_alone(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    links = make(3)
    with socket.create_connection(links[2].address) as caller:
        send_greeting(caller, Greeting(POOL, PeerId(0, 0), PeerId(2, 0)), KEY)
        until(lambda: PeerId(0, 0) in connections(links[2]))
        caller.sendall(b"\xff" * 100)
        until(lambda: PeerId(0, 0) not in connections(links[2]))
    swap_all(threads, links, 1)


def test_a_connection_that_the_other_side_has_forgotten_is_replaced(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    links = make(2)
    with socket.create_connection(links[1].address) as stale:
        send_greeting(stale, Greeting(POOL, PeerId(0, 0), PeerId(1, 0)), KEY)
        until(lambda: bool(connections(links[1])))
        links[0].link(PeerId(1, 0), links[1].address)
        until(lambda: bool(connections(links[0])))
        swap_all(threads, links, 1)


def test_the_other_size_than_was_posted(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor) -> None:
    first, second = links = make(2)

    def send() -> None:
        with first.step(1, addresses(links)) as mesh:
            mesh.send(torch.ones(10), 1, 0).wait()

    def receive() -> None:
        with second.step(1, addresses(links)) as mesh:
            mesh.receive(torch.ones(9), 0, 0).wait()

    sent = threads.submit(send)
    with pytest.raises(MeshError, match="40 bytes instead of 36"):
        receive()
    with suppress(MeshError):  # the receiver's failure may reach the sender before its own wait has ended
        sent.result(SOON_S)
    swap_all(threads, links, 2)


def test_how_long_the_engine_has_been_silent(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor) -> None:
    now_s = [100.0]
    one = PeerLinks("127.0.0.1", KEY, TIMEOUT_S, clock=lambda: now_s[0])
    one.enter(Membership(POOL, 0))
    (other,) = make(1)
    other.enter(Membership(POOL, 1))
    now_s[0] += 3.0
    assert one.silent_s == 3.0
    one.record_activity()
    now_s[0] += 1.0
    assert one.silent_s == 1.0
    both = [one, other]
    future = waiting(threads, both, 0, 1, sequence=1)
    until(lambda: one.silent_s == 0.0)
    now_s[0] += 50.0
    assert one.silent_s == 0.0, "who waits for a peer does not hang"
    one.give_up(1, "enough")
    future.result(SOON_S)
    assert one.silent_s == 0.0
    now_s[0] += 2.0
    assert one.silent_s == 2.0
    one.close()


def test_an_engine_that_compiles_in_its_first_chunk_does_not_hang_before_its_peers_give_up() -> None:
    now_s = [100.0]
    one = PeerLinks("127.0.0.1", KEY, 30.0, clock=lambda: now_s[0])
    one.enter(Membership(POOL, 0))
    with one.step(1, {0: one.address}):
        now_s[0] += 29.0
        assert one.silent_s == 0.0
        now_s[0] += 3.0
        assert one.silent_s == 2.0
    with one.step(2, {0: one.address}):
        one.record_computed()
    with one.step(3, {0: one.address}):
        now_s[0] += 4.0
        assert one.silent_s == 4.0
    one.close()


def test_a_connection_to_a_host_that_has_vanished_ends(
    make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor
) -> None:
    links = make(2, timeout_s=SOON_S)
    swap_all(threads, links, 1)
    for one in links:
        (link,) = one._links.values()
        connection = link._socket
        assert connection is not None
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000 * SOON_S
        idle_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert idle_s < 60


@pytest.mark.slow
def test_ranks_of_one_instance(make: Callable[..., list[PeerLinks]], threads: ThreadPoolExecutor) -> None:
    """The second rank waits for another instance: the first one, which waits for it elsewhere, does not hang."""
    (first,) = make(1)
    second = PeerLinks("127.0.0.1", KEY, TIMEOUT_S, rank=1)
    stopped = PeerLinks("127.0.0.1", KEY, TIMEOUT_S, rank=1)
    first.enter(None)
    first.rank_addresses = second.rank_addresses = (first.address, second.address)
    for one, instance in ((second, 0), (stopped, 1), (first, 0)):
        one.enter(Membership(POOL, instance))
    until(lambda: PeerId(0, 1) in connections(first))

    def wait() -> str:
        try:
            with second.step(1, {0: second.address, 1: stopped.address}) as mesh:
                mesh.receive(torch.empty(1), 1, 0).wait()
        except MeshError as error:
            return str(error)
        return "received"

    until(lambda: first.silent_s > 0.5)
    future = threads.submit(wait)
    until(lambda: first.silent_s == 0.0)
    first.give_up(1, "the coordinator has had enough")
    assert future.result(SOON_S) == "instance 1: the coordinator has had enough"
    until(lambda: first.silent_s > 0.0)
    for one in (second, stopped):
        one.close()


def test_the_engine_of_another_step(make: Callable[..., list[PeerLinks]]) -> None:
    (one,) = make(1)
    meshes: list[LinkMesh] = []
    with one.step(1, {0: one.address}) as mesh:
        meshes.append(mesh)
    with pytest.raises(MeshError, match="the step is over"):
        meshes[0].send(torch.empty(1), 0, 0)


def test_the_way_to_an_address() -> None:
    assert route_to("127.0.0.1", 9) == "127.0.0.1"
