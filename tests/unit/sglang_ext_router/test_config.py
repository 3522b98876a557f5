"""Options: every bad one ends with status 2 and one line that names it."""

from __future__ import annotations

import argparse
import dataclasses
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cli import main
from sglang_ext.types import Role
from sglang_ext_router import main as main_module
from sglang_ext_router.command_line import add_arguments, config_from_arguments
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress, parse_worker_url
from sglang_ext_router.instances.workers import Worker
from support.engines import free_port


def parse(*arguments: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


BAD: list[tuple[str, ...]] = [
    ("--port", "0"),
    ("--port", "65536"),
    ("--port", "-1"),
    ("--port", "http"),
    ("--processes", "0"),
    ("--length-boundary-tokens", "-1"),
    ("--length-boundary-tokens", "1.5"),
    ("--prefill-policy", "best"),
    ("--decode-policy", "cache_aware"),
    ("--prefix-index-blocks", "0"),
    ("--tokenizer-path", "/nowhere/at/all"),
    ("--max-concurrent-requests", "-1"),
    ("--queue-size", "-1"),
    ("--queue-timeout-secs", "0"),
    ("--queue-timeout-secs", "-3"),
    ("--queue-timeout-secs", "nan"),
    ("--request-timeout-secs", "0"),
    ("--retry-max-retries", "-1"),
    ("--retry-initial-backoff-ms", "-1"),
    ("--retry-max-backoff-ms", "10"),  # below the default of the first
    ("--retry-backoff-multiplier", "0.5"),
    ("--retry-backoff-multiplier", "nan"),
    ("--cb-failure-threshold", "0"),
    ("--cb-success-threshold", "0"),
    ("--cb-timeout-duration-secs", "0"),
    ("--cb-window-duration-secs", "-1"),
    ("--health-check-interval-secs", "0"),
    ("--health-check-timeout-secs", "0"),
    ("--health-failure-threshold", "0"),
    ("--load-poll-interval-secs", "0"),
    ("--max-payload-size", "0"),
    ("--max-header-size", "10"),
    ("--header-timeout-secs", "0"),
    ("--body-timeout-secs", "0"),
    ("--keep-alive-timeout-secs", "0"),
    ("--shutdown-grace-period-secs", "-1"),
    ("--controller", "maybe"),
    ("--controller", "on", "--processes", "2"),
    ("--controller", "advise", "--processes", "2"),
    ("--controller-interval-secs", "0"),
    ("--controller-interval-secs", "inf"),
    ("--controller-interval-secs", "60"),  # above the default of the cool-down
    ("--controller-cooldown-secs", "1"),
    ("--controller-cooldown-secs", "nan"),
    ("--controller-hysteresis", "0"),
    ("--controller-hysteresis", "nan"),
    ("--controller-min-pressure", "-1"),
    ("--controller-min-pressure", "nan"),
    ("--controller-min-short", "-1"),
    ("--controller-min-long", "-1"),
    ("--controller-confirm-rounds", "0"),
    ("--controller-drain-timeout-secs", "0"),
    ("--controller-backlog-weight", "-1"),
    ("--controller-sla-weight", "inf"),
    ("--controller-utilisation-weight", "nan"),
    ("--controller-short-slo-secs", "0"),
    ("--controller-long-slo-secs", "inf"),
    (
        *("--controller-backlog-weight", "0", "--controller-sla-weight", "0"),
        *("--controller-utilisation-weight", "0"),
    ),
    ("--ui-port", "-1"),
    ("--ui-port", "65536"),
    ("--ui-port", "30000"),  # the default of --port
    ("--ui-port", "30001", "--metrics-port", "30001"),
    ("--ui-port", "30001", "--disable-ui"),
    ("--ui-port", "30001", "--ui-host", "no.such.host.invalid"),
    ("--log-level", "loud"),
    ("--policy", "best"),
    ("--api-key", "a\r\nX-Evil: 1"),
    ("--api-key", "a\x00"),
    ("--admin-api-key", "a\n"),
    ("--host", "a" * 70),
    ("--host", "no.such.host.invalid"),
    ("--host", ""),
    ("--prefill", "ws://a:1"),
    ("--coordinator-url", "https://a:1"),
    ("--prefill", "http://a"),
    ("--prefill", "a"),
    ("--prefill", ""),
    ("--prefill", "http://:1"),
    ("--prefill", "http://a:0"),
    ("--prefill", "http://a:65536"),
    ("--prefill", "http://a:x"),
    ("--prefill", "http://a:1/v1"),
    ("--prefill", "http://a:1?x"),
    ("--prefill", "http://a:1#x"),
    ("--prefill", "http://user:secret@a:1"),
    ("--prefill", "http://a b:1"),
    ("--prefill", "http://[::1"),
    ("--prefill", "ftp://a:1"),
    ("--prefill", "http://a:1", "0"),
    ("--prefill", "http://a:1", "65536"),
    ("--prefill", "http://a:1", "x"),
    ("--prefill", "http://a:1", "1", "2"),
    ("--prefill-short", "http://a"),
    ("--prefill-long", "http://a"),
    ("--decode", "http://[::1"),
    ("--decode", "a:b"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(map(ascii, arguments)))
def test_a_bad_option_gives_status_2_and_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(config: RouterConfig, sock: socket.socket) -> None:
        sock.close()
        pytest.fail("accepted")

    monkeypatch.setattr(main_module, "serve", serve)
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(main(["router", *arguments]))
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if not line.startswith(("usage:", " "))]
    assert len(lines) == 1
    assert arguments[0] in lines[0]
    assert "Traceback" not in shown.err


def test_an_address_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["router", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--port {port}" in line
    assert "in use" in line


@pytest.mark.parametrize("option", ["metrics", "ui"])
def test_an_address_in_use_of_a_further_port_is_told_and_the_first_is_free_again(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["router", "--port", str(own), f"--{option}-port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--{option}-port {port}" in line
    socket.create_server(("127.0.0.1", own)).close()


def test_the_same_worker_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--prefill", "http://a:1", "--decode", "a:1"]) == 2
    assert "http://a:1" in capsys.readouterr().err


def test_workers() -> None:
    config = parse(
        *("--pd-disaggregation", "--prefill", "http://p:1", "9000", "--prefill", "http://q:1/", "none"),
        *(
            "--prefill-short",
            "s:2",
            "--prefill-long",
            "http://[::1]:3",
            "8998",
            "--decode",
            "HTTP://D:4",
            "--decode",
            "e:5",
        ),
    )
    assert set(config.workers) == {
        WorkerAddress("http://p:1", Role.BOTH, 9000),
        WorkerAddress("http://q:1", Role.BOTH, None),
        WorkerAddress("http://s:2", Role.SHORT, None),
        WorkerAddress("http://[::1]:3", Role.LONG, 8998),
        WorkerAddress("http://d:4", Role.DECODE, None),
        WorkerAddress("http://e:5", Role.DECODE, None),
    }


def test_without_options_all_have_their_defaults() -> None:
    assert parse() == RouterConfig()


def test_switches() -> None:
    config = parse("--no-pool-spill", "--disable-retries", "--disable-circuit-breaker", "--log-json")
    assert not config.pool_spill
    assert config.disable_retries
    assert config.disable_circuit_breaker
    assert config.log_json


@pytest.mark.parametrize(
    ("arguments", "prefill", "decode"),
    [
        (("--policy", "round_robin"), "round_robin", "round_robin"),
        (("--policy", "cache_aware"), "cache_aware", "freeness"),
        (("--policy", "random", "--decode-policy", "power_of_two"), "random", "power_of_two"),
        (("--policy", "random", "--prefill-policy", "predicted_wait"), "predicted_wait", "random"),
        (("--policy", "random", "--decode-policy", "freeness"), "random", "freeness"),
    ],
)
def test_one_policy_for_both(arguments: tuple[str, ...], prefill: str, decode: str) -> None:
    config = parse(*arguments)
    assert (config.prefill_policy, config.decode_policy) == (prefill, decode)


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "client")
    monkeypatch.setenv("SGLANG_EXT_ADMIN_API_KEY", "admin")
    config = parse()
    assert (config.api_key, config.admin_api_key) == ("client", "admin")
    assert parse("--api-key", "given").api_key == "given"


def test_every_option_has_a_help_text_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["router", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(RouterConfig):
        if field.name != "workers":
            assert field.metadata["help"]
            assert "--" + field.name.replace("_", "-") in shown or "--no-" + field.name.replace("_", "-") in shown


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match="--tokenizer-path"):
        parse("--tokenizer-path", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert parse("--tokenizer-path", str(tmp_path)).tokenizer_path == str(tmp_path)


@pytest.mark.slow
@given(text=st.text(max_size=40) | st.text(st.sampled_from("http:/[]@?#.%0123456789ab \x00\n"), max_size=25))
def test_any_url_is_normalised_or_refused_in_one_line(text: str) -> None:
    try:
        url = parse_worker_url(text, "--decode")
    except RouterConfigError as error:
        message = str(error)
    else:
        assert parse_worker_url(url, "--decode") == url
        check_heads(url)
        return
    assert "--decode" in message
    assert len(message.splitlines()) == 1


def check_heads(url: str) -> None:
    """A URL that was accepted makes a worker whose heads are well formed."""
    head = Worker(0, WorkerAddress(url, Role.DECODE), RouterConfig()).request_head(b"/generate")
    assert head.count(b"\r\n") == 3
    assert head.isascii()
    assert head.replace(b"\r\n", b"").isascii()
    assert not any(byte < 0x20 for byte in head.replace(b"\r\n", b""))
