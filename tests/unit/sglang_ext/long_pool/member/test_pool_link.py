"""The link against a coordinator that is played here: joins, loses, joins again, never blocks, never mixes sessions."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from io import BufferedReader

import pytest

from sglang_ext.long_pool.decide.orders import Drop, GiveUp, MemberReport
from sglang_ext.long_pool.member.pool_link import TcpLink
from sglang_ext.long_pool.messages import (
    KEY_PROTOCOL,
    PROTOCOL_VERSION,
    Alive,
    CancelMessage,
    Challenge,
    Heartbeat,
    Hello,
    KeyRequest,
    Message,
    Proof,
    Refusal,
    ReportMessage,
    ToMember,
    Welcome,
    encode,
    read_message,
)
from sglang_ext.shared_key import Callee, WrongKeyError
from support.running_time import running_s

HELLO = Hello(PROTOCOL_VERSION, "a", "node", "model", 2, 1, MemberReport(0.0, 10))
MEMBER_TIMEOUT_S = 1.0
KEY = b"a key that all members know"


class Peer:
    """The other end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        self.socket = connection
        self._lines: BufferedReader = connection.makefile("rb")

    def read(self) -> Message:
        message = read_message(self._lines)
        assert message is not None
        return message

    def write(self, *messages: ToMember) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def challenge(self, key: bytes = KEY) -> bool:
        """Whether the link knows our key."""
        call = self.read()
        assert isinstance(call, KeyRequest)
        callee = Callee(key, KEY_PROTOCOL, bytes.fromhex(call.opening))
        self.write(Challenge(callee.challenge.hex()))
        proof = self.read()
        assert isinstance(proof, Proof)
        try:
            callee.check(bytes.fromhex(proof.answer))
        except WrongKeyError:
            return False
        return True

    def welcome(self, instance: int) -> Welcome:
        assert self.challenge()
        assert self.read() == HELLO
        answer = Welcome(instance, "ab", MEMBER_TIMEOUT_S)
        self.write(answer)
        return answer

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


class Played:
    """A coordinator's port, and the link to it."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(10)
        self.peers: list[Peer] = []
        self.silent_s = 0.0
        self.given_up: list[int | None] = []
        self.link = TcpLink(
            *("127.0.0.1", self.listening.getsockname()[1], lambda: HELLO, KEY),
            silent_s=lambda: self.silent_s,
            give_up=self.given_up.append,
        )

    def accept(self) -> Peer:
        self.peers.append(Peer(self.listening.accept()[0]))
        return self.peers[-1]

    def join(self, instance: int = 0) -> tuple[Peer, Welcome]:
        peer = self.accept()
        answer = peer.welcome(instance)
        wait_for(lambda: self.link.session() == answer)
        return peer, answer

    def close(self) -> None:
        self.link.close()
        for peer in self.peers:
            peer.close()
        self.listening.close()


@pytest.fixture
def played() -> Iterator[Played]:
    one = Played()
    yield one
    one.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_readable(link: TcpLink, timeout_s: float) -> bool:
    return bool(select.select([link.wake_descriptor], [], [], timeout_s)[0])


def test_orders_wake_and_come_in_order(played: Played) -> None:
    peer, _ = played.join()
    played.link.session()
    assert not is_readable(played.link, 0.0)
    orders = [Drop(request, (0,)) for request in range(3)]
    peer.write(orders[0], Heartbeat(), orders[1])
    peer.write(orders[2])
    assert is_readable(played.link, 5.0)
    got: list[ToMember] = []

    def take() -> bool:
        played.link.session()
        got.extend(played.link.receive())
        return len(got) == 3

    wait_for(take)
    assert got == orders
    assert not is_readable(played.link, 0.0)


@pytest.mark.slow
def test_a_heartbeat_tells_whether_the_engine_does_anything(played: Played) -> None:
    peer, _ = played.join()
    assert peer.read() == Alive(0.0)
    played.silent_s = 7.5
    wait_for(lambda: peer.read() == Alive(7.5))
    report = ReportMessage(MemberReport(1.5, 3))
    for _ in range(5):
        played.link.send(report)
        time.sleep(MEMBER_TIMEOUT_S / 10)
    assert Alive(7.5) in [peer.read() for _ in range(6)], "also where there is always something to send"


def test_a_step_is_given_up_at_once(played: Played) -> None:
    """The engine's loop may wait for it."""
    peer, _ = played.join()
    peer.write(GiveUp(7, (0,)))
    wait_for(lambda: played.given_up == [7])
    peer.close()
    wait_for(lambda: played.given_up == [7, None])


