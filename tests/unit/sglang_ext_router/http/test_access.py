"""Several clients' keys from a file, what is closed without one, origins of browsers, and no secret in a report."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_ext import key_hashes
from sglang_ext.key_hashes import ApiKeyFileError
from sglang_ext_router.config import RouterConfigError
from sglang_ext_router.control.control_plane import without_secrets
from sglang_ext_router.http.api_keys import ApiKeys, read_api_keys
from sglang_ext_router.router import Router
from support.raw_client import RawClient, Reply, request_bytes
from support.router_process import FAST, cluster

PROMPT = {"text": "x"}
ADMIN = {"Authorization": "Bearer admin"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def line(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"


# -- the file -------------------------------------------------------------------------------------------------


def test_the_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "# clients\n\n" + line("alice", "a") + "  " + line("bob@work", "b").upper().replace("BOB@WORK", "bob")
    )
    assert read_api_keys(str(file)) == {
        "alice": hashlib.sha256(b"a").digest(),
        "bob": hashlib.sha256(b"b").digest(),
    }
    keys = ApiKeys(str(file))
    assert [keys.knows(key) for key in (b"a", b"b", b"", b"c", b"A", b"a ", hashlib.sha256(b"a").digest())] == [
        True,
        True,
        *[False] * 5,
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("alice\n", "line 1"),
        ("\nalice:abc\n", "line 2"),
        (":" + "0" * 64, "line 1"),
        ("a b:" + "0" * 64, "line 1"),
        (line("a", "x") + line("a", "y"), "line 2"),
        (line("a", "x") + line("b", "x"), "line 2"),
        ("alice:" + "g" * 64, "line 1"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ApiKeyFileError) as caught:
        read_api_keys(str(file))
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(RouterConfigError, match="--api-keys-file"):
        type(FAST)(api_keys_file=str(file))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "binary"):
        with pytest.raises(RouterConfigError, match="--api-keys-file"):
            type(FAST)(api_keys_file=str(path))


@pytest.mark.slow
async def test_keys_are_read_again_and_stay_where_the_file_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_hashes, "RELOAD_INTERVAL_S", 0.02)
    file = tmp_path / "keys"
    file.write_text(line("alice", "a") + line("bob", "b"))
    async with cluster(api_keys_file=str(file)) as served:

        async def statuses() -> list[int]:
            return [(await served.ask("POST", "/generate", PROMPT, bearer(key))).status for key in ("a", "b", "c")]

        async def until_read(is_so: Callable[[], bool], text: str) -> None:
            new = tmp_path / "new"
            new.write_text(text)
            os.replace(new, file)
            await served.until(is_so)

        assert await statuses() == [200, 200, 401]
        keys = served.router.access._named_keys
        assert keys is not None
        await until_read(lambda: keys.knows(b"c"), line("alice", "a") + line("carol", "c"))
        assert await statuses() == [200, 401, 200]
        with caplog.at_level(logging.WARNING):
            await until_read(lambda: "line 1" in caplog.text, "nonsense")
        assert await statuses() == [200, 401, 200]
        with caplog.at_level(logging.WARNING):
            file.unlink()
            await served.until(lambda: "No such file" in caplog.text)
        assert await statuses() == [200, 401, 200]
        await until_read(lambda: keys.knows(b"b"), line("bob", "b"))
        assert await statuses() == [401, 200, 401]
        assert "nonsense" not in caplog.text


@pytest.mark.slow
async def test_a_clients_key_gives_no_admin_rights_and_does_not_reach_the_instances(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(line("alice", "a"))
    for options in ({"api_keys_file": str(file)}, {"api_keys_file": str(file), "worker_api_key": "inner"}):
        async with cluster(**options) as served:  # type: ignore[arg-type]
            assert (await served.ask("POST", "/generate", PROMPT, bearer("a"))).status == 200
            assert (await served.ask("POST", "/flush_cache", headers=bearer("a"))).status == 403
            inner = "Bearer inner" if "worker_api_key" in options else None
            assert served.decode[0].requests[0].header("authorization") == inner
    async with cluster(api_key="client", api_keys_file=str(file), admin_api_key="admin") as served:
        for headers, client, admin in ((bearer("a"), 200, 401), (bearer("client"), 200, 401), (ADMIN, 200, 200)):
            assert (await served.ask("POST", "/generate", PROMPT, headers)).status == client
            assert (await served.ask("POST", "/flush_cache", headers=headers)).status == admin
        assert {request.header("authorization") for request in served.decode[0].requests} == {"Bearer client"}


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "BeArEr"])
@pytest.mark.parametrize(
    ("method", "path", "key"),
    [
        ("GET", "/v1/models", "client"),
        ("GET", "/metrics", "from-a-file"),
        ("POST", "/generate", "from-a-file"),
        ("GET", "/workers", "admin"),
        ("POST", "/flush_cache", "admin"),
        ("POST", "/abort_request", "admin"),
        ("GET", "/ui/stream", "admin"),
    ],
)
async def test_the_scheme_of_a_key_has_no_case(tmp_path: Path, method: str, path: str, key: str, scheme: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line("alice", "from-a-file"))
    body = {"/generate": PROMPT, "/abort_request": {"abort_all": True}}.get(path, b"")
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with cluster(api_key="client", api_keys_file=str(file), admin_api_key="admin") as served:
        for given, status in ((key, 200), (f"{key}x", 401)):
            async with await served.connect() as client:
                await client.send(request_bytes(method, path, sent, {"Authorization": f"{scheme} {given}"}))
                assert (await client.head())[0] == status


async def test_the_admin_key_alone_does_not_reach_the_instances() -> None:
    async with cluster(admin_api_key="admin") as served:
        assert (await served.ask("POST", "/generate", PROMPT, ADMIN)).status == 200
        assert served.decode[0].requests[0].header("authorization") is None


# -- reports --------------------------------------------------------------------------------------------------


def test_what_is_named_like_a_secret_is_hidden() -> None:
    info = {
        "api_key": "k",
        "admin_api_key": "k",
        "ssl_keyfile_password": "k",
        "hf_token": "k",
        "access_tokens": ["k"],
        "aws-secret": "k",
        "tokenizer_path": "/t",
        "max_total_num_tokens": 5,
        "internal_states": [{"api_key": "k", "page_size": 1}],
        "command": "--api-key inner-key --port 1",
        "missing_key": None,
    }
    clean = without_secrets(info, ("inner-key",))
    assert "k" not in str({name: clean[name] for name in ("api_key", "admin_api_key", "hf_token")}.values())
    assert clean == {
        **dict.fromkeys(("api_key", "admin_api_key", "ssl_keyfile_password", "hf_token", "aws-secret"), "(hidden)"),
        "access_tokens": "(hidden)",
        "tokenizer_path": "/t",
        "max_total_num_tokens": 5,
        "internal_states": [{"api_key": "(hidden)", "page_size": 1}],
        "command": "(hidden)",
        "missing_key": None,
    }


async def test_server_info_tells_no_key_of_an_instance() -> None:
    async with cluster(api_key="client") as served:
        for engine in served.engines:
            assert isinstance(engine.info, dict)
            engine.info["api_key"] = "engines-own"
            engine.info["internal_states"] = [{"admin_api_key": "engines-own"}]
        answer = await served.ask("GET", "/server_info", headers=bearer("client"))
        assert answer.status == 200
        assert answer.json["decode"][0]["api_key"] == "(hidden)"
        assert b"engines-own" not in answer.body


async def ask_reports(router: Router, path: str) -> Reply:
    loop = router.loop
    server = await loop.create_server(router.report_connection, "127.0.0.1", 0)
    try:
        async with await RawClient.connect(server.sockets[0].getsockname()[1]) as client:
            return await client.ask("GET", path)
    finally:
        server.close()


@pytest.mark.slow
async def test_reports_have_a_port_of_their_own() -> None:
    async with cluster(api_key="client", metrics_port=1) as served:
        for path in ("/metrics", "/docs", "/openapi.json", "/readyz"):
            assert (await ask_reports(served.router, path)).status == 200
        for path in ("/v1/models", "/workers", "/generate"):
            assert (await ask_reports(served.router, path)).status == 404
        for path in ("/metrics", "/docs", "/openapi.json"):
            assert (await served.ask("GET", path)).status == 401
            assert (await served.ask("GET", path, headers=bearer("client"))).status == 404


# -- origins --------------------------------------------------------------------------------------------------

PREFLIGHT = {
    "Origin": "https://app.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, x-stainless-os",
}


@pytest.mark.parametrize(
    ("allowed", "echoed"),
    [
        ("https://app.example", "https://app.example"),
        ("http://a:1, https://app.example", "https://app.example"),
        ("*", "*"),
        ("https://other.example", None),
        ("", None),
    ],
)
async def test_pages_of_allowed_origins_may_ask(allowed: str, echoed: str | None) -> None:
    async with cluster(api_key="client", cors_allow_origins=allowed) as served:
        for path in ("/v1/chat/completions", "/v1/models"):
            answer = await served.ask("OPTIONS", path, headers=PREFLIGHT)
            assert answer.status == (200 if allowed else 401)
            assert answer.headers.get("access-control-allow-origin") == echoed
            if echoed:
                assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
                assert "POST" in answer.headers["access-control-allow-methods"]
        origin = {"Origin": "https://app.example"}
        asked = [
            await served.ask("POST", "/generate", PROMPT, origin | bearer("client")),
            await served.ask("POST", "/generate", {**PROMPT, "stream": True}, origin | bearer("client")),
            await served.ask("POST", "/generate", {}, origin | bearer("client")),
            await served.ask("GET", "/v1/models", headers=origin | bearer("client")),
            await served.ask("POST", "/generate", PROMPT, origin),
        ]
        assert [answer.status for answer in asked] == [200, 200, 400, 200, 401]
        assert {answer.headers.get("access-control-allow-origin") for answer in asked} == {echoed}
        if allowed and allowed != "*":
            assert {answer.headers["vary"] for answer in asked} == {"origin"}


@pytest.mark.parametrize("value", ["app.example", "https://", "https://a b", "https://a/", "null,https://a"])
def test_a_bad_origin_is_refused(value: str) -> None:
    with pytest.raises(RouterConfigError, match="--cors-allow-origins"):
        type(FAST)(cors_allow_origins=value)
