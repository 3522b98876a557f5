"""What tests of a prefill instance's queues check: its counters, its answers to what was cut off, its state after."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.engines import Engine, Reply
from support.laps import Pair, Prefill

_SAMPLE = re.compile(r"sglang_ext:laps_(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Counters:
    """LAPS's metrics of an engine, `sglang_ext:laps_` left off their names."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def of(cls, engine: Engine) -> Counters:
        """The engine's `/metrics` now."""
        reply = engine.get("/metrics")
        assert reply.status == 200
        return cls(
            {
                (match[1], frozenset(_LABEL.findall(match[2] or ""))): float(match[3])
                for match in map(_SAMPLE.fullmatch, reply.body.splitlines())
                if match is not None
            }
        )

    def since(self, before: Counters) -> Counters:
        """What was added."""
        return Counters({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})

    def __call__(self, name: str, **labels: str) -> float:
        return self.values.get((name, frozenset(labels.items())), 0.0)


def clean_pair(pair: Pair) -> Iterator[Pair]:
    """The pair, empty; afterwards it must be as it was found."""
    pair.prefill.wait_idle()
    pair.flush()
    free_tokens = pair.status()["kv"]["free_tokens"]
    yield pair
    for engine in (pair.prefill, pair.decode):
        engine.post("/abort_request", {"rid": "", "abort_all": True})
    pair.check_clean(free_tokens)


def is_aborted(reply: Reply) -> bool:
    """Whether a request was cut off: with an error, or in SGLang's way with 200 and a reason."""
    return reply.status != 200 or reply.body["meta_info"]["finish_reason"]["type"] == "abort"


def were_aborted(request: Prefill, timeout_s: float = 30.0) -> bool:
    """Whether both legs of a request were cut off."""
    return all(is_aborted(reply) for reply in request.replies.result(timeout=timeout_s))
