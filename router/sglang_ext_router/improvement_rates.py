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

from sglang_ext.costs.improvement_rates import BY_REQUEST, ImprovementRates, describe_rates
from sglang_ext.policy.cdsp.improvement_rate import table_from_json
from sglang_ext_router.config import RouterConfig


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
