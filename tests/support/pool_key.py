"""A member's first words to a coordinator, as `pool_link` says them, for tests that play a member."""

from __future__ import annotations

import asyncio

from sglang_ext.long_pool.messages import (
    KEY_PROTOCOL,
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    KeyRequest,
    Proof,
    encode,
    receive_message,
)
from sglang_ext.shared_key import NONCE_BYTES, Caller, prove


async def show_key(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes = b"", coordinators_key: bytes | None = None
) -> None:
    """Answer the challenge with `key`; the coordinator's own is to be `coordinators_key`, or the same."""
    caller = Caller(key if coordinators_key is None else coordinators_key, KEY_PROTOCOL)
    writer.write(encode(KeyRequest(PROTOCOL_VERSION, caller.opening.hex())))
    message = await receive_message(reader)
    assert isinstance(message, Challenge)
    challenge = bytes.fromhex(message.challenge)
    answer = caller.answer(challenge)
    if coordinators_key not in {None, key}:
        said = (KEY_PROTOCOL.encode(), caller.opening, b"", challenge[:NONCE_BYTES], b"")
        answer = prove(key, "caller", *said)
    writer.write(encode(Proof(answer.hex())))


async def join_pool(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello) -> None:
    """Say hello, without a key; the welcome is not read."""
    await show_key(reader, writer)
    writer.write(encode(hello))
