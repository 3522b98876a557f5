"""Length classes of an operator: their bounds, objectives and instances, read from the contents of a file.

Prefill classes divide prompts by their new tokens, decode classes divide requests by the tokens of prompt and reply
together. Short and long are the two classes without a file. The buckets of SGLang's experimental `sgl-router` are read
as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_CLASSES = 16  # of a stage; each has series of its own in the metrics
MAX_TOKENS = 10**9
PREFILL, DECODE = "prefill", "decode"
_STAGES = (PREFILL, DECODE)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEYS = ("name", "min_tokens", "max_tokens", "ttft_s", "instances")
# Keys of a bucket of sgl-router by stage, and what they are called here.
_BUCKET_KEYS = {
    PREFILL: {"min_extend_tokens": "min_tokens", "max_extend_tokens": "max_tokens"},
    DECODE: {"min_sequence_tokens": "min_tokens", "max_sequence_tokens": "max_tokens"},
}


class ClassSpec(NamedTuple):
    """One class: it holds what is larger than the class before it, up to `max_tokens`; None: no bound."""

    name: str
    max_tokens: int | None
    ttft_s: float = 0.0  # objective for the time to the first token; 0: none
    instances: tuple[str, ...] = ()  # URLs


class LengthClasses(NamedTuple):
    """The classes of both stages, smallest first; a stage without any is not divided by the file."""

    prefill: tuple[ClassSpec, ...] = ()
    decode: tuple[ClassSpec, ...] = ()


def parse_length_classes(content: Any) -> LengthClasses:
    """Read the parsed file. Raise ValueError, which names the class, where it cannot be used."""
    if isinstance(content, dict) and "buckets" in content:
        content = _from_buckets(content["buckets"])
    if not isinstance(content, dict) or not content:
        raise ValueError("it must hold a mapping with the lists prefill and decode, or buckets of sgl-router")
    for stage in content:
        if stage not in _STAGES:
            raise ValueError(f"there is no list {str(stage)[:64]!r}; known are {', '.join(_STAGES)}")
    classes = LengthClasses(*(_read_stage(stage, content.get(stage, [])) for stage in _STAGES))
    homes: dict[str, str] = {}
    for stage, specs in zip(_STAGES, classes, strict=True):
        for spec in specs:
            for instance in spec.instances:
                if instance in homes:
                    raise ValueError(f"{stage} class {spec.name}: {instance} is already in class {homes[instance]}")
                homes[instance] = spec.name
    return classes


def upper_bounds(specs: Sequence[ClassSpec]) -> tuple[int, ...]:
    """Return the upper bounds of all classes but the last, which has none."""
    return tuple(spec.max_tokens for spec in specs if spec.max_tokens is not None)


def parse_token_range(text: str) -> tuple[int, int] | None:
    """Return first and last token count of `MIN-MAX[,MIN-MAX…]`, llm-d's context-length-range; None for other text."""
    numbers: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not dash or not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
            return None
        if int(high) < int(low):
            return None
        numbers += [int(low), int(high)]
    return min(numbers), max(numbers)


def _read_stage(stage: str, given: Any) -> tuple[ClassSpec, ...]:
    if not isinstance(given, list):
        raise ValueError(f"{stage} must be a list of classes")
    if len(given) > MAX_CLASSES:
        raise ValueError(f"{len(given)} {stage} classes are more than {MAX_CLASSES}")
    read = [_read_class(stage, entry) for entry in given]
    read.sort(key=lambda entry: MAX_TOKENS + 1 if entry[0].max_tokens is None else entry[0].max_tokens)
    end = 0  # of the class before
    before: ClassSpec | None = None
    for spec, min_tokens in read:
        if before is not None and before.max_tokens in (None, spec.max_tokens):
            limit = "no max_tokens" if before.max_tokens is None else f"the same max_tokens, {spec.max_tokens}"
            raise ValueError(f"{stage} classes {before.name} and {spec.name} have {limit}")
        if min_tokens is not None and before is not None and min_tokens <= end:
            raise ValueError(f"{stage} classes {before.name} and {spec.name} overlap: {min_tokens} is at most {end}")
        if min_tokens is not None and min_tokens > end + 1:
            raise ValueError(f"{stage}: no class for {end if before is None else end + 1} to {min_tokens - 1} tokens")
        end = spec.max_tokens or 0
        before = spec
    if before is not None and before.max_tokens is not None:
        raise ValueError(f"{stage}: no class for more than {end} tokens: class {before.name} needs no max_tokens")
    names = [spec.name for spec, _ in read]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two {stage} classes are called {name}")
    return tuple(spec for spec, _ in read)


def _read_class(stage: str, entry: Any) -> tuple[ClassSpec, int | None]:
    """Return a class and its `min_tokens`."""
    if not isinstance(entry, dict):
        raise ValueError(f"a {stage} class must be a mapping with a name")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a {stage} class needs a name of 1 to 64 letters, digits and . _ -, not {str(name)[:64]!r}")
    for key in entry:
        if key not in _KEYS or (key == "ttft_s" and stage == DECODE):
            raise ValueError(f"{stage} class {name}: there is no option {str(key)[:64]!r}")
    bounds = {}
    for key, least in (("min_tokens", 0), ("max_tokens", 1)):
        value = bounds[key] = entry.get(key)
        if value is not None and (type(value) is not int or not least <= value <= MAX_TOKENS):
            raise ValueError(f"{stage} class {name}: {key} must be a whole number of at least {least}")
    low, high = bounds["min_tokens"], bounds["max_tokens"]
    if low is not None and high is not None and low > high:
        raise ValueError(f"{stage} class {name}: min_tokens {low} exceeds max_tokens {high}")
    ttft_s = entry.get("ttft_s") or 0.0
    if type(ttft_s) not in (int, float) or not 0 <= ttft_s < float("inf"):
        raise ValueError(f"{stage} class {name}: ttft_s must be a number of seconds")
    instances = entry.get("instances") or []
    if not isinstance(instances, list) or not all(isinstance(url, str) for url in instances):
        raise ValueError(f"{stage} class {name}: instances must be a list of URLs")
    return ClassSpec(name, high, float(ttft_s), tuple(instances)), low


def _from_buckets(buckets: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the classes that sgl-router's buckets are.

    A decode bucket without bounds, which takes what no other takes, is left out where there are others: its instances
    serve every class.
    """
    if not isinstance(buckets, list) or not all(isinstance(bucket, dict) for bucket in buckets):
        raise ValueError("buckets must be a list of mappings")
    stages: dict[str, list[dict[str, Any]]] = {stage: [] for stage in _STAGES}
    for bucket in buckets:
        stage = str(bucket.get("stage"))
        if stage not in _STAGES:
            raise ValueError(f"bucket {str(bucket.get('id'))[:64]}: stage {stage[:64]!r} is not {' or '.join(_STAGES)}")
        entry = {"name": bucket.get("id"), "instances": bucket.get("worker_ids")}
        entry |= {ours: bucket[theirs] for theirs, ours in _BUCKET_KEYS[stage].items() if theirs in bucket}
        ttft_ms = bucket.get("ttft_p95_at_capacity_ms")
        if stage == PREFILL and isinstance(ttft_ms, (int, float)):
            entry["ttft_s"] = ttft_ms / 1000
        stages[stage].append(entry)
    bounded = [entry for entry in stages[DECODE] if _is_bounded(entry)]
    return {PREFILL: stages[PREFILL], DECODE: bounded or stages[DECODE]}


def _is_bounded(entry: Mapping[str, Any]) -> bool:
    return entry.get("min_tokens") is not None or entry.get("max_tokens") is not None
