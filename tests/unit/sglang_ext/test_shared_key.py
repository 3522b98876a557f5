from __future__ import annotations

import pytest

from sglang_ext.shared_key import CHALLENGE_BYTES, CODE_BYTES, NONCE_BYTES, Callee, Caller, WrongKeyError, bearer_key

KEY = b"a key of all peers"


def ends(callers_key: bytes = KEY, callees_key: bytes = KEY) -> tuple[Caller, Callee]:
    caller = Caller(callers_key, "links", b"from 1 to 2")
    return caller, Callee(callees_key, "links", caller.opening, b"from 1 to 2", b"this is 2")


def test_both_ends_know_the_key_and_have_a_key_of_the_session() -> None:
    sessions = set()
    for _ in range(2):
        caller, callee = ends()
        assert (len(caller.opening), len(callee.challenge)) == (NONCE_BYTES, CHALLENGE_BYTES)
        answer = caller.answer(callee.challenge, b"this is 2")
        callee.check(answer)
        assert caller.session_key == callee.session_key
        assert KEY not in caller.opening + callee.challenge + answer
        sessions.add(caller.session_key)
    assert len(sessions) == 2


@pytest.mark.parametrize("other", [b"", b"another key of peers"])
def test_neither_end_takes_another_key(other: bytes) -> None:
    caller, callee = ends(callees_key=other)
    with pytest.raises(WrongKeyError):
        caller.answer(callee.challenge, b"this is 2")
    caller, callee = ends(callers_key=other)
    with pytest.raises(WrongKeyError):
        caller.answer(callee.challenge, b"this is 2")


@pytest.mark.parametrize("changed", ["protocol", "opening", "callers_words", "words"])
def test_a_proof_holds_for_what_was_said(changed: str) -> None:
    caller = Caller(KEY, "links", b"from 1 to 2")
    said = {"protocol": "links", "opening": caller.opening, "callers_words": b"from 1 to 2", "words": b"this is 2"}
    callee = Callee(KEY, **{**said, changed: "peers" if changed == "protocol" else bytes(NONCE_BYTES)})  # type: ignore[arg-type]
    with pytest.raises(WrongKeyError):
        caller.answer(callee.challenge, b"this is 2")


def test_words_cannot_move_from_one_part_to_another() -> None:
    caller = Caller(KEY, "links", b"ab")
    callee = Callee(KEY, "links", caller.opening, b"a", b"b")
    with pytest.raises(WrongKeyError):
        caller.answer(callee.challenge, b"")


def test_answers_of_another_connection_and_an_end_s_own_proof_prove_nothing() -> None:
    caller, callee = ends()
    answer = caller.answer(callee.challenge, b"this is 2")
    for wrong in (callee.challenge[NONCE_BYTES:], b"", answer[:-1], bytes(CODE_BYTES)):
        with pytest.raises(WrongKeyError):
            callee.check(wrong)
    other = Callee(KEY, "links", caller.opening, b"from 1 to 2", b"this is 2")
    with pytest.raises(WrongKeyError):
        other.check(answer)


def test_the_scheme_of_a_bearer_key_has_no_case() -> None:
    assert {bearer_key(f"{scheme} k ".encode()) for scheme in ("Bearer", "bearer", "BEARER")} == {b"k"}
    assert bearer_key(b"Basic k") == b""
