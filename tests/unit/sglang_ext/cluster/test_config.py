"""A cluster's settings: what is refused, and by which name."""

from __future__ import annotations

import pytest

from sglang_ext.cluster.config import (
    ClusterConfig,
    ConfigError,
    CoordinatorConfig,
    PoolConfig,
    PoolsConfig,
    RouterSettings,
    StartSettings,
    parse_id_set,
)

POOLS = PoolsConfig(short=PoolConfig(), long=PoolConfig(), decode=PoolConfig())


def test_a_cluster_needs_prefill_and_decode() -> None:
    with pytest.raises(ConfigError, match="at least one decode instance"):
        PoolsConfig(short=PoolConfig())
    with pytest.raises(ConfigError, match="at least one prefill instance"):
        PoolsConfig(decode=PoolConfig())
    PoolsConfig(both=PoolConfig(), decode=PoolConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": -1}, "count: must be at least 0, not -1"),
        ({"tp": 0}, "tp: must be at least 1, not 0"),
        ({"pp": 0}, "pp: must be at least 1, not 0"),
        ({"dcp": 0}, "dcp: must be at least 1, not 0"),
        ({"dcp": 2, "tp": 3}, "dcp: is 2, of which tp 3 is not a multiple"),
        ({"threads": 0}, "threads: must be at least 1, not 0"),
        ({"ports": (0, 1)}, "ports: 2 ports for a pool of 1"),
        ({"ports": (70000,)}, "ports[0]: 70000 is not a port (0 to 65535)"),
        ({"bootstrap_ports": (-1,)}, "bootstrap_ports[0]: -1 is not a port (0 to 65535)"),
        ({"cores": ("0", "1")}, "cores: 2 entries for a pool of 1"),
        ({"cores": ("3-1",)}, "cores[0]: '3-1' is not a set of numbers such as 0-3,8"),
        ({"gpus": ("0,1",)}, "gpus[0]: 2 GPUs for tp 1"),
        ({"gpus": ("0,1",), "tp": 2, "pp": 2}, "gpus[0]: 2 GPUs for tp 2 and pp 2"),
    ],
)
def test_pool_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_stages_are_of_prefill_and_not_of_a_pool_that_shares_prompts() -> None:
    staged, plain = PoolConfig(pp=2), PoolConfig()
    with pytest.raises(ConfigError, match=r"^decode.pp: only prefill runs in pipeline stages$"):
        PoolsConfig(both=plain, decode=staged)
    assert PoolsConfig(long=staged, decode=plain).long.ranks == 2
    shared = CoordinatorConfig(enabled=True)
    for pools, role in (
        (PoolsConfig(long=staged, decode=plain), "long"),
        (PoolsConfig(both=staged, decode=plain), "both"),
    ):
        with pytest.raises(ConfigError, match=rf"^pools.{role}.pp: is 2, and an instance that shares prompts has all"):
            ClusterConfig(model="m", pools=pools, coordinator=shared)
    ClusterConfig(model="m", pools=PoolsConfig(long=plain, short=staged, decode=plain), coordinator=shared)


def test_kv_parallel_decode_is_of_decode_and_not_behind_a_coordinator() -> None:
    divided, plain = PoolConfig(tp=2, dcp=2), PoolConfig()
    with pytest.raises(ConfigError, match=r"^long.dcp: only decode divides KV among ranks$"):
        PoolsConfig(long=divided, decode=plain)
    pools = PoolsConfig(long=plain, decode=divided)
    assert pools.decode.ranks == 2
    with pytest.raises(ConfigError, match=r"^pools.decode.dcp: is 2, and instances that share prompts send KV by"):
        ClusterConfig(model="m", pools=pools, coordinator=CoordinatorConfig(enabled=True))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_durations_are_finite_and_positive(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        StartSettings(timeout_s=timeout_s)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 64])
def test_a_name_is_a_plain_folder_name(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        ClusterConfig(model="m", pools=POOLS, name=name)


def test_choices_are_named() -> None:
    with pytest.raises(ConfigError, match="device: 'gpu' is not one of auto, cpu, cuda"):
        ClusterConfig(model="m", pools=POOLS, device="gpu")
    with pytest.raises(ConfigError, match="restart: 'always' is not one of never, on-failure"):
        ClusterConfig(model="m", pools=POOLS, restart="always")


def test_a_port_is_used_once() -> None:
    pools = PoolsConfig(both=PoolConfig(ports=(30000,)), decode=PoolConfig())
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(model="m", pools=pools, router=RouterSettings(port=30000))
    assert str(caught.value) == "pools.both.ports[0]: port 30000 is already taken by router.port"
    ClusterConfig(model="m", pools=pools, router=RouterSettings(port=0))


def test_ports_left_out_are_open() -> None:
    pool = PoolConfig(count=2, ports=(31000,))
    assert (pool.port_of(0), pool.port_of(1), pool.bootstrap_port_of(0)) == (31000, 0, 0)


def test_id_sets() -> None:
    assert parse_id_set("0-2, 5", "cores") == {0, 1, 2, 5}
    for wrong in ("", "a", "1-", "-1", "1,,2", "²"):
        with pytest.raises(ConfigError, match="cores"):
            parse_id_set(wrong, "cores")


def test_a_coordinator_needs_long_instances_and_ports_of_its_own() -> None:
    enabled = CoordinatorConfig(enabled=True, port=31000, http_port=31001)
    assert ClusterConfig(model="m", pools=POOLS, coordinator=enabled).coordinator.enabled
    with pytest.raises(ConfigError, match=r"coordinator.enabled: there are no instances that could share"):
        ClusterConfig(
            model="m", pools=PoolsConfig(short=PoolConfig(), decode=PoolConfig()), coordinator=CoordinatorConfig(True)
        )
    with pytest.raises(ConfigError, match=r"coordinator.http_port: port 31000 is already taken by coordinator.port"):
        ClusterConfig(model="m", pools=POOLS, coordinator=CoordinatorConfig(True, 31000, 31000))
    with pytest.raises(ConfigError, match="http_port: 70000 is not a port"):
        CoordinatorConfig(http_port=70000)
