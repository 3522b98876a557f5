"""The open load of figure 5, its windows, what it is judged by, and its picture."""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu import figure5
from gpu.figure5 import ADAPTIVE, MOST_TOKENS, Load, arrivals, level, windows
from gpu.figure5_picture import curves, draw
from gpu.verdicts import figure_5_verdicts
from sglang_ext.laps.decide.options import LapsOptions


def test_fixed_windows_are_as_short_as_they_are_long_and_the_last_is_the_default() -> None:
    found = windows()
    assert list(found) == ["0", "5", "15", "30", ADAPTIVE]
    assert found.pop(ADAPTIVE) == LapsOptions()
    for name, options in found.items():
        assert options.w_min_ms == float(name)
        assert options.w_max_ms == pytest.approx(float(name), abs=0.01)


@pytest.mark.slow
def test_every_window_gets_the_same_stream_of_short_prompts() -> None:
    stream = arrivals(100.0, 20.0, 1)
    assert stream == arrivals(100.0, 20.0, 1)
    assert len(stream) == pytest.approx(2000, rel=0.1)
    assert all(before.at_s < after.at_s < 20.0 for before, after in pairwise(stream))
    assert all(1 <= len(due.prompt) <= MOST_TOKENS for due in stream)
    assert stream[0].prompt[:4] != arrivals(50.0, 20.0, 1)[0].prompt[:4]


@pytest.mark.slow
def test_times_run_from_when_a_request_was_due() -> None:
    """A server that answers one after the other makes those wait that are due meanwhile."""

    async def run() -> dict[str, Any]:
        turn = asyncio.Lock()

        async def generate(request: web.Request) -> web.Response:
            async with turn:
                await asyncio.sleep(0.02)
            status = 500 if (await request.json())["prompt"] == broken else 200
            return web.json_response({}, status=status)

        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            return await level(SimpleNamespace(url=url, request=lambda prompt: {"prompt": prompt}), 100.0, load)
        finally:
            await runner.cleanup()

    load = Load((100.0,), 0.5, 8)
    stream = arrivals(100.0, load.seconds, load.divide_lengths_by)
    broken = stream[3].prompt
    found = asyncio.run(run())
    assert found["requests"] == len(stream)
    assert found["failed"] == sum(due.prompt == broken for due in stream)
    # the last is answered after all of them have had their turn, one after the other
    least_mean_s = sum((number + 1) * 0.02 - due.at_s for number, due in enumerate(stream)) / len(stream)
    assert found["mean_s"] >= least_mean_s
    assert found["p90_s"] > found["mean_s"]
    assert found["requests_per_s"] <= 50.0


def test_a_server_that_does_not_start_is_an_error_of_its_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(*given: object) -> Any:
        raise RuntimeError("a server did not start: no output")

    monkeypatch.setattr(figure5.figure6, "serve", serve, raising=False)
    found: dict[str, Any] = {}
    figure5.measure(Path("/m"), figure5.figure6.System(), Load((1.0,), 1.0, 1), False, Path("/log"), found.update, 1e9)
    assert found == {"error": "a server did not start: no output"}


def outcome(*ends: tuple[float, float, float]) -> dict[str, Any]:
    # the rate that is judged is not the last one
    rates = (360.0, 20.0)
    return {
        "levels": [
            {"rate_per_s": rate, "mean_s": mean, "p90_s": p90, "requests_per_s": served}
            for rate, (mean, p90, served) in zip(rates, ends, strict=False)
        ]
    }


FOUND = {
    ADAPTIVE: outcome((0.021, 0.05, 19.0), (0.01, 0.02, 10.0)),
    "30": outcome((0.02, 0.06, 20.0), (0.04, 0.05, 10.0)),
    "0": outcome((0.05, 0.04, 15.0), (0.01, 0.02, 10.0)),
    "5": {"error": "a server did not start"},
    "15": {"not_measured": "the time of the stage was used up"},
}


def test_the_adaptive_window_is_judged_by_the_best_fixed_one_at_the_rate_of_the_aim() -> None:
    verdicts = figure_5_verdicts(FOUND)
    assert [verdict.value for verdict in verdicts] == [pytest.approx(value) for value in (1.05, 1.25, 0.95)]
    assert [verdict.holds for verdict in verdicts] == [True, False, True]
    assert {verdict.value for verdict in figure_5_verdicts({"0": FOUND["0"]})} == {None}
    assert {verdict.value for verdict in figure_5_verdicts({ADAPTIVE: FOUND[ADAPTIVE]})} == {None}


@pytest.mark.slow
def test_the_picture_has_what_was_measured(tmp_path: Path) -> None:
    assert curves(FOUND, "mean_s") == {
        20.0: ([(0.0, 0.01), (30.0, 0.04)], 0.01),
        360.0: ([(0.0, 0.05), (30.0, 0.02)], 0.021),
    }
    draw(FOUND, tmp_path / "figure5.png")
    assert (tmp_path / "figure5.png").stat().st_size > 10_000
