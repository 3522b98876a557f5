"""What is not exactly one well-formed request is refused; what reaches the instances is always one."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.raw_client import BrokenReplyError, RawClient, Reply, request_bytes
from support.router_process import cluster
from support.scripted_engine import hang, reply

BODY = b'{"text": "x"}'
GOOD = request_bytes("POST", "/generate", BODY)


def post(*headers: bytes, body: bytes = b"", target: bytes = b"/generate", version: bytes = b"HTTP/1.1") -> bytes:
    """A request with exactly these header lines."""
    return b"POST %b %b\r\n%b\r\n%b" % (target, version, b"".join(line + b"\r\n" for line in headers), body)


HOST = b"Host: a"
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"POST /generate HTTP/1.1\r\nHost: evil\r\nContent-Length: 13\r\n\r\n" + BODY

# Each is refused with 400 or the connection is closed without a reply; nothing reaches an instance.
REFUSED = {
    "both lengths": post(HOST, LENGTH, CHUNKED, body=CHUNKS),
    "both lengths, other order": post(HOST, CHUNKED, LENGTH, body=CHUNKS),
    "both lengths, smuggling": post(HOST, b"Content-Length: 4", CHUNKED, body=b"0\r\n\r\n" + SMUGGLED),
    "two lengths": post(HOST, LENGTH, b"Content-Length: 1", body=BODY),
    "the same length twice": post(HOST, LENGTH, LENGTH, body=BODY),
    "list of lengths": post(HOST, b"Content-Length: 13, 13", body=BODY),
    "negative length": post(HOST, b"Content-Length: -13", body=BODY),
    "signed length": post(HOST, b"Content-Length: +13", body=BODY),
    "hexadecimal length": post(HOST, b"Content-Length: 0xd", body=BODY),
    "length with a space inside": post(HOST, b"Content-Length: 1 3", body=BODY),
    "empty length": post(HOST, b"Content-Length:", body=BODY),
    "length beyond 64 bits": post(HOST, b"Content-Length: 18446744073709551629", body=BODY),
    "length of 5000 digits": post(HOST, b"Content-Length: " + b"0" * 4990 + b"13" * 5, body=BODY),
    "other coding": post(HOST, b"Transfer-Encoding: gzip", body=BODY),
    "coding after chunked": post(HOST, b"Transfer-Encoding: chunked, gzip", body=CHUNKS),
    "coding with a control character": post(HOST, b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "identity": post(HOST, b"Transfer-Encoding: identity", body=BODY),
    "xchunked": post(HOST, b"Transfer-Encoding: xchunked", body=CHUNKS),
    "space before the colon": post(HOST, b"Content-Length : 13", body=BODY),
    "folded header": post(HOST, b"X-A: b\r\n c", LENGTH, body=BODY),
    "folded coding": post(HOST, b"Transfer-Encoding:\r\n chunked", body=CHUNKS),
    "header without a colon": post(HOST, b"nonsense", LENGTH, body=BODY),
    "empty header name": post(HOST, b": x", LENGTH, body=BODY),
    "header line that begins with a space": post(b" " + HOST, LENGTH, body=BODY),
    "NUL in a header's value": post(HOST, b"X-A: a\x00b", LENGTH, body=BODY),
    "NUL in a header's name": post(HOST, b"X\x00A: ab", LENGTH, body=BODY),
    "carriage return in a value": post(HOST, b"X-A: a\rb", LENGTH, body=BODY),
    "two hosts": post(HOST, b"Host: b", LENGTH, body=BODY),
    "bare line feeds": GOOD.replace(b"\r\n", b"\n"),
    "bare line feed behind the request line": GOOD.replace(b"\r\n", b"\n", 1),
    "bare line feed behind a header": GOOD.replace(b"router\r\n", b"router\n"),
    "bare carriage returns": GOOD.replace(b"\r\n", b"\r"),
    "NUL in the target": post(HOST, LENGTH, body=BODY, target=b"/gen\x00erate"),
    "tab in the target": post(HOST, LENGTH, body=BODY, target=b"/gen\terate"),
    "space in the target": post(HOST, LENGTH, body=BODY, target=b"/generate x"),
    "no target": b"POST HTTP/1.1\r\nHost: a\r\n\r\n",
    "no version": b"POST /generate\r\nHost: a\r\n\r\n",
    "version 1.2": post(HOST, LENGTH, body=BODY, version=b"HTTP/1.2"),
    "version 3": post(HOST, LENGTH, body=BODY, version=b"HTTP/3.0"),
    "version with more digits": post(HOST, LENGTH, body=BODY, version=b"HTTP/1.10"),
    "lower-case version": post(HOST, LENGTH, body=BODY, version=b"http/1.1"),
    "unknown method": GOOD.replace(b"POST", b"POTS"),
    "lower-case method": GOOD.replace(b"POST", b"post"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("160301010001000fc0300303") + bytes(256),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "bytes": bytes(range(256)),
    "chunk size with a sign": post(HOST, CHUNKED, body=b"+d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size with 0x": post(HOST, CHUNKED, body=b"0xd\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size negative": post(HOST, CHUNKED, body=b"-d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size with a space before": post(HOST, CHUNKED, body=b" d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size not a number": post(HOST, CHUNKED, body=b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size empty": post(HOST, CHUNKED, body=b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": post(HOST, CHUNKED, body=b"1" + b"0" * 15 + b"d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk too long": post(HOST, CHUNKED, body=b"c\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size line with a bare line feed": post(HOST, CHUNKED, body=b"d\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk end with a bare line feed": post(HOST, CHUNKED, body=b"d\r\n" + BODY + b"\n0\r\n\r\n"),
    "chunk extension with a bare line feed": post(HOST, CHUNKED, body=b"d;a\n" + BODY + b"\r\n0\r\n\r\n"),
    "length as a trailer": post(HOST, CHUNKED, body=b"d\r\n" + BODY + b"\r\n0\r\nContent-Length: 5\r\n\r\n"),
    "trailer that is no header": post(HOST, CHUNKED, body=b"d\r\n" + BODY + b"\r\n0\r\nnonsense\r\n\r\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_malformed_is_refused(name: str) -> None:
    async with cluster() as served:
        async with await served.connect() as client:
            await client.send(REFUSED[name] + b"\r\n\r\n")
            got = await client.rest()
        assert got.startswith(b"HTTP/1.1 400 ") or got == b"", got
        assert got.count(b"HTTP/1.1 ") <= 1
        assert served.upstream_requests() == 0


# Each is well formed, and served as POST /generate with BODY.
SERVED = {
    "plain": GOOD,
    "empty lines before": b"\r\n\r\n" + GOOD,
    "chunked": post(HOST, CHUNKED, body=CHUNKS),
    "chunked, upper case": post(HOST, b"TRANSFER-ENCODING: Chunked", body=CHUNKS),
    "many chunks": post(HOST, CHUNKED, body=b"".join(b"1\r\n%c\r\n" % c for c in BODY) + b"0\r\n\r\n"),
    "chunk sizes with zeros": post(HOST, CHUNKED, body=b"000d\r\n" + BODY + b"\r\n000\r\n\r\n"),
    "upper-case chunk size": post(HOST, CHUNKED, body=b"D\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk extensions": post(HOST, CHUNKED, body=b'd;a=b;c="d"\r\n' + BODY + b"\r\n0;x\r\n\r\n"),
    "trailers": post(HOST, CHUNKED, body=b"d\r\n" + BODY + b"\r\n0\r\nX-A: b\r\n\r\n"),
    "trailers that look like headers": post(
        HOST, CHUNKED, body=b"d\r\n" + BODY + b"\r\n0\r\nx-sgl-ttft-slo-ms: bad\r\nauthorization: evil\r\n\r\n"
    ),
    "length with spaces around": post(HOST, b"Content-Length:   13  ", body=BODY),
    "length with zeros": post(HOST, b"Content-Length: 0013", body=BODY),
    "no space behind colons": post(b"Host:a", b"Content-Length:13", body=BODY),
    "tabs in a value": post(HOST, b"X-A: a\tb\t", LENGTH, body=BODY),
    "high bytes in a value": post(HOST, b"X-A: \xe9\xff", LENGTH, body=BODY),
    "empty value": post(HOST, b"X-A:", LENGTH, body=BODY),
    "many headers": post(HOST, *[b"X-%d: y" % i for i in range(500)], LENGTH, body=BODY),
    "upgrade to HTTP/2": post(
        HOST, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk", LENGTH, body=BODY
    ),
    "upgrade to a web socket": post(HOST, b"Connection: Upgrade", b"Upgrade: websocket", LENGTH, body=BODY),
    "HTTP/1.0": post(LENGTH, body=BODY, version=b"HTTP/1.0"),
    "HTTP/1.0, kept": post(b"Connection: keep-alive", LENGTH, body=BODY, version=b"HTTP/1.0"),
}


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
async def test_what_is_well_formed_is_served(event_loop: str, piece_bytes: int) -> None:
    async with cluster() as served:
        for count, (name, data) in enumerate(SERVED.items(), 1):
            async with await served.connect() as client:
                for start in range(0, len(data), piece_bytes):
                    await client.send(data[start : start + piece_bytes])
                    if start % 50 == 0:
                        await asyncio.sleep(0)
                assert (await client.reply()).status == 200, name
            assert len(served.decode[0].requests) == count, name
            request = served.decode[0].requests[-1]
            assert request.json["text"] == "x"
            assert request.header("authorization") is None
        await served.until(lambda: len(served.short[0].requests) == len(SERVED))


async def test_http_1_0_is_answered_and_closed() -> None:
    async with cluster() as served:
        for headers in ({}, {"Connection": "keep-alive"}):
            async with await served.connect() as client:
                answer = await client.ask("POST", "/generate", BODY, headers, version="1.0")
                assert (answer.status, answer.headers["connection"]) == (200, "close")
                assert await client.is_closed_within(1.0)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://a/generate", "/generate"),
        (b"HTTP://evil:80/generate?x=1", "/generate?x=1"),
        (b"https://[::1]:30000/v1/completions", "/v1/completions"),
        (b"/%67enerate", "/generate"),
        (b"/v1%2Fcompletions", "/v1/completions"),
        (b"/generate#part", "/generate"),
        (b"/generate?a=%2F&b#part", "/generate?a=%2F&b"),
    ],
)
async def test_targets_in_other_forms_are_served(target: bytes, path: str) -> None:
    """An instance sees only the plain form."""
    async with cluster() as served:
        body = BODY if path.startswith("/generate") else b'{"prompt": "x"}'
        length = b"Content-Length: %d" % len(body)
        async with await served.connect() as client:
            await client.send(post(HOST, b"Connection: close", length, body=body, target=target))
            got = await client.rest()
        assert got.startswith(b"HTTP/1.1 200 ")
        assert [request.path for request in served.decode[0].requests] == [path.partition("?")[0]]


@pytest.mark.parametrize("target", [b"*", b"generate", b"ftp://a/generate", b"http://a", b"http:///", b"//generate"])
async def test_targets_that_name_no_path_of_ours_reach_no_instance(target: bytes) -> None:
    async with cluster() as served:
        async with await served.connect() as client:
            await client.send(post(HOST, b"Connection: close", LENGTH, body=BODY, target=target))
            got = await client.rest()
        assert got.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))
        assert served.upstream_requests() == 0


async def test_connect_is_refused() -> None:
    async with cluster() as served, await served.connect() as client:
        await client.send(b"CONNECT evil:443 HTTP/1.1\r\nHost: evil:443\r\n\r\nhello")
        got = await client.rest()
        assert got == b"" or got.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))


async def test_a_head_too_large_gives_431() -> None:
    async with cluster(max_header_size=2000) as served:
        for data in (
            post(HOST, b"X-A: " + b"a" * 3000, LENGTH, body=BODY),
            post(HOST, *[b"X-%d: y" % i for i in range(500)], LENGTH, body=BODY),
            post(HOST, LENGTH, body=BODY, target=b"/generate?" + b"a" * 3000),
            b"POST /" + b"a" * 100_000,  # and no end
            post(HOST, b"X" * 3000 + b": a"),
        ):
            async with await served.connect() as client:
                await client.send(data)
                answer = await client.reply()
                assert answer.status == 431
                assert answer.error["type"] == "invalid_request_error"
                assert answer.headers["connection"] == "close"
                assert await client.is_closed_within(5.0)
        assert served.upstream_requests() == 0


async def test_a_head_of_just_the_limit_is_served_also_before_a_large_body() -> None:
    text = "y" * 300_000
    body = json.dumps({"text": text}).encode()
    async with cluster(max_header_size=2000, length_boundary_tokens=1 << 20) as served:
        for engine in served.decode:
            served.worker(engine.url).max_prompt_tokens = 1 << 20
        served.router.registry.refresh()
        async with await served.connect() as client:
            await client.send(post(HOST, b"X-A: " + b"a" * 1900, b"Content-Length: %d" % len(body), body=body))
            assert (await client.reply()).status == 200
        assert served.decode[0].requests[0].json["text"] == text


@pytest.mark.slow
@pytest.mark.parametrize("excess_bytes", [1, 30_000_000])
async def test_a_body_too_large_gives_413_that_the_client_gets_to_read(excess_bytes: int) -> None:
    async with cluster(max_payload_size=1000) as served:
        body = b'{"text": "' + b"x" * (1000 - 12) + b'"}'
        assert (await served.ask("POST", "/generate", body)).status == 200
        large = body + b" " * excess_bytes
        chunked = post(HOST, CHUNKED, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large))
        for data in (request_bytes("POST", "/generate", large), chunked, request_bytes("POST", "/workers", large)):
            async with await served.connect() as client:
                await client.send(data)
                answer = await client.reply()
                assert (answer.status, answer.headers["connection"]) == (413, "close")
                assert answer.error["type"] == "invalid_request_error"
        assert len(served.decode[0].requests) == 1


async def test_a_body_too_large_is_refused_before_it_is_sent() -> None:
    async with cluster(max_payload_size=1000) as served, await served.connect() as client:
        await client.send(post(HOST, b"Content-Length: 1001", b"Expect: 100-continue"))
        assert (await client.reply()).status == 413


async def test_trailers_are_limited() -> None:
    async with cluster(max_header_size=2000) as served, await served.connect() as client:
        await client.send(post(HOST, CHUNKED, body=b"d\r\n" + BODY + b"\r\n0\r\nX-A: "))
        for _ in range(20):
            await client.send(b"a" * 1000)
            await asyncio.sleep(0.001)
        assert (await client.reply()).status == 431
        assert served.upstream_requests() == 0


@pytest.mark.slow
async def test_chunk_extensions_are_limited() -> None:
    async with cluster(max_header_size=2000) as served, await served.connect() as client:
        await client.send(post(HOST, CHUNKED, body=b"d;"))
        for _ in range(40):
            await client.send(b"a" * 1000)
            await asyncio.sleep(0.001)
        assert (await client.reply()).status in {400, 413, 431}


async def test_continue_is_sent_before_the_body() -> None:
    async with cluster() as served, await served.connect() as client:
        for _ in range(2):
            await client.send(post(HOST, LENGTH, b"Expect: 100-Continue"))
            assert (await client.reply()).status == 100
            await client.send(BODY)
            assert (await client.reply()).status == 200
        assert served.decode[0].requests[0].header("expect") is None


async def test_head_has_no_body() -> None:
    async with cluster() as served, await served.connect() as client:
        for path in ("/health", "/nowhere", "/v1/models"):
            await client.send(b"HEAD %b HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
            answer = await client.reply(has_body=False)
            assert answer.body == b""
        assert (await client.ask("GET", "/health")).status == 200  # nothing of a body came before it


# -- pipelining -----------------------------------------------------------------------------------------------


async def replies_of(client: RawClient, count: int) -> list[Reply]:
    return [await client.reply() for _ in range(count)]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].plan(reply({"text": "first"}, delay_s=0.1), reply({"text": "second"}))
        await client.send(GOOD + request_bytes("GET", "/health") + GOOD + request_bytes("GET", "/nowhere") + GOOD)
        answers = await replies_of(client, 5)
        assert [answer.status for answer in answers] == [200, 200, 200, 404, 200]
        assert [answers[0].json, answers[2].json] == [{"text": "first"}, {"text": "second"}]
        assert answers[1].json == {"status": "ok"}


@pytest.mark.slow
async def test_a_long_pipeline() -> None:
    async with cluster() as served, await served.connect() as client:
        sending = asyncio.create_task(client.send(GOOD * 500))
        answers = await replies_of(client, 500)
        await sending
        assert {answer.status for answer in answers} == {200}
        assert len({request.room for request in served.decode[0].requests}) == 500


@pytest.mark.slow
async def test_valid_requests_before_a_malformed_one_are_answered() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].script = reply(delay_s=0.05)
        await client.send(GOOD * 3 + b"GARBAGE\r\n\r\n" + GOOD)
        assert [answer.status for answer in await replies_of(client, 4)] == [200, 200, 200, 400]
        assert await client.is_closed_within(5.0)
        assert len(served.decode[0].requests) == 3


async def test_nothing_is_read_behind_connection_close() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].script = reply(delay_s=0.05)
        await client.send(post(HOST, LENGTH, b"Connection: close", body=BODY) + GOOD)
        assert (await client.reply()).status == 200
        assert await client.is_closed_within(5.0)
        assert len(served.decode[0].requests) == 1


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_an_upgrade_is_declined_and_the_connection_goes_on(protocol: bytes) -> None:
    async with cluster() as served, await served.connect() as client:
        upgrade = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % protocol
        await client.send(upgrade + GOOD + upgrade)
        answers = await replies_of(client, 3)
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert not any("upgrade" in answer.headers for answer in answers)


async def test_a_body_is_never_taken_for_a_request() -> None:
    body = json.dumps({"text": SMUGGLED.decode()}).encode()
    async with cluster() as served, await served.connect() as client:
        await client.send(request_bytes("POST", "/nowhere", body) + request_bytes("POST", "/generate", body))
        assert [answer.status for answer in await replies_of(client, 2)] == [404, 200]
        (request,) = served.decode[0].requests
        assert request.json["text"] == SMUGGLED.decode()


async def test_a_client_that_sends_on_while_it_is_served() -> None:
    """Reading stops at a bounded number of waiting requests; all of them are served in the end."""
    async with cluster(max_pipelined_size=100_000) as served, await served.connect() as client:
        served.decode[0].plan(hang())
        large = request_bytes("POST", "/generate", b'{"text": "x"}' + b" " * 90_000)
        sending = asyncio.create_task(client.send(large * 40))
        await served.decode[0].received(1)
        await asyncio.sleep(0.1)
        (connection,) = served.router.ports.clients.open
        assert len(connection._pending) <= 32
        assert connection._pending_bytes <= 2 * 100_000 + (1 << 18)
        served.decode[0].turns[0].cut()
        answers = await replies_of(client, 40)
        await sending
        assert {answer.status for answer in answers} == {200}


async def test_garbage_behind_a_request_that_is_answered_at_once() -> None:
    async with cluster(api_key="k") as served, await served.connect() as client:
        await client.send(post(HOST, LENGTH, b"Connection: close", body=BODY) + b"more")
        assert (await client.reply()).status == 401
        with pytest.raises(BrokenReplyError):
            await client.reply()
