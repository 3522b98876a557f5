"""Launch lines of sglang_router: each of its options is taken, or refused with one line that says what to use."""

from __future__ import annotations

import argparse

import pytest

from sglang_ext.cli import main
from sglang_ext.types import Role
from sglang_ext_router.command_line import add_arguments, config_from_arguments
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.sglang_router_options import REFUSED, RENAMED, WITHOUT_EFFECT

# All options of sglang_router 0.3.2.
OPTIONS = """
--host --port --worker-urls --policy --prefill-policy --decode-policy --cache-threshold
--balance-abs-threshold --balance-rel-threshold --bucket-adjust-interval-secs --eviction-interval-secs
--max-tree-size --max-idle-secs --assignment-mode --max-payload-size --dp-aware --enable-igw --mini-lb
--pd-disaggregation --prefill --decode --worker-startup-timeout-secs --worker-startup-check-interval --log-dir
--log-level --service-discovery --selector --service-discovery-port --service-discovery-namespace
--prefill-selector --decode-selector --prometheus-port --prometheus-host --prometheus-duration-buckets
--request-id-headers --request-timeout-secs --shutdown-grace-period-secs --cors-allowed-origins
--max-concurrent-requests --queue-size --queue-timeout-secs --rate-limit-tokens-per-second --retry-max-retries
--retry-initial-backoff-ms --retry-max-backoff-ms --retry-backoff-multiplier --retry-jitter-factor
--disable-retries --cb-failure-threshold --cb-success-threshold --cb-timeout-duration-secs
--cb-window-duration-secs --disable-circuit-breaker --health-failure-threshold --health-success-threshold
--health-check-timeout-secs --health-check-interval-secs --health-check-endpoint --disable-health-check
--model-path --tokenizer-path --chat-template --tokenizer-cache-enable-l0 --tokenizer-cache-l0-max-entries
--tokenizer-cache-enable-l1 --tokenizer-cache-l1-max-memory --reasoning-parser --tool-call-parser
--mcp-config-path --backend --history-backend --oracle-wallet-path --oracle-tns-alias
--oracle-connect-descriptor --oracle-username --oracle-password --oracle-pool-min --oracle-pool-max
--oracle-pool-timeout-secs --postgres-db-url --postgres-pool-max --redis-url --redis-pool-max
--redis-retention-days --client-cert-path --client-key-path --ca-cert-paths --tls-cert-path --tls-key-path
--enable-trace --otlp-traces-endpoint --api-key --control-plane-api-keys --control-plane-audit-enabled
--jwt-issuer --jwt-audience --jwt-jwks-uri --jwt-role-mapping
"""
PREFILL = ("--pd-disaggregation", "--prefill", "http://p1:8000", "9000", "--prefill", "http://p2:8000")
DECODE = ("--decode", "http://d1:8001", "--decode", "http://d2:8001")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made


def parse(*words: str) -> RouterConfig:
    return config_from_arguments(parser().parse_args(words))


def test_every_option_is_known() -> None:
    ours = {flag for action in parser()._actions for flag in action.option_strings}
    options = set(OPTIONS.split())
    assert options <= ours
    assert {*RENAMED, *WITHOUT_EFFECT, *REFUSED} <= options
    assert set(RENAMED.values()) <= ours


@pytest.mark.parametrize(
    "words",
    [
        (*PREFILL, *DECODE, "--policy", "cache_aware"),
        (*PREFILL, "none", *DECODE, "--prefill-policy", "cache_aware", "--decode-policy", "power_of_two"),
        (*PREFILL, *DECODE, "--host", "0.0.0.0", "--port", "8000", "--max-concurrent-requests", "-1"),
        (*PREFILL, *DECODE, "--mini-lb", "--cache-threshold", "0.5", "--balance-abs-threshold", "32"),
        (*PREFILL, *DECODE, "--health-check-endpoint", "/health", "--backend", "sglang", "--history-backend", "none"),
        (*PREFILL, *DECODE, "--log-level", "warn", "--worker-startup-timeout-secs", "600", "--enable-igw"),
        (*PREFILL, *DECODE, "--request-id-headers", "x-request-id", "x-trace-id", "--retry-jitter-factor", "0.1"),
    ],
    ids=lambda words: " ".join(words[8:12]),
)
def test_launch_lines_are_taken(words: tuple[str, ...]) -> None:
    config = parse(*words)
    roles = [worker.role for worker in config.workers]
    assert roles == [Role.BOTH, Role.BOTH, Role.DECODE, Role.DECODE]
    assert config.max_concurrent_requests == 0


def test_other_names_are_read_as_ours() -> None:
    config = parse(
        *("--prometheus-port", "29000", "--prometheus-host", "0.0.0.0", "--service-discovery"),
        *("--cors-allowed-origins", "http://a", "http://b", "--ca-cert-paths", "/ca"),
        *("--tls-cert-path", "/c", "--tls-key-path", "/k"),
        *("--prefill-selector", "app=x", "role=prefill", "--decode-selector", "app=x,role=decode"),
    )
    assert (config.metrics_port, config.metrics_host) == (29000, "0.0.0.0")
    assert config.cors_origins == ("http://a", "http://b")
    assert (config.ssl_certfile, config.ssl_keyfile, config.worker_ca_file) == ("/c", "/k", "/ca")
    assert (config.prefill_selector, config.decode_selector) == ("app=x,role=prefill", "app=x,role=decode")
    assert parse("--metrics-port", "1").metrics_port == 1
    assert parse().metrics_host == "127.0.0.1"


def test_what_has_no_effect_is_remembered() -> None:
    words = ["--mini-lb", "--max-tree-size", "1", "--chat-template", "x", "--prometheus-duration-buckets", "1", "2"]
    expected = ("--mini-lb", "--max-tree-size", "--chat-template", "--prometheus-duration-buckets")
    assert parser().parse_args(words).without_effect == expected
    assert parser().parse_args([]).without_effect == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--worker-urls", "http://a:1", "http://b:1"],
            "give each ordinary server with --plain URL, or each divided one ",
        ),
        (["--selector", "app=x"], "use --prefill-short-selector"),
        (["--dp-aware"], "start more instances instead of data-parallel ranks"),
        (["--log-dir", "/logs"], "redirect it"),
        (["--rate-limit-tokens-per-second", "5"], "use --max-concurrent-requests and --queue-size"),
        (["--history-backend", "redis"], "conversations are not stored"),
        (["--backend", "openai"], "the instances are SGLang's"),
        (["--health-check-endpoint", "/alive"], "/health is asked"),
        (["--jwt-issuer", "https://issuer"], "use --api-keys-file"),
    ],
)
def test_others_are_refused_with_what_to_use(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["router", *words])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sglang-ext router: error: {words[0]} is sglang_router's: ")
    assert message in error
    assert error.count("\n") == 1
