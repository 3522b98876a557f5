"""A request's two instances are of one revision, each revision gets what it can carry, and near is a preference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import DecodeLoad
from sglang_ext_router.decide.pairing import choose_revision, common_domains, nearest, revision_shares

REVISIONS = st.lists(st.sampled_from(["", "v1", "v2", "v3"]), min_size=1, max_size=8)
DRAWS = st.floats(0, 1, exclude_max=True)


@pytest.mark.slow
@given(REVISIONS, REVISIONS)
def test_shares_go_to_revisions_of_both_kinds_and_add_up(prefill: list[str], decode: list[str]) -> None:
    shares = revision_shares(prefill, decode)
    assert shares.keys() == set(prefill) & set(decode)
    assert not shares or sum(shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in shares.values())


@pytest.mark.parametrize(
    ("prefill", "decode", "shares"),
    [
        (["v1", "v1"], ["v1", "v1"], {"v1": 1.0}),
        (["v1", "v1", "v2"], ["v1", "v1"], {"v1": 1.0}),  # decode of the new one is still loading
        (["v1", "v2"], ["v1", "v2"], {"v1": 0.5, "v2": 0.5}),
        (["v1", "v1", "v2"], ["v1", "v1", "v1", "v2"], {"v1": 8 / 11, "v2": 3 / 11}),
        (["v1"] * 3 + ["v2"], ["v1"] + ["v2"] * 3, {"v1": 0.5, "v2": 0.5}),  # the scarcer kind counts
        (["v1"], ["v2"], {}),
    ],
)
def test_a_revision_gets_what_its_scarcer_kind_carries(
    prefill: list[str], decode: list[str], shares: dict[str, float]
) -> None:
    assert revision_shares(prefill, decode) == pytest.approx(shares)


@pytest.mark.slow
@given(REVISIONS, REVISIONS, DRAWS, st.integers(1, 100), st.data())
def test_no_request_gets_a_revision_that_cannot_serve_it(
    prefill: list[str], decode: list[str], draw: float, prompt_tokens: int, data: st.DataObject
) -> None:
    cached = data.draw(st.lists(st.integers(0, 100), min_size=len(prefill), max_size=len(prefill)))
    chosen = choose_revision(prefill, cached, prompt_tokens, decode, draw)
    if set(prefill) & set(decode):
        assert chosen in prefill
        assert chosen in decode
    else:
        assert chosen is None


@pytest.mark.slow
@given(REVISIONS, REVISIONS)
def test_draws_are_dealt_out_by_share(prefill: list[str], decode: list[str]) -> None:
    steps = 1000
    chosen = [choose_revision(prefill, [0] * len(prefill), 10, decode, step / steps) for step in range(steps)]
    for name, share in revision_shares(prefill, decode).items():
        assert chosen.count(name) / steps == pytest.approx(share, abs=2 / steps)


@pytest.mark.parametrize(("cached", "chosen"), [(0, "v1"), (49, "v1"), (50, "v2"), (100, "v2")])
def test_a_prompt_stays_with_the_revision_that_holds_half_of_it(cached: int, chosen: str) -> None:
    assert choose_revision(["v1", "v2"], [0, cached], 100, ["v1", "v2"], 0.0) == chosen


def test_what_a_revision_without_decode_holds_does_not_count() -> None:
    assert choose_revision(["v1", "v2"], [0, 100], 100, ["v1"], 0.9) == "v1"


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ("a/n1", "a/n1", 2),
        ("a/n1", "a/n2", 1),
        ("a/n1", "b/n1", 0),
        ("a", "a/n1", 1),
        ("", "", 0),
        ("", "a", 0),
    ],
)
def test_common_domains(one: str, other: str, common: int) -> None:
    assert common_domains(one, other) == common


PLACES = st.sampled_from(["", "a", "a/n1", "a/n2", "b/n1"])
LOADS = st.builds(DecodeLoad, st.just(0), st.integers(0, 50), st.integers(0, 50), st.integers(0, 3), st.just(100))


@pytest.mark.slow
@given(PLACES, st.lists(st.tuples(PLACES, LOADS), min_size=1, max_size=6), st.integers(1, 50))
def test_near_is_a_preference_never_a_refusal(
    place: str, others: list[tuple[str, DecodeLoad]], prompt_tokens: int
) -> None:
    places, loads = [one for one, _ in others], [load for _, load in others]
    chosen = nearest(place, places, loads, prompt_tokens)
    assert chosen
    free = {i: load.free_kv_tokens - load.reserved_tokens for i, load in enumerate(loads)}
    if len(chosen) < len(loads):
        assert all(free[i] >= prompt_tokens for i in chosen)
        common = {common_domains(place, places[i]) for i in chosen}
        assert len(common) == 1
        assert all(
            common_domains(place, places[i]) < min(common) or free[i] < prompt_tokens
            for i in range(len(loads))
            if i not in chosen
        )
