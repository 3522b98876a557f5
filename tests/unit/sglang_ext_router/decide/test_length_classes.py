"""The file of length classes: what it says, and the one line in which it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.length_classes import (
    ClassSpec,
    LengthClasses,
    parse_length_classes,
    parse_token_range,
    upper_bounds,
)
from sglang_ext_router.decide.pool_choice import FixedBounds

A, B, C = ({"name": name, "max_tokens": bound} for name, bound in (("a", 10), ("b", 20), ("c", None)))


def test_classes_are_ordered_by_their_bounds() -> None:
    classes = parse_length_classes({"prefill": [C, {**A, "ttft_s": 2, "instances": ["u"]}, B], "decode": [C]})
    expected = (ClassSpec("a", 10, 2.0, ("u",)), ClassSpec("b", 20), ClassSpec("c", None))
    assert classes == LengthClasses(expected, (ClassSpec("c", None),))
    assert upper_bounds(classes.prefill) == (10, 20)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "it must hold a mapping"),
        ({}, "it must hold a mapping"),
        ({"prefil": []}, "there is no list 'prefil'"),
        ({"prefill": {}}, "prefill must be a list"),
        ({"prefill": ["a"]}, "a prefill class must be a mapping"),
        ({"prefill": [{"max_tokens": 3}]}, "a prefill class needs a name"),
        ({"prefill": [{**C, "bound": 3}]}, "prefill class c: there is no option 'bound'"),
        ({"decode": [{**C, "ttft_s": 3}]}, "decode class c: there is no option 'ttft_s'"),
        ({"prefill": [{**A, "max_tokens": 0}, C]}, "prefill class a: max_tokens must be a whole number of at least 1"),
        ({"prefill": [{**A, "max_tokens": True}, C]}, "prefill class a: max_tokens must be a whole number"),
        ({"prefill": [{**A, "min_tokens": 11}, C]}, "prefill class a: min_tokens 11 exceeds max_tokens 10"),
        ({"prefill": [{**C, "ttft_s": -1}]}, "prefill class c: ttft_s must be a number of seconds"),
        ({"prefill": [{**C, "ttft_s": float("nan")}]}, "prefill class c: ttft_s must be a number of seconds"),
        ({"prefill": [{**C, "instances": "u"}]}, "prefill class c: instances must be a list of URLs"),
        ({"prefill": [A, {**B, "min_tokens": 10}, C]}, "prefill classes a and b overlap: 10 is at most 10"),
        ({"prefill": [A, {**B, "min_tokens": 15}, C]}, "prefill: no class for 11 to 14 tokens"),
        ({"prefill": [{**A, "min_tokens": 5}, C]}, "prefill: no class for 0 to 4 tokens"),
        ({"prefill": [A, B]}, "prefill: no class for more than 20 tokens: class b needs no max_tokens"),
        ({"prefill": [A, {**A, "name": "b"}, C]}, "prefill classes a and b have the same max_tokens, 10"),
        ({"prefill": [A, C, {"name": "d"}]}, "prefill classes c and d have no max_tokens"),
        ({"prefill": [A, B, {"name": "a"}]}, "two prefill classes are called a"),
        ({"prefill": [{**A, "instances": ["u"]}, {**C, "instances": ["u"]}]}, "u is already in class a"),
        ({"prefill": [{"name": f"c{i}", "max_tokens": i + 1} for i in range(17)]}, "17 prefill classes are more than"),
        ({"buckets": {}}, "buckets must be a list"),
        ({"buckets": [{"id": "x", "stage": "plain"}]}, "bucket x: stage 'plain' is not prefill or decode"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(content: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        parse_length_classes(content)
    assert problem in str(refused.value)


def test_buckets_of_sgl_router() -> None:
    prefill = {"stage": "prefill", "rank": 0, "max_context_tokens": 99}
    decode = {"stage": "decode", "tps_p05_at_capacity": 20.0}
    content = {
        "ttft_slo_policy": "slo_first",
        "buckets": [
            {**prefill, "id": "s", "max_extend_tokens": 10, "worker_ids": ["u"], "ttft_p95_at_capacity_ms": 500},
            {**prefill, "id": "l", "min_extend_tokens": 11, "worker_ids": ["v"]},
            {**decode, "id": "few", "max_sequence_tokens": 40, "worker_ids": ["w"]},
            {**decode, "id": "many", "min_sequence_tokens": 41, "worker_ids": ["x"]},
            {**decode, "id": "any", "worker_ids": ["y"]},
        ],
    }
    assert parse_length_classes(content) == LengthClasses(
        (ClassSpec("s", 10, 0.5, ("u",)), ClassSpec("l", None, 0.0, ("v",))),
        (ClassSpec("few", 40, 0.0, ("w",)), ClassSpec("many", None, 0.0, ("x",))),
    )
    only = parse_length_classes({"buckets": [{**decode, "id": "any", "worker_ids": ["y"]}]})
    assert only.decode == (ClassSpec("any", None, 0.0, ("y",)),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-2048", (0, 2048)), ("0-10, 30-40", (0, 40)), ("", None), ("5", None), ("9-3", None), ("a-b", None)],
)
def test_the_label_of_llm_d(text: str, expected: tuple[int, int] | None) -> None:
    assert parse_token_range(text) == expected


@given(bounds=st.lists(st.integers(1, 10_000), unique=True, max_size=8), tokens=st.integers(0, 20_000))
def test_every_length_has_the_class_whose_range_holds_it(bounds: list[int], tokens: int) -> None:
    ends = sorted(bounds)
    given_classes = [
        {"name": f"c{i}", "min_tokens": low, "max_tokens": high}
        for i, (low, high) in enumerate(zip([0, *[end + 1 for end in ends]], [*ends, None], strict=True))
    ]
    specs = parse_length_classes({"prefill": given_classes}).prefill
    own = given_classes[FixedBounds(upper_bounds(specs)).class_of(tokens, 0)]
    assert own["min_tokens"] <= tokens  # type: ignore[operator]
    assert own["max_tokens"] is None or tokens <= own["max_tokens"]  # type: ignore[operator]
