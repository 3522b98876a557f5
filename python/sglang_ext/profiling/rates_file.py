"""Reads a file of improvement rates, as `sglang-ext profile rates` writes it."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_ext.policy.improvement_rate import ImprovementRateTable, table_from_json


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
