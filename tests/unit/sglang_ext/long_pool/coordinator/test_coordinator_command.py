"""`sglang-ext coordinator`: options that make no sense are named, and what Prometheus and people read is there."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from sglang_ext.long_pool.coordinator.coordinator_command import OptionError, add_arguments, options_from, run
from sglang_ext.long_pool.coordinator.coordinator_server import make_app
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts, prior_candidates
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.coordinator.ticket_desk import TicketDesk
from sglang_ext.long_pool.decide.sharding import Interleaving
from support.settings import sets


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_defaults_are_those_of_the_settings() -> None:
    options = options_from(parse())
    assert options.settings == PoolSettings()
    assert [candidate.size for candidate in options.candidates] == [1, 2, 4]


def test_options_reach_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    cost = {"size": 1, "a_s": 0.5, "b_s_per_token": 1e-3, "c_s_per_token2": 0.0, "d_s_per_token2": 0.0}
    path.write_text(json.dumps({"format": "sglang-ext engine profile", "version": 1, "model": "m", "sp": [cost]}))
    options = options_from(
        parse(
            *("--sp-sizes", "3,1,3", "--profile", str(path), "--min-chunk-tokens", "7"),
            *("--ttft-slo-ms", "500", "--slo-stretch", "3"),
            *sets("pool.interleaving=striped", "pool.cross_node_factor=inf", "pool.max_chunk_ms=800"),
            *sets("pool.step_timeout_ms=1500", "pool.member_timeout_ms=250"),
        )
    )
    assert [candidate.size for candidate in options.candidates] == [1, 3]
    assert options.candidates[0].cost.predict_s(0, 0) == 0.5
    assert options.settings == PoolSettings(
        *(Interleaving.STRIPED, 7, math.inf, 1.5, 0.25),
        max_chunk_s=0.8,
        ttft_slo_s=0.5,
        slo_stretch=3.0,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "--port must be a port, got 70000"),
        (("--http-port", "-1"), "--http-port must be a port"),
        (("--sp-sizes", "1,x"), "--sp-sizes must be numbers"),
        (("--sp-sizes", "0,1"), "--sp-sizes must be at least 1"),
        (sets("pool.cross_node_factor=0.9"), "pool.cross_node_factor must be at least 1"),
        (sets("pool.cross_node_factor=nan"), "pool.cross_node_factor must be"),
        (("--slo-stretch", "0.5"), "--slo-stretch must be a number of at least 1, got 0.5"),
        (("--slo-stretch", "inf"), "--slo-stretch must be"),
        (("--ttft-slo-ms", "0"), "--ttft-slo-ms must be at least 1, got 0"),
        (("--min-chunk-tokens", "0"), "--min-chunk-tokens must be at least 1"),
        (sets("pool.max_chunk_ms=0"), "pool.max_chunk_ms must be at least 1, got 0"),
        (("--key-file", "/nowhere/key"), "--key-file /nowhere/key: No such file or directory"),
        (sets("pool.member_timeout_ms=inf"), "pool.member_timeout_ms must be at least 100"),
        (("--profile", "/does/not/exist"), "--profile /does/not/exist cannot be read"),
    ],
)
def test_one_line_that_names_the_option(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        options_from(parse(*arguments))
    assert str(caught.value).startswith(message)
    assert run(parse(*arguments)) == 2
    assert capsys.readouterr().err == f"sglang-ext coordinator: {caught.value}\n"


def test_status_and_metrics() -> None:
    async def read() -> tuple[dict[str, object], str]:
        protocol = PoolProtocol(PoolSettings(), PoolCosts(prior_candidates((1, 2))))
        app = make_app(protocol, lambda: protocol.status(0.0), TicketDesk(protocol, lambda _: None))
        async with TestClient(TestServer(app)) as client:
            status = await (await client.get("/status")).json()
            assert await (await client.get("/status?recent=5")).json() == status
            assert (await client.get("/status?recent=-1")).status == 400
            assert (await client.get("/health")).status == 200
            return status, await (await client.get("/metrics")).text()

    status, metrics = asyncio.run(read())
    assert (status["members"], status["requests_collected"]) == ([], 0)
    assert 'sglang_ext:cdsp_requests_ended_total{outcome="collected"} 0.0' in metrics
    assert "sglang_ext:cdsp_members 0.0" in metrics
    assert 'sglang_ext:cdsp_tickets_ended_total{outcome="claimed"} 0.0' in metrics
