"""A member's first words to a coordinator, as `pool_link` says them, for tests that play a member."""

from __future__ import annotations

import asyncio

from sglang_ext.long_pool.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    KeyRequest,
    Proof,
    encode,
    receive_message,
)
from sglang_ext.shared_key import is_proof, make_nonce, prove


async def show_key(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes = b"", coordinators_key: bytes | None = None
) -> None:
    """Answer the challenge with `key`; the coordinator's own is to be `coordinators_key`, or the same."""
    nonce = make_nonce()
    writer.write(encode(KeyRequest(PROTOCOL_VERSION, nonce.hex())))
    challenge = await receive_message(reader)
    assert isinstance(challenge, Challenge)
    theirs = bytes.fromhex(challenge.nonce)
    expected = key if coordinators_key is None else coordinators_key
    assert is_proof(bytes.fromhex(challenge.code), expected, "coordinator", nonce, theirs)
    writer.write(encode(Proof(prove(key, "member", nonce, theirs).hex())))


async def join_pool(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello) -> None:
    """Say hello, without a key; the welcome is not read."""
    await show_key(reader, writer)
    writer.write(encode(hello))
