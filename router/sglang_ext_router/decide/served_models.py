"""Decides which of the served models a request names, and which instances of one model may serve it together.

A prefill instance hands its KV cache to a decode instance page by page, as bytes. Two instances that differ in what
these bytes mean, or that speak different transfer protocols, fail or hang once they meet; so those of one model must
agree before any of them gets a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

M = TypeVar("M")

ADAPTER_SEPARATOR = ":"  # SGLang's `model:adapter`
MAX_NAME_CHARACTERS = 512  # of what a client may give; no model has such a name
AUTO = "auto"  # KV dtype: that of the model's checkpoint
HANDSHAKE = "handshake"  # the transfer backend that sends between any numbers of ranks


class PairingFacts(NamedTuple):
    """Describes what one instance reports of itself; None: not reported, and taken to agree."""

    url: str
    model: str  # the name under which it is served
    kv_cache_dtype: str | None = None  # as it was started with, `auto` included
    resolved_kv_cache_dtype: str | None = None  # what it came to, `auto` where that is the model's own
    kv_element_type: str | None = None  # of the numbers in it
    page_size_tokens: int | None = None
    transfer_backend: str | None = None
    architecture: str | None = None  # of the model: class, layers, sizes
    has_kv_checksums: bool | None = None  # prefill sends one for each request, decode compares
    side: str | None = None  # prefill or decode; None: it may be either
    ranks: int | None = None  # that divide the attention heads among them
    stages: int | None = None  # of its pipeline
    states_of_equal_ranks: tuple[str, ...] = ()  # parts of its KV that pass only between equal numbers of ranks
    revision: str = ""  # empty: of instances that have none


def find_model(name: str, served: Mapping[str, M]) -> M | None:
    """The served model that a client names; None if there is none.

    `served` holds all names and aliases. `NAME:ADAPTER` is a LoRA adapter of NAME; the longest name that is served
    wins, as names may hold colons themselves.
    """
    found = served.get(name)
    if found is not None or len(name) > MAX_NAME_CHARACTERS:
        return found
    while found is None and ADAPTER_SEPARATOR in name:
        name = name.rpartition(ADAPTER_SEPARATOR)[0]
        found = served.get(name)
    return found


def pairing_refusal(candidate: PairingFacts, serving: Iterable[PairingFacts]) -> str | None:
    """Return why the candidate must not serve together with the instances that serve already; None if it may.

    Only instances of the candidate's own model and revision count: KV cache passes between no others. The line names
    both instances and both values.
    """
    for other in serving:
        own_group, others_group = (candidate.model, candidate.revision), (other.model, other.revision)
        if own_group != others_group or other.url == candidate.url:
            continue
        for what, own, others in (
            ("model architecture", candidate.architecture, other.architecture),
            ("KV cache dtype", *_kv_cache_dtypes(candidate, other)),
            ("KV cache element type", candidate.kv_element_type, other.kv_element_type),
            ("page size", candidate.page_size_tokens, other.page_size_tokens),
            ("transfer backend", candidate.transfer_backend, other.transfer_backend),
            ("--disaggregation-enable-kv-checksum", candidate.has_kv_checksums, other.has_kv_checksums),
        ):
            if own is not None and others is not None and own != others:
                return (
                    f"it cannot serve {candidate.model} together with {other.url}: "
                    f"{what} {own} at {candidate.url}, {others} at {other.url}"
                )
        reason = _ranks_refusal(candidate, other)
        if reason is not None:
            return f"it cannot serve {candidate.model} together with {other.url}: {reason}"
    return None


def _ranks_refusal(candidate: PairingFacts, other: PairingFacts) -> str | None:
    """Return why KV cannot pass between the ranks of two instances; None if it can, or is not sent between them."""
    if candidate.side is not None and candidate.side == other.side:
        return None
    own, others = candidate.ranks, other.ranks
    if own is not None and others is not None and own != others:
        differs = f"{own} ranks at {candidate.url}, {others} at {other.url}"
        if max(own, others) % min(own, others) and candidate.transfer_backend != HANDSHAKE:
            return f"{differs}, and neither is a multiple of the other"
        states = {*candidate.states_of_equal_ranks, *other.states_of_equal_ranks}
        if states:
            named = ", ".join(sorted(states))
            return f"{differs}, and {candidate.transfer_backend} sends {named} only between equal numbers"
    for prefill, decode in ((candidate, other), (other, candidate)):
        if decode.side == "decode" and decode.stages not in {None, 1, prefill.stages} and prefill.stages is not None:
            return f"{decode.stages} pipeline stages at {decode.url}, {prefill.stages} at {prefill.url}"
    return None


def _kv_cache_dtypes(facts: PairingFacts, other: PairingFacts) -> tuple[str | None, str | None]:
    """The two values to compare: what both were given, or what both came to where only that can be compared.

    The same checkpoint makes the same of `auto`, so equal options agree. Different ones may still come to the same.
    """
    if facts.kv_cache_dtype == other.kv_cache_dtype:
        return None, None
    if facts.resolved_kv_cache_dtype is not None and other.resolved_kv_cache_dtype is not None:
        return facts.resolved_kv_cache_dtype, other.resolved_kv_cache_dtype
    return facts.kv_cache_dtype, other.kv_cache_dtype


def parse_alias(text: str) -> tuple[str, str]:
    """Read `NAME=MODEL`; ValueError says what is wrong.

    An alias holds no colon: instances get it as the client sent it, and would take what follows for an adapter.
    """
    name, equals, model = text.partition("=")
    if not equals or not name.strip() or not model.strip():
        raise ValueError(f"{text!r} is not of the form NAME=MODEL")
    if ADAPTER_SEPARATOR in name:
        raise ValueError(f"{text!r}: an alias must not hold a colon, which stands before an adapter's name")
    return name.strip(), model.strip()
