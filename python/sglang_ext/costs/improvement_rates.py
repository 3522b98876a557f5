"""The table of improvement rates that a coordinator plans with: its file, and which table is in use since when."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sglang_ext.policy.cdsp.improvement_rate import ImprovementRateTable, ProfiledImprovementRate, table_from_json

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


class RatesFileError(ValueError):
    """The file cannot be used; the text is one line for the user."""


def load_improvement_rates(path: Path) -> ImprovementRateTable:
    """Return the table in the file. RatesFileError names the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RatesFileError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise RatesFileError(f"{path} is not JSON") from None
    try:
        return table_from_json(content)
    except ValueError as error:
        raise RatesFileError(f"{path}: {error}") from None
