"""How answers of two engines are compared with one instance's, and what becomes of a worker that refuses."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from gpu import two_engines
from gpu.two_engines import TIE, Answer, Deviation, compare, deviation, summary
from support.engines import EngineSpec
from support.long_pool import Coordinator

EXPECTED = Answer((5, 6, 7), (1.0, TIE / 2, 2.0))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([5, 6, 7], None),
        ([9, 6, 7], Deviation(40, 0, 1.0)),
        ([5, 8, 8], Deviation(40, 1, TIE / 2)),
        ([5, 6], Deviation(40, 2, 2.0)),
        ([], Deviation(40, 0, 1.0)),
        ([5, 6, 7, 8], Deviation(40, 3, float("inf"))),
    ],
)
def test_the_first_token_that_differs(tokens: list[int], found: Deviation | None) -> None:
    assert deviation(40, EXPECTED, tokens) == found


def test_ties_are_no_errors_and_are_counted() -> None:
    found = summary([None, None, Deviation(3, 1, TIE / 2), Deviation(4, 0, float("inf"))], 0.25)
    assert (found["answers"], found["equal"], found["ties"], found["control_equal"]) == (4, 2, 1, 0.25)
    assert found["different"] == [{"prompt_tokens": 4, "at": 0, "gap": 1e9}]  # JSON has no infinity


class OneInstance:
    """Its answer is a function of the whole prompt, or of the last token alone."""

    def __init__(self, of_last_token: bool) -> None:
        self._of_last_token = of_last_token
        self.asked: list[list[int]] = []

    def tokens(self, prompt: list[int]) -> list[int]:
        seen = prompt[-1:] if self._of_last_token else prompt
        return [sum((at + 1) * token for at, token in enumerate(seen)) % 997 + step for step in range(4)]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append(body["input_ids"])
        assert (path, body["top_logprobs_num"], body["sampling_params"]["temperature"]) == ("/generate", 2, 0)
        tokens = self.tokens(body["input_ids"])
        best_two = [[[-0.1, token, None], [-3.1, 0, None]] for token in tokens]
        reply = {"output_ids": tokens, "meta_info": {"output_top_logprobs": best_two}}
        return type("Reply", (), {"status": 200, "body": reply})()


@pytest.mark.parametrize("of_last_token", [False, True])
def test_right_and_wrong_answers_and_what_the_control_shows(of_last_token: bool) -> None:
    alone = OneInstance(of_last_token)
    right = compare(lambda number, prompt: alone.tokens(list(prompt)), alone, (5, 9))  # type: ignore[arg-type]
    assert (right["answers"], right["equal"], right["different"]) == (4, 4, [])
    # Where answers do not depend on the prompt, as with weights that hide attention, the control tells.
    assert right["control_equal"] == float(of_last_token)
    second = [prompt for prompt in alone.asked if len(prompt) > 20]
    assert sorted(map(len, second)) == [5 + 4 + 20, 9 + 4 + 20]

    def with_other_kv(number: int, prompt: Sequence[int]) -> list[int]:
        return alone.tokens([*prompt] if number == 0 else [*[0] * (len(prompt) - 1), prompt[-1]])

    wrong = compare(with_other_kv, alone, (5, 9))  # type: ignore[arg-type]
    assert len(wrong["different"]) == (0 if of_last_token else 2)


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ["handshake", "pool"])
def test_a_worker_that_refuses_is_told_in_its_words(arrangement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers, told that they are on a GPU: they end before they import SGLang."""
    start = two_engines.Engines.start

    def on_a_gpu(self: two_engines.Engines, spec: EngineSpec) -> Any:
        self._has_gpu = True
        options = ("--device", "cuda", *spec.worker_options)
        return start(self, EngineSpec(spec.role, worker_options=options, name=spec.name))

    monkeypatch.setattr(two_engines.Engines, "start", on_a_gpu)

    def must_not_start(self: Coordinator) -> None:
        raise AssertionError("no coordinator is needed for a refusal")

    monkeypatch.setattr(Coordinator, "start_again", must_not_start)
    found: dict[str, Any] = {}
    two_engines.measure(arrangement, True, time.perf_counter() + 60, found.update)
    assert list(found) == ["not_possible"]
    assert "--transfer-transport: handshake transport nixl needs NIXL" in found["not_possible"]
