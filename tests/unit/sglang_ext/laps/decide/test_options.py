"""Options that make no sense are refused in one line that names them as they are typed."""

from __future__ import annotations

import pytest

from sglang_ext.laps.decide.options import OPTION_FIELDS, LapsOptions, option_name
from sglang_ext.laps.decide.round_plan import LapsMode


def test_the_defaults_are_valid() -> None:
    options = LapsOptions()
    assert options.mode is LapsMode.BOTH
    assert options.write_s is None


def test_every_option_has_help_in_a_sentence() -> None:
    for field in OPTION_FIELDS:
        text = field.metadata["help"]
        assert text[0].isupper(), field.name
        assert text.endswith("."), field.name


def test_names() -> None:
    assert option_name("w_min_ms") == "laps.w_min_ms"
    assert option_name("boundary_tokens") == "--laps-boundary-tokens"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w_min_ms": 30.0, "w_max_ms": 10.0}, "laps.w_min_ms 30 is larger than laps.w_max_ms 10"),
        ({"w_max_ms": 200.0}, "laps.w_max_ms 200 is larger than laps.t_max_ms 100"),
        ({"w_min_ms": -1.0}, "laps.w_min_ms must be at least 0, got -1"),
        ({"w_max_ms": 0.0}, "laps.w_max_ms must be above 0, got 0"),
        ({"round_ms": 0.0}, "laps.round_ms must be above 0, got 0"),
        ({"sigma_ms": float("nan")}, "laps.sigma_ms must be at least 0, got nan"),
        ({"short_ttft_slo_ms": float("inf")}, "--laps-short-ttft-slo-ms must be above 0, got inf"),
        ({"rho_max": 1.0}, "laps.rho_max must be at least 0 and below 1, got 1"),
        ({"boundary_tokens": 0}, "--laps-boundary-tokens must be at least 1, got 0"),
        ({"depth_max": 0}, "laps.depth_max must be at least 1, got 0"),
        ({"max_parked": -1}, "laps.max_parked must be at least 0, got -1"),
        ({"long_slo_stretch": 0.5}, "--laps-long-slo-stretch must be at least 1, got 0.5"),
        ({"kv_bytes_per_token": 1000}, "laps.kv_bytes_per_token needs laps.kv_bandwidth_gb_per_s too"),
        ({"kv_bandwidth_gb_per_s": 10.0}, "laps.kv_bandwidth_gb_per_s needs laps.kv_bytes_per_token too"),
    ],
)
def test_refusals(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        LapsOptions(**given)  # type: ignore[arg-type]
    assert str(refusal.value) == message


def test_write_cost_from_bytes_and_bandwidth() -> None:
    options = LapsOptions(kv_bytes_per_token=131_072, kv_bandwidth_gb_per_s=2000.0)
    assert options.write_s == pytest.approx(131_072 / 2e12)
