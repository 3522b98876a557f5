"""Simulations already made by a search that was interrupted: one JSON line each, behind one that says what is searched.

A last line that was cut off by the interruption is made again.
"""

from __future__ import annotations

import hashlib
import json
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

from sglang_ext.profiling.rates import RatesSearch, Trial, TrialTtft
from sglang_ext.profiling.rates_output import Provenance, describe_search


class NotesError(ValueError):
    """The notes are not of this search; the text is one line for the user."""


class TrialNotes:
    """Notes in `path`, made when there are none. NotesError if they are there and of another search."""

    def __init__(self, path: Path, search: RatesSearch, provenance: Provenance) -> None:
        self.path = path
        self.results: dict[Trial, TrialTtft] = {}  # that were there at the beginning
        self._header = _fingerprint(search, provenance)
        self._file: TextIOWrapper | None = None
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        if lines and lines[0] != self._header:
            raise NotesError(f"{path} is of another search: remove it, or give the options that it was made with")
        for line in lines[1:]:
            try:
                arrivals_per_s, rate, seed, *ttft_s = json.loads(line)
                self.results[Trial(arrivals_per_s, rate, seed)] = TrialTtft(*ttft_s)
            except (ValueError, TypeError):
                continue

    def __enter__(self) -> TrialNotes:
        lines = [_line(trial, ttft_s) for trial, ttft_s in self.results.items()]
        partial = self.path.with_name(f"{self.path.name}.writing")
        partial.write_text("".join([self._header, "\n", *lines]), encoding="utf-8")
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def add(self, trial: Trial, ttft_s: TrialTtft) -> None:
        """Note a simulation that has been made."""
        assert self._file is not None
        self._file.write(_line(trial, ttft_s))
        self._file.flush()

    def remove(self) -> None:
        """The table is written: nothing is left to go on with."""
        self.path.unlink(missing_ok=True)


def _line(trial: Trial, ttft_s: TrialTtft) -> str:
    return json.dumps([*trial, *ttft_s]) + "\n"


def _fingerprint(search: RatesSearch, provenance: Provenance) -> str:
    """What a result depends on. The rates searched are left out: with more of them, what is there still holds."""
    content = describe_search(search) | {
        "costs": [repr(one) for one in search.candidates],
        "lengths": hashlib.sha256(repr(search.lengths).encode()).hexdigest(),
        "engine": provenance.engine,
    }
    for name in ("seeds", "arrival_rates", "candidates"):
        content.pop(name)
    return json.dumps(content, sort_keys=True)
