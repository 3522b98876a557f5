"""The table of improvement rates that the router holds: given at the start, read, and replaced while it serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_ext_router.config import ConfigError, RouterConfig
from support.router_process import FAST, running_router

ADMIN = {"Authorization": "Bearer admin"}
TABLE = {"version": 1, "rates": [{"arrivals_per_s": 0.5, "improvement_rate": 0.05}]}
OTHER = {"version": 1, "rates": [{"arrivals_per_s": 1.0, "improvement_rate": 0.6}], "provenance": {"seeds": [0]}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(TABLE), encoding="utf-8")
    return path


async def test_without_a_table_there_is_nothing() -> None:
    async with running_router(FAST) as running:
        answer = await running.ask("GET", "/improvement_rates")
        assert (answer.status, answer.json["rates"], answer.json["improvement_rate"]) == (200, [], None)
        assert running.router.improvement_rates.source is None


async def test_a_table_is_given_at_the_start_and_replaced_while_serving(file: Path) -> None:
    async with running_router(replace(FAST, improvement_rates=str(file), admin_api_key="admin")) as running:
        answer = (await running.ask("GET", "/improvement_rates")).json
        assert (answer["rates"], answer["improvement_rate"], answer["origin"]) == (TABLE["rates"], 0.05, str(file))
        source = running.router.improvement_rates.source
        assert source is not None
        for step in range(100):
            source.note_arrival(0.5 * step)
        answer = await running.ask("PUT", "/improvement_rates", OTHER, headers=ADMIN)
        assert (answer.status, answer.json["rates"]) == (200, OTHER["rates"])
        assert answer.json["origin"] == "PUT /improvement_rates"
        assert answer.json == (await running.ask("GET", "/improvement_rates")).json
        # Whoever has the object has the new table, and the load that was seen is still known.
        assert running.router.improvement_rates.source is source
        assert (source.current, answer.json["arrivals_per_s"]) == (0.6, pytest.approx(2.0, rel=0.05))


async def test_only_an_operator_replaces_it() -> None:
    async with running_router(replace(FAST, api_key="client", admin_api_key="admin")) as running:
        client = {"Authorization": "Bearer client"}
        assert (await running.ask("GET", "/improvement_rates")).status == 401
        assert (await running.ask("GET", "/improvement_rates", headers=client)).status == 200
        assert (await running.ask("PUT", "/improvement_rates", TABLE, headers=client)).status == 401
        assert (await running.ask("PUT", "/improvement_rates", TABLE, headers=ADMIN)).status == 200


async def test_a_wrong_table_changes_nothing(file: Path) -> None:
    async with running_router(replace(FAST, improvement_rates=str(file), admin_api_key="admin")) as running:
        before = (await running.ask("GET", "/improvement_rates")).json
        for wrong, message in (
            ({"version": 2, "rates": []}, "version 2 is not known"),
            ({"version": 1, "rates": []}, "there is no entry"),
            ({"version": 1, "rates": [{"arrivals_per_s": 1, "improvement_rate": 1}]}, "improvement_rate 1 is not"),
            ("text", "a table of improvement rates is an object"),
        ):
            answer = await running.ask("PUT", "/improvement_rates", wrong, headers=ADMIN)
            assert answer.status == 400
            assert message in answer.error["message"]
        assert (await running.ask("GET", "/improvement_rates")).json == before


async def test_one_of_several_processes_does_not_take_a_table_alone() -> None:
    async with running_router(replace(FAST, processes=2, admin_api_key="admin")) as running:
        answer = await running.ask("PUT", "/improvement_rates", TABLE, headers=ADMIN)
        assert answer.status == 409
        assert "--processes 1" in answer.error["message"]


def test_the_option_is_checked_at_the_start(file: Path, tmp_path: Path) -> None:
    assert RouterConfig(improvement_rates=str(file)).improvement_rates == str(file)
    with pytest.raises(ConfigError, match="--improvement-rates needs --processes 1, not 2"):
        RouterConfig(improvement_rates=str(file), processes=2)
    with pytest.raises(ConfigError, match=r"--improvement-rates: .*none.json cannot be read"):
        RouterConfig(improvement_rates=str(tmp_path / "none.json"))
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--improvement-rates: .*version None is not known"):
        RouterConfig(improvement_rates=str(file))
