"""Usage of tenants: counted once over routers, restarts and kills; read by its tenant and the administrator."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sglang_ext_router.config import RouterConfig, RouterConfigError
from sglang_ext_router.tenants import usage as usage_module
from sglang_ext_router.tenants.usage import UsageCount, UsageLedger, read_usage_rows, utc_day
from support.linked_routers import peer_group
from support.router_process import FAST, RunningRouter, cluster
from support.scripted_engine import DONE, event, reply, status, stream
from support.tenants import bearer, tenants_file

DAY = "2026-11-27"
USED = {"text": "x", "meta_info": {"prompt_tokens": 40, "completion_tokens": 4}}
PROMPT = {"input_ids": [7] * 40}


def totals(ledger: UsageLedger) -> dict[str, UsageCount]:
    return {key.tenant: count for key, count in ledger.read_totals(ledger.rows_to_save(), DAY, DAY)}


# -- the ledger -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_ledgers_agree_whichever_messages_are_lost_or_repeated(seed: int) -> None:
    random = Random(seed)
    ledgers = [UsageLedger(today=DAY) for _ in range(3)]
    requests = 0
    for step in range(200):
        ledger = random.choice(ledgers)
        ledger.add(random.choice("ab"), "m", "short", UsageCount(1, 10, 5), step * 0.5, DAY)
        requests += 1
        for sender in ledgers:
            rows = read_usage_rows(json.loads(json.dumps(sender.rows_to_send(step * 0.5))))
            for receiver in ledgers:
                for _ in range(random.randint(0, 2)):
                    receiver.merge(rows)
    for sender in ledgers:
        sender._everything_due_s = 0.0
        rows = sender.rows_to_send(1000.0)
        for receiver in ledgers:
            receiver.merge(rows)
    found = [totals(ledger) for ledger in ledgers]
    assert found[0] == found[1] == found[2]
    assert sum(count.requests for count in found[0].values()) == requests
    assert sum(count.prompt_tokens for count in found[0].values()) == 10 * requests


def test_a_router_that_starts_again_goes_on_counting(tmp_path: Path) -> None:
    path = str(tmp_path / "usage.db")
    for count in (1, 2, 3):
        ledger = UsageLedger(path, today=DAY)
        ledger.add("a", "m", "short", UsageCount(1, 10, 5), 0.0, DAY)
        ledger.save(ledger.rows_to_save(), {"a tokens": 7.0})
        assert totals(ledger) == {"a": UsageCount(count, 10 * count, 5 * count)}
        level, ago_s = ledger.read_levels(0.0)["a tokens"]
        assert (level, ago_s) == (7.0, 0.0)
        ledger.close()


def test_what_a_killed_router_had_sent_counts_once(tmp_path: Path) -> None:
    path = str(tmp_path / "usage.db")
    first, other = UsageLedger(path, today=DAY), UsageLedger(today=DAY)
    first.add("a", "m", "short", UsageCount(1, 10, 5), 0.0, DAY)
    first.save(first.rows_to_save(), {})
    first.add("a", "m", "short", UsageCount(1, 10, 5), 0.0, DAY)
    other.merge(first.rows_to_send(0.0))
    first.close()  # what it has not saved is lost there
    again = UsageLedger(path, today=DAY)
    assert totals(again)["a"].requests == 1
    again.merge(other.rows_to_send(1000.0))
    again.add("a", "m", "short", UsageCount(1, 10, 5), 0.0, DAY)
    other.merge(again.rows_to_send(1000.0))
    assert totals(again) == totals(other) == {"a": UsageCount(3, 30, 15)}
    again.close()


def test_the_days_that_are_kept(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "usage.db")):
        ledger = UsageLedger(path, today="2026-11-20")
        for day in ("2026-10-01", "2026-11-20", "2026-11-26", DAY):
            ledger.add("a", "m", "short", UsageCount(1, 1, 1), 0.0, day)
        ledger.save(ledger.rows_to_save(), {})
        ledger.forget_old(DAY)
        found = [key.day for key, _ in ledger.read_totals(ledger.rows_to_save(), "2026-01-01", DAY)]
        assert found == (["2026-10-01"] if path else []) + ["2026-11-20", "2026-11-26", DAY]
        ledger.close()


def test_the_number_of_counts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "MAX_COUNTS", 3)
    ledger = UsageLedger(today=DAY)
    for number in range(10):
        ledger.add("a", f"m{number}", "short", UsageCount(1, 10, 5), 0.0, DAY)
    found = ledger.read_totals([], DAY, DAY)
    assert [key.model for key, _ in found] == ["(other)", "m0", "m1", "m2"]
    assert found[0][1].requests == 7


@pytest.mark.parametrize(
    "row", [["d", "a", "m", "s", "o", 1, 2], ["d", 1, "m", "s", "o", 1, 2, 3], ["d", "a", "m", "s", "o", -1, 2, 3]]
)
def test_a_row_of_another_version_is_refused(row: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_usage_rows([row])


# -- a router -------------------------------------------------------------------------------------------------


async def used(served: RunningRouter, key: str, query: str = "") -> list[dict[str, Any]]:
    answer = await served.ask("GET", f"/v1/usage{query}", headers=bearer(key))
    assert answer.status == 200
    rows: list[dict[str, Any]] = answer.json["data"]
    return rows


async def test_usage_by_tenant_model_and_class(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a={}, b={"requests_per_minute": 1})
    log = tmp_path / "access.log"
    async with cluster(tenants_file=path, admin_api_key="admin", access_log=str(log)) as served:
        served.decode[0].script = reply(USED)
        for key in ("a", "a", "b", "b"):
            await served.ask("POST", "/generate", PROMPT, bearer(key))
        served.decode[0].script = stream(event({"text": "x", "meta_info": USED["meta_info"]}), DONE)
        await served.ask("POST", "/generate", {**PROMPT, "stream": True}, bearer("a"))
        served.decode[0].script = status(400)
        await served.ask("POST", "/generate", PROMPT, bearer("a"))
        await served.until_idle()
        model = next(iter(served.router.registry.models))
        row = {"day": utc_day(), "model": model, "length_class": "short"}
        of_a = row | {"tenant": "a", "requests": 3, "prompt_tokens": 120, "output_tokens": 12}
        of_b = row | {"tenant": "b", "requests": 1, "prompt_tokens": 40, "output_tokens": 4}
        assert await used(served, "a") == [of_a]
        assert await used(served, "admin") == [of_a, of_b]
        assert await used(served, "admin", "?start=2020-01-01&end=2020-02-01") == []
        assert await used(served, "b", "?start=2020-01-01&end=2999-12-31") == [of_b]
        assert (await served.ask("GET", "/v1/usage?start=x", headers=bearer("a"))).status == 400
        assert (await served.ask("GET", "/v1/usage")).status == 401
        page = (await served.ask("GET", "/metrics", headers=bearer("a"))).body.decode()
        prefix, labels = "sglang_ext_router_tenant", f'length_class="short",model="{model}",tenant="a"'
        shown = {line.split("}")[0]: line.split("} ")[1] for line in page.splitlines() if line.startswith(prefix)}
        counts = {tuple(sorted(name.partition("{")[2].split(","))): value for name, value in shown.items()}
        for kind, value in (("prompt", "120.0"), ("output", "12.0")):
            assert counts[tuple(sorted([f'kind="{kind}"', *labels.split(",")]))] == value
        assert counts['budget="requests"', 'tenant="b"'] == "1.0"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    billed = [(line["tenant"], line["used_prompt_tokens"], line["used_output_tokens"])
              for line in lines if line["path"] == "/generate" and line["status"] == 200]  # fmt: skip
    assert billed == [("a", 40, 4), ("a", 40, 4), ("b", 40, 4), ("a", 40, 4)]


async def test_there_is_no_usage_without_tenants() -> None:
    async with cluster() as served:
        assert (await served.ask("GET", "/v1/usage")).status == 404


async def test_usage_and_budgets_outlive_the_router(tmp_path: Path) -> None:
    options = {
        "tenants_file": tenants_file(tmp_path, a={"requests_per_minute": 4}),
        "usage_db": str(tmp_path / "usage.db"),
    }
    for first in (True, False):
        async with cluster(**options) as served:  # type: ignore[arg-type]
            served.decode[0].script = reply(USED)
            statuses = [(await served.ask("POST", "/generate", PROMPT, bearer("a"))).status for _ in range(3)]
            assert statuses == ([200] * 3 if first else [200, 429, 429])
            assert [row["requests"] for row in await used(served, "a")] == [3 if first else 4]


def test_a_database_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, but a text that is long enough to be taken for one" * 20)
    with pytest.raises(sqlite3.Error):
        UsageLedger(str(tmp_path / "text"))
    with pytest.raises(sqlite3.Error):
        UsageLedger(str(tmp_path / "absent" / "usage.db"))
    with pytest.raises(RouterConfigError, match="--usage-db needs --tenants-file"):
        type(FAST)(usage_db="x")


# -- several routers ------------------------------------------------------------------------------------------


@asynccontextmanager
async def group(tmp_path: Path, count: int, **limits: int) -> AsyncIterator[list[RunningRouter]]:
    """Routers of one group that share a file of tenants, each with a database of its own."""
    path = tenants_file(tmp_path, a=dict(limits))

    def own(number: int, config: RouterConfig) -> RouterConfig:
        return replace(config, tenants_file=path, usage_db=str(tmp_path / f"usage-{number}.db"))

    async with peer_group(count, own, reply(USED)) as routers:
        for served in routers:
            await served.until_ready()
            await served.until(lambda served=served: len(served.router.siblings.demands()) == count - 1)  # type: ignore[misc]
        yield routers
        for served in routers:
            await served.until_idle()


@pytest.mark.slow
async def test_usage_is_counted_once_by_all_routers_of_a_group(tmp_path: Path) -> None:
    async with group(tmp_path, 3) as routers:
        for served in routers:
            for _ in range(4):
                assert (await served.ask("POST", "/generate", PROMPT, bearer("a"))).status == 200
        for served in routers:
            ledger = served.router.tenants
            assert ledger is not None

            def counted(ledger: Any = ledger) -> bool:
                rows = ledger.ledger.read_totals(ledger.ledger.rows_to_save(), utc_day(), utc_day())
                return sum(count.requests for _, count in rows) == 12

            await served.until(counted)
            (row,) = await used(served, "a")
            assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (12, 480, 48)


@pytest.mark.slow
async def test_a_group_lends_what_one_router_needs(tmp_path: Path) -> None:
    """A budget is that of the group, and all of it can be had at one router."""
    async with group(tmp_path, 3, requests_per_minute=30) as routers:
        for served in routers:
            tenants = served.router.tenants
            assert tenants is not None
            bucket = tenants.account("a").requests
            assert bucket is not None
            await served.until(lambda bucket=bucket: bucket.parts == 3)  # type: ignore[misc]
            bucket.level = 10.0
        served = routers[0]
        let_in, began_s = 0, served.router.loop.time()
        while let_in < 29:
            elapsed_s = served.router.loop.time() - began_s
            assert elapsed_s < 10.0, let_in
            let_in += (await served.ask("POST", "/generate", PROMPT, bearer("a"))).status == 200
            assert let_in <= 30 + 0.5 * elapsed_s + 1
            await asyncio.sleep(0.01)
