"""LAPS against each of SGLang's orders with its best chunk, in a few cells of the grid.

Objectives are tight and lax, loads low and high, iterations dear and cheap. Prompts are drawn, so no data set is
needed; the bounds are what was measured, and about a tenth more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

import laps_grid
from laps_grid import Cell, Trace


def drawn_traces(_: Path) -> dict[str, Trace]:
    draw = Random("laps grid")
    chats = [min(1500, max(4, int(draw.lognormvariate(4.6, 1.2)))) for _ in range(2000)]
    mixture = [draw.randint(1024, 8192) if draw.random() < 0.1 else tokens for tokens in chats]
    return {"chats": Trace(tuple(chats), 512), "mixture": Trace(tuple(mixture), 1024)}


@pytest.mark.parametrize(
    ("cell", "short_p90", "short_p99", "long_p90", "capacity"),
    [
        pytest.param(Cell(0.09, 4e-3, 0.0, 0.6, 0.1, "chats"), 0.4, 0.4, 1.5, 1.0, id="slow-tight"),
        pytest.param(Cell(0.09, 4e-3, 0.0, 0.6, 10.0, "chats"), 0.75, 0.87, 1.45, 0.97, id="slow-lax"),
        pytest.param(Cell(0.02, 2e-5, 0.0, 0.3, 0.3, "mixture"), 1.0, 0.85, 1.03, 0.9, id="launches-little-load"),
        pytest.param(Cell(0.005, 2e-5, 0.005, 0.8, 3.0, "mixture"), 0.82, 1.05, 1.17, 1.02, id="gpu-busy"),
        pytest.param(Cell(0.001, 2e-4, 0.0, 0.95, 10.0, "mixture"), 0.76, 0.93, 1.15, 0.97, id="cheap-iterations"),
        pytest.param(Cell(0.09, 1e-3, 0.0, 0.95, 0.3, "mixture"), 0.88, 0.45, 1.04, 0.97, id="dear-iterations"),
    ],
)
def test_a_cell_keeps_its_bounds(
    cell: Cell,
    short_p90: float,
    short_p99: float,
    long_p90: float,
    capacity: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each figure is over the best baseline's for it: no single setting reaches all.
    monkeypatch.setattr(laps_grid, "traces", drawn_traces)
    [row] = laps_grid.compare(laps_grid._Task(cell, (cell.objective,), Path(), 800, 3))
    assert float(row["short_p90_over_best"]) <= short_p90
    assert float(row["short_p99_over_best"]) <= short_p99
    assert float(row["long_p90_over_best"]) <= long_p90
    assert float(row["capacity_over_best"]) >= capacity
