"""A worker's start: asked to end at any moment it ends at once, and its ranks meet at a port of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang_ext.engine.device import Device
from sglang_ext.engine.launch import _publish_events, _reserve_rendezvous
from sglang_ext.engine.options import (
    ENVIRONMENT_VARIABLE,
    ExtensionOptions,
    KvEventsOptions,
    options_from_environment,
)
from sglang_ext.ports import PORTS
from sglang_ext.types import Role

ASKED = """
import os, signal, sys, types
from sglang_ext.engine.launch import _end_when_asked

_end_when_asked()
{state}
try:
    os.kill(os.getpid(), signal.SIGTERM)
except ImportError:
    pass  # as modules do for which something is optional
"""
HALF_IMPORTED = "\n".join(
    f"sys.modules[{name!r}] = types.ModuleType({name!r})" for name in ("sglang", "sglang.srt", "sglang.srt.utils")
)


@pytest.mark.parametrize("state", ["", HALF_IMPORTED], ids=["before SGLang is imported", "while it is"])
def test_the_signal_ends_a_worker_that_starts(state: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ASKED.format(state=state)], capture_output=True, timeout=60)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr


def test_the_ranks_of_each_instance_meet_at_a_reserved_port() -> None:
    ports = [reserved_port() for _ in range(20)]
    assert len(set(ports)) == len(ports)
    assert set(ports) <= set(PORTS)


@pytest.mark.parametrize("given", [{"nccl_port": 23977}, {"dist_init_addr": "10.0.0.1:5000"}], ids=["port", "address"])
def test_a_rendezvous_that_was_given_stays(given: dict[str, Any]) -> None:
    assert reserved_port(**given) == given.get("nccl_port")


def test_data_parallel_replicas_meet_at_ports_of_their_own() -> None:
    assert reserved_port(dp_size=2) is None
    assert reserved_port(dp_size=2, enable_dp_attention=True) in PORTS  # one group


def reserved_port(**given: Any) -> int | None:
    defaults = {"nccl_port": None, "dist_init_addr": None, "dp_size": 1, "enable_dp_attention": False}
    arguments = SimpleNamespace(**{**defaults, **given})
    _reserve_rendezvous(cast(Any, arguments))
    return cast("int | None", arguments.nccl_port)


def with_events(kv_events: KvEventsOptions | None, role: Role = Role.SHORT, **given: Any) -> SimpleNamespace:
    defaults = {"kv_events_config": None, "disable_radix_cache": False, "page_size": 16, "load_publish_endpoint": None}
    arguments = SimpleNamespace(**{**defaults, "dp_size": 1, **given})
    _publish_events(cast(Any, arguments), ExtensionOptions(role, Device.CPU, kv_events=kv_events))
    return arguments


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")


@pytest.mark.parametrize("keeps_prefixes", [True, False])
def test_a_decode_instance_publishes_its_prefixes_where_it_keeps_some(keeps_prefixes: bool) -> None:
    asked = KvEventsOptions("0.0.0.0", 0, 0, 7003)
    arguments = with_events(asked, Role.DECODE, disaggregation_decode_enable_radix_cache=keeps_prefixes)
    assert (arguments.kv_events_config is not None) is keeps_prefixes
    assert published_load() == ("*", 7003)


def published_load() -> tuple[str, int] | None:
    """Return where the processes of the engine publish its load."""
    options = options_from_environment(os.environ)
    assert options is not None
    assert options.kv_events is not None
    return (options.kv_events.host, options.kv_events.load_port) if options.kv_events.load_port else None


@pytest.mark.parametrize(
    ("kv_events", "given", "expected"),
    [
        (KvEventsOptions("0.0.0.0", 7001, 7002, 7003), {}, ("*", 7003)),
        (KvEventsOptions("0.0.0.0", 7001, 7002), {}, None),  # others may be shut off
        (KvEventsOptions("localhost", 0, 0, 7003), {}, ("127.0.0.1", 7003)),
        (KvEventsOptions("0.0.0.0", 0, 0, 7003), {"load_publish_endpoint": "off"}, None),
        (KvEventsOptions("0.0.0.0", 0, 0, 7003), {"page_size": 1}, ("*", 7003)),
        (KvEventsOptions("0.0.0.0", 0, 0, 7003, has_blocks=False), {}, ("*", 7003)),
    ],
)
def test_where_load_is_published(
    kv_events: KvEventsOptions, given: dict[str, Any], expected: tuple[str, int] | None
) -> None:
    arguments = with_events(kv_events, **given)
    assert published_load() == expected
    assert (arguments.kv_events_config is not None) is (kv_events.has_blocks and "page_size" not in given)


@pytest.mark.parametrize("ranks", [1, 4])
def test_ports_of_all_ranks_are_free(ranks: int) -> None:
    arguments = with_events(KvEventsOptions("0.0.0.0"), dp_size=ranks)
    config = json.loads(arguments.kv_events_config)
    ports = [int(config[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")]
    load = published_load()
    assert load is not None
    taken = [first + rank for first in (*ports, load[1]) for rank in range(ranks)]
    assert len(set(taken)) == 3 * ranks
    assert set(taken) <= set(PORTS)


def test_nothing_is_published_where_that_was_not_asked_for() -> None:
    arguments = with_events(None)
    assert arguments.kv_events_config is None
    assert not os.environ[ENVIRONMENT_VARIABLE]


def published(kv_events: KvEventsOptions | None, **given: Any) -> dict[str, Any] | None:
    config = with_events(kv_events, **given).kv_events_config
    return None if config is None else cast("dict[str, Any]", json.loads(config))


def test_events_are_published_at_the_hosts_address() -> None:
    config = published(KvEventsOptions("127.0.0.1", 7001, 7002))
    assert config is not None
    assert (config["publisher"], config["bind"]) == ("zmq", True)
    assert (config["endpoint"], config["replay_endpoint"]) == ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
    everywhere = published(KvEventsOptions("0.0.0.0", 7001, 7002))
    assert everywhere is not None
    assert everywhere["endpoint"] == "tcp://*:7001"
    local = published(KvEventsOptions("localhost"))
    assert local is not None
    ports = {int(local[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")}
    assert local["endpoint"].startswith("tcp://127.0.0.1:")
    assert len(ports) == 2
    assert ports <= set(PORTS)


@pytest.mark.parametrize(
    ("kv_events", "given"),
    [
        (None, {}),
        (KvEventsOptions("127.0.0.1"), {"page_size": 1}),
        (KvEventsOptions("127.0.0.1"), {"page_size": None}),
        (KvEventsOptions("127.0.0.1"), {"disable_radix_cache": True}),
        (KvEventsOptions("::1"), {}),
    ],
)
def test_no_events(kv_events: KvEventsOptions | None, given: dict[str, Any]) -> None:
    assert published(kv_events, **given) is None


def test_the_events_that_were_asked_for_stay() -> None:
    given = {"publisher": "null"}
    assert published(KvEventsOptions("127.0.0.1"), kv_events_config=json.dumps(given)) == given
