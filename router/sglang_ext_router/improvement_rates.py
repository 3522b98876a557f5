"""`/improvement_rates`: the table that the planner of long prompts looks its improvement rate up in, and replacing it.

The router holds the table; whoever plans is given `ImprovementRates.source`, notes its arrivals there and asks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request
from fastapi.params import Depends
from starlette.exceptions import HTTPException

from sglang_ext.policy.improvement_rate import ImprovementRateTable, ProfiledImprovementRate, table_from_json
from sglang_ext_router.config import RouterConfig

BY_REQUEST = "PUT /improvement_rates"


class ImprovementRates:
    """The table in use, if there is one. `source` stays the same object as long as there is a table."""

    def __init__(self) -> None:
        self.source: ProfiledImprovementRate | None = None
        self.origin = ""  # a file, or BY_REQUEST
        self.since_s = 0.0  # Unix time

    def put(self, table: ImprovementRateTable, origin: str, unix_s: float) -> None:
        """Use `table` from now on; what is known of the load is kept."""
        if self.source is None:
            self.source = ProfiledImprovementRate(table)
        else:
            self.source.replace(table)
        self.origin, self.since_s = origin, unix_s


class RatesTarget(Protocol):
    """What this path reads and changes of the router."""

    config: RouterConfig
    improvement_rates: ImprovementRates


def add_improvement_rate_routes(
    app: FastAPI, router: RatesTarget, client: Sequence[Depends], admin: Sequence[Depends]
) -> None:
    """Add the path; `client` and `admin` are the checks of who may read and who may change."""

    @app.get("/improvement_rates", dependencies=client)
    async def improvement_rates() -> dict[str, Any]:
        """The table in use, the load last seen, and the improvement rate that it gives."""
        return describe_rates(router.improvement_rates)

    @app.put("/improvement_rates", dependencies=admin)
    async def put_improvement_rates(request: Request) -> dict[str, Any]:
        """Use another table; the body is a file as `sglang-ext profile rates` writes it."""
        if router.config.processes > 1:
            raise HTTPException(409, "one process would have the table and the others not: use --processes 1")
        try:
            table = table_from_json(orjson.loads(await request.body()))
        except orjson.JSONDecodeError:
            raise HTTPException(400, "the body is not JSON") from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        router.improvement_rates.put(table, BY_REQUEST, datetime.now(UTC).timestamp())
        return describe_rates(router.improvement_rates)


def describe_rates(rates: ImprovementRates) -> dict[str, Any]:
    """The state as JSON; without a table there is nothing but nulls."""
    source = rates.source
    if source is None:
        names = ("origin", "since", "arrivals_per_s", "improvement_rate", "window_s", "refresh_s")
        return dict.fromkeys(names) | {"rates": []}
    return {
        "origin": rates.origin,
        "since": datetime.fromtimestamp(rates.since_s, UTC).isoformat(timespec="seconds"),
        "arrivals_per_s": None if source.arrivals_per_s is None else round(source.arrivals_per_s, 3),
        "improvement_rate": source.current,
        "window_s": source.window_s,
        "refresh_s": source.refresh_s,
        "rates": [entry._asdict() for entry in source.table.entries],
    }
