"""Decode instances: transfers, backends, memory and batches by hand."""

from __future__ import annotations

import pytest

from sglang_ext.planner.simulation.decode import DecodePool, DecodeSpec, FinishedRequest
from sglang_ext.planner.simulation.events import EventLoop, ServedPrefill, SimRequest
from sglang_ext_router.decide.decode_choice import decode_policy


def finish(
    spec: DecodeSpec, prefills: list[tuple[float, float, int, int]]
) -> tuple[dict[int, FinishedRequest], DecodePool]:
    """Decode (start, first token, prompt, output) to the end."""
    loop = EventLoop()
    pool = DecodePool(loop, spec, decode_policy("freeness"), 0)
    for key, (start_s, end_s, prompt, output) in enumerate(prefills):
        loop.schedule(end_s, pool.on_first_token, ServedPrefill(SimRequest(key, 0.0, prompt, output), start_s, end_s))
    loop.run()
    assert not list(pool.unfinished())
    return {one.request.key: one for one in pool.finished}, pool


def spec(**changes: float) -> DecodeSpec:
    """1,000 tokens are transferred in 1 s; a step takes 0.1 s and 0.1 s for each member."""
    values = {
        "instances": 1,
        "base_s": 0.1,
        "per_request_s": 0.1,
        "kv_bytes_per_token": 1,
        "bandwidth_bytes_per_s": 1e3,
    }
    return DecodeSpec(**(values | changes))  # type: ignore[arg-type]


def test_transfer_then_one_token_per_step() -> None:
    found, _ = finish(spec(), [(0.0, 1.0, 1000, 11)])
    assert found[0].transferred_s == pytest.approx(2.0)
    assert found[0].finished_s == pytest.approx(4.0)  # ten steps of 0.2 s
    assert found[0].time_per_token_s == pytest.approx(0.3)


def test_a_step_takes_longer_for_a_larger_batch() -> None:
    # Alone from 1 s: five steps by 2 s. Then both at 0.3 s: five more by 3.5 s; the other's last five in 1.0 s.
    found, _ = finish(spec(), [(0.0, 0.0, 1000, 11), (0.0, 1.0, 1000, 11)])
    assert [found[key].finished_s for key in (0, 1)] == pytest.approx([3.5, 4.5])


def test_backends_go_to_the_first_handshake() -> None:
    # 0 holds the only backend until 1 s. 2 has handshaken before 1, though its prefill ended later.
    prefills = [(0.0, 0.0, 1000, 2), (0.4, 0.5, 1000, 2), (0.1, 0.6, 1000, 2)]
    found, _ = finish(spec(backends=1), prefills)
    assert [found[key].transferred_s for key in (0, 2, 1)] == pytest.approx([1.0, 2.0, 3.0])
    found, _ = finish(spec(backends=3), prefills)
    assert [found[key].transferred_s for key in (0, 1, 2)] == pytest.approx([1.0, 1.5, 1.6])


def test_a_transfer_waits_for_memory_and_what_never_fits_is_refused() -> None:
    found, pool = finish(spec(kv_tokens=1011), [(0.0, 0.0, 1000, 11), (0.0, 0.0, 1000, 11), (0.0, 0.0, 1001, 11)])
    assert found[0].finished_s == pytest.approx(3.0)
    assert found[1].transferred_s == pytest.approx(4.0)
    assert [request.key for request in pool.refused] == [2]


def test_one_token_needs_no_decode() -> None:
    found, _ = finish(spec(), [(0.0, 1.0, 1000, 1)])
    assert found[0].finished_s == 1.0
    assert found[0].time_per_token_s == 0.0


def test_the_freest_instance_is_taken() -> None:
    found, _ = finish(spec(instances=2), [(0.0, 0.0, 1000, 11), (0.0, 0.0, 1000, 11)])
    assert [found[key].finished_s for key in (0, 1)] == pytest.approx([3.0, 3.0])


@pytest.mark.parametrize(
    ("name", "value"), [("instances", 0), ("backends", 0), ("base_s", 0.0), ("per_request_s", -1.0)]
)
def test_a_spec_that_makes_no_sense_names_its_field(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        spec(**{name: value})
