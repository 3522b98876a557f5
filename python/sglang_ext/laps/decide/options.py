"""The options of the LAPS policy, resolved once. A field's metadata is its help text; its name gives its option or
setting: `boundary_tokens` is `--laps-boundary-tokens`, `w_min_ms` is the setting `laps.w_min_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import isfinite

from sglang_ext.laps.decide.round_plan import LapsMode


class Batching(StrEnum):
    """Describes what a short batch waits for."""

    SLA = "sla"
    TOKEN_MAX = "token-max"


FLAGS = frozenset({"mode", "boundary_tokens", "short_ttft_slo_ms", "long_slo_stretch"})
"""Fields that are options of their own, as operators change them; the others are settings."""


def option_name(field_name: str) -> str:
    """Return the option, or the setting, as a user types it."""
    return "--laps-" + field_name.replace("_", "-") if field_name in FLAGS else f"laps.{field_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LapsOptions:
    """Raises ValueError, in one line that names the option, for a value that makes no sense."""

    mode: LapsMode = field(
        default=LapsMode.BOTH,
        metadata={
            "help": "What the instance prefers: short prefills, long ones, or both in turn. It serves all the same."
        },
    )
    boundary_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Most new tokens of a short prefill. Default: from what the instance's iterations cost: what takes "
            "half of --laps-short-ttft-slo-ms, but 10 to 64 fixed costs, and 512 until some have run."
        },
    )
    batching: Batching = field(
        default=Batching.SLA,
        metadata={
            "help": "What a short batch waits for: the latest moment that keeps its deadlines and pays (sla), or "
            "8192 tokens, for work without deadlines (token-max)."
        },
    )
    w_min_ms: float = field(
        default=0.0,
        metadata={"help": "Shortest window in which a short batch fills. Above 0, every batch waits, even in vain."},
    )
    w_max_ms: float = field(default=30.0, metadata={"help": "Longest window in which a short batch fills."})
    t_max_ms: float = field(
        default=100.0, metadata={"help": "A short batch leaves at once when its oldest request has waited this long."}
    )
    sigma_ms: float = field(
        default=20.0, metadata={"help": "A short batch leaves at once when a deadline in it is this close."}
    )
    delta_ms: float = field(
        default=10.0, metadata={"help": "Safety margin between the end of a window and the nearest deadline."}
    )
    depth_max: int = field(default=64, metadata={"help": "Most requests in a short batch."})
    token_max: int = field(
        default=8192, metadata={"help": "New tokens at which a batch leaves with laps.batching token-max."}
    )
    short_ttft_slo_ms: float = field(
        default=400.0, metadata={"help": "TTFT objective of a short prefill that brings none of its own."}
    )
    long_slo_stretch: float = field(
        default=5.0,
        metadata={
            "help": "TTFT objective of a long prefill that brings none of its own, as a multiple of its prefill time "
            "on an idle instance (at least --laps-short-ttft-slo-ms)."
        },
    )
    round_ms: float | None = field(
        default=None,
        metadata={
            "help": "Time budget of a round, which bounds a long chunk and so how long a short prefill waits for one. "
            "Default: from the cost model and the long work that waits."
        },
    )
    rho_max: float = field(
        default=0.75,
        metadata={"help": "Largest share of the time that short prefills take while a long one waits."},
    )
    min_chunk_tokens: int = field(
        default=64, metadata={"help": "Smallest chunk of a long prefill, unless less is left of it."}
    )
    max_chunk_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Most new tokens of a batch (default: --chunked-prefill-size, for which a GPU has memory reserved; "
            "2048 on a CPU where that is not given either)."
        },
    )
    max_parked: int = field(
        default=4, metadata={"help": "Most long prefills that are started and wait while another one runs."}
    )
    age_s: float = field(
        default=10.0,
        metadata={
            "help": "Waiting this long lifts a request by one priority class, and again "
            "(longer for a long prefill: its default TTFT objective)."
        },
    )
    kv_bytes_per_token: int | None = field(
        default=None,
        metadata={
            "help": "Bytes of KV cache per token; with the bandwidth, the cost of writing it. Default: measured."
        },
    )
    kv_bandwidth_gb_per_s: float | None = field(
        default=None, metadata={"help": "Memory bandwidth at which KV is written, in 10^9 bytes per second."}
    )

    def __post_init__(self) -> None:
        for name in ("w_max_ms", "t_max_ms", "short_ttft_slo_ms", "age_s"):
            self._require_above_zero(name)
        for name in ("round_ms", "kv_bandwidth_gb_per_s"):
            if getattr(self, name) is not None:
                self._require_above_zero(name)
        for name in ("w_min_ms", "sigma_ms", "delta_ms"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{option_name(name)} must be at least 0, got {value:g}")
        for name in (
            "boundary_tokens",
            "depth_max",
            "token_max",
            "min_chunk_tokens",
            "max_chunk_tokens",
            "kv_bytes_per_token",
        ):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{option_name(name)} must be at least 1, got {count}")
        if self.max_parked < 0:
            raise ValueError(f"{option_name('max_parked')} must be at least 0, got {self.max_parked}")
        if not (isfinite(self.long_slo_stretch) and self.long_slo_stretch >= 1):
            raise ValueError(f"{option_name('long_slo_stretch')} must be at least 1, got {self.long_slo_stretch:g}")
        if not 0 <= self.rho_max < 1:
            raise ValueError(f"{option_name('rho_max')} must be at least 0 and below 1, got {self.rho_max:g}")
        self._require_order("w_min_ms", "w_max_ms")
        self._require_order("w_max_ms", "t_max_ms")
        if (self.kv_bytes_per_token is None) is not (self.kv_bandwidth_gb_per_s is None):
            given, missing = ("kv_bytes_per_token", "kv_bandwidth_gb_per_s")
            if self.kv_bytes_per_token is None:
                given, missing = missing, given
            raise ValueError(f"{option_name(given)} needs {option_name(missing)} too")

    @property
    def write_s(self) -> float | None:
        """gamma_w: seconds to write the KV of one token, or None when it is not known."""
        if self.kv_bytes_per_token is None or self.kv_bandwidth_gb_per_s is None:
            return None
        return self.kv_bytes_per_token / (self.kv_bandwidth_gb_per_s * 1e9)

    def _require_above_zero(self, name: str) -> None:
        value = getattr(self, name)
        if not (isfinite(value) and value > 0):
            raise ValueError(f"{option_name(name)} must be above 0, got {value:g}")

    def _require_order(self, low: str, high: str) -> None:
        low_value, high_value = getattr(self, low), getattr(self, high)
        if low_value > high_value:
            raise ValueError(f"{option_name(low)} {low_value:g} is larger than {option_name(high)} {high_value:g}")


OPTION_FIELDS = fields(LapsOptions)
