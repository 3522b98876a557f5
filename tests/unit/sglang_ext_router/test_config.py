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
from sglang_ext_router.config import RouterConfig, RouterConfigError, WorkerAddress, flag_of, parse_worker_url
from sglang_ext_router.instances.workers import Worker
from support.engines import free_port


def parse(*arguments: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


ROOT = Path(__file__).resolve().parents[3]


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
    ("--set", "placement.prefix_index_blocks=0"),
    ("--tokenizer-path", "/nowhere/at/all"),
    ("--max-concurrent-requests", "-2"),
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
    ("--set", "health.load_poll_interval_secs=0"),
    ("--max-payload-size", "0"),
    ("--set", "limits.max_header_size=10"),
    ("--set", "limits.header_timeout_secs=0"),
    ("--set", "limits.body_timeout_secs=0"),
    ("--set", "limits.keep_alive_timeout_secs=0"),
    ("--shutdown-grace-period-secs", "-1"),
    ("--controller", "maybe"),
    ("--controller", "on", "--processes", "2"),
    ("--controller", "advise", "--processes", "2"),
    ("--set", "controller.interval_secs"),
    ("--set", "controllers.interval_secs=1"),
    ("--set", "controller.interval=1"),
    ("--set", "controller.interval_secs=soon"),
    ("--set", "controller.min_short=1.5"),
    ("--set", "placement.pool_spill=yes"),
    ("--config", "/nowhere/at/all.yaml"),
    ("--set", "controller.interval_secs=0"),
    ("--set", "controller.interval_secs=inf"),
    ("--set", "controller.interval_secs=60"),  # above the default of the cool-down
    ("--set", "controller.cooldown_secs=1"),
    ("--set", "controller.cooldown_secs=nan"),
    ("--set", "controller.hysteresis=0"),
    ("--set", "controller.hysteresis=nan"),
    ("--set", "controller.min_pressure=-1"),
    ("--set", "controller.min_pressure=nan"),
    ("--set", "controller.min_short=-1"),
    ("--set", "controller.min_long=-1"),
    ("--set", "controller.confirm_rounds=0"),
    ("--set", "controller.drain_timeout_secs=0"),
    ("--set", "controller.backlog_weight=-1"),
    ("--set", "controller.sla_weight=inf"),
    ("--set", "controller.utilisation_weight=nan"),
    ("--set", "controller.short_slo_secs=0"),
    ("--set", "controller.long_slo_secs=inf"),
    (
        *("--set", "controller.backlog_weight=0", "--set", "controller.sla_weight=0"),
        *("--set", "controller.utilisation_weight=0"),
    ),
    ("--ui-port", "-1"),
    ("--ui-port", "65536"),
    ("--ui-port", "30000"),  # the default of --port
    ("--ui-port", "30001", "--metrics-port", "30001"),
    ("--ui-port", "30001", "--disable-ui"),
    ("--port", "0", "--ui-port", "30001", "--ui-host", "no.such.host.invalid"),
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
    name = arguments[1].partition("=")[0] if arguments[0] == "--set" else arguments[0]
    assert name in lines[0]
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


def test_settings_come_from_the_file_and_from_set_which_wins(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("controller:\n  interval_secs: 2\n  cooldown_secs: 9.5\nplacement:\n  pool_spill: false\n")
    config = parse("--config", str(file), "--set", "controller.interval_secs=3", "--set", "group.peer_host=::1")
    assert (config.controller_interval_secs, config.controller_cooldown_secs) == (3.0, 9.5)
    assert (config.pool_spill, config.peer_host) == (False, "::1")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("controler: {}\nlimits: {max_connection: 3}", "--config: limits.max_connection: limits has no"),
        ("controler: {interval_secs: 3}", "--config: controler.interval_secs: there is no section 'controler'"),
        ("limits: 3", "--config: limits must be a section of settings"),
        ("limits: {max_connections: many}", "--config: limits.max_connections must be a whole number, not 'many'"),
        ("limits: {max_connections: true}", "--config: limits.max_connections must be a whole number, not True"),
        ("[1]", "must hold sections: "),
        ("a: [", "is not YAML: "),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(text)
    with pytest.raises(RouterConfigError) as caught:
        parse("--config", str(file))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


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
    config = parse("--disable-retries", "--disable-circuit-breaker", "--log-json")
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
            if "section" in field.metadata:
                assert flag_of(field.name) not in shown
            else:
                assert flag_of(field.name) in shown


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