@pytest.mark.slow
def test_an_engine_that_hangs_does_not_join_again(played: Played) -> None:
    peer, _ = played.join()
    peer.close()
    played.listening.settimeout(1.0)
    with pytest.raises(TimeoutError):
        played.accept()
    played.listening.settimeout(10)
    played.link.session()
    played.join(1)


def test_a_coordinator_with_another_key_is_not_joined(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    peer = played.accept()
    with pytest.raises(AssertionError):
        peer.challenge(b"another key")
    peer.close()
    played.join()
    assert any("the coordinator has another key" in record.message for record in caplog.records)


def test_what_the_engine_sends_is_sent(played: Played) -> None:
    peer, _ = played.join()
    for request in range(100):
        played.link.send(CancelMessage(request))
    sent = [one for one in (peer.read() for _ in range(100)) if isinstance(one, CancelMessage)]
    assert [one.request for one in sent] == list(range(len(sent)))
    assert len(sent) >= 95


def test_sending_never_blocks(played: Played) -> None:
    played.join()
    began_s = running_s()
    for _ in range(20):
        played.link.send(ReportMessage(MemberReport(0.0, 10**300)))
    large = CancelMessage(int("9" * 3_000))
    for _ in range(3_000):
        played.link.send(large)
    assert running_s() - began_s < 1.0


@pytest.mark.slow
def test_a_coordinator_that_goes_is_noticed_and_joined_anew(played: Played) -> None:
    peer, _ = played.join(3)
    peer.close()
    assert is_readable(played.link, 5.0)
    wait_for(lambda: played.link.session() is None)
    assert played.link.receive() == []
    _, answer = played.join(4)
    assert answer.instance == 4


@pytest.mark.slow
def test_a_session_without_messages_ends(played: Played) -> None:
    peer, _ = played.join()
    began_s, clock_s = running_s(), time.monotonic()
    for _ in range(8):
        time.sleep(MEMBER_TIMEOUT_S / 5)
        peer.write(Heartbeat())
    assert played.link.session() is not None
    wait_for(lambda: played.link.session() is None)
    assert time.monotonic() - clock_s > MEMBER_TIMEOUT_S * 2
    assert running_s() - began_s < MEMBER_TIMEOUT_S * 6


def test_noise_is_an_end(played: Played) -> None:
    peer, _ = played.join()
    peer.socket.sendall(b"GET / HTTP/1.1\r\n")
    wait_for(lambda: played.link.session() is None)


@pytest.mark.slow
def test_orders_of_another_session_are_not_received(played: Played) -> None:
    """The engine's loop has not seen the new session yet."""
    peer, _ = played.join()
    peer.write(Drop(1, (0,)))
    assert is_readable(played.link, 5.0)
    peer.close()
    wait_for(lambda: played.given_up == [None])
    played.link.session()
    second = played.accept()
    answer = second.welcome(1)
    second.write(Drop(9, (1,)))
    time.sleep(0.3)
    assert played.link.receive() == []
    played.link.send(CancelMessage(1))
    assert played.link.session() == answer
    assert played.link.receive() == [Drop(9, (1,))]
    assert second.read() == Alive(0.0)


@pytest.mark.slow
def test_refused_and_tried_again(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        peer = played.accept()
        assert peer.challenge()
        assert peer.read() == HELLO
        peer.write(Refusal("another model"))
        peer.close()
    assert played.link.session() is None
    played.join()
    assert [record.message for record in caplog.records if "another model" in record.message] == [
        f"cdsp: not in the pool of 127.0.0.1:{played.listening.getsockname()[1]}: another model"
    ]


def test_no_coordinator_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    link = TcpLink("127.0.0.1", port, lambda: HELLO)
    time.sleep(0.2)
    assert link.session() is None
    link.send(CancelMessage(1))
    link.wake()
    assert is_readable(link, 0.0)
    link.close()
