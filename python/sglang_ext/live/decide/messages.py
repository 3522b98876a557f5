"""The stream of the live page: its rows, how each is written, and how large a message may get.

A stream is one `hello` and then `frame` messages, each one line of JSON. Rows are arrays in the order of their fields,
which `hello` names, so that a reader need not know this version's. All times are seconds since the stream began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from sglang_ext.live.decide.encoding import MAX_TEXT_CHARACTERS, encode

VERSION = 1
MIN_INTERVAL_S = 0.25
MAX_MESSAGE_BYTES = 65_536
MAX_CHUNKS = 24  # of one prompt that are sent
MAX_MEMBERS = 64  # of one chunk
GONE = "gone"


class InstanceRow(NamedTuple):
    """An instance, whenever one of these has changed."""

    instance: Annotated[int, "its number in this stream, never used again for another"]
    name: Annotated[str, "HOST:PORT, or its number in a simulation"]
    pool: Annotated[str, "short, long, both or decode"]
    model: Annotated[str, "the name under which it serves its model"]
    state: Annotated[str, "ready, draining, moving, silent, unhealthy, refused, or gone when it has left"]
    mode: Annotated[str | None, "how its own scheduler treats the classes: both, short or long"]
    reason: Annotated[str, "why it takes nothing; empty while it does"]


class LoadRow(NamedTuple):
    """Work of an instance, whenever it has changed. Null is unknown."""

    instance: Annotated[int, "number of the instance"]
    in_flight: Annotated[int, "requests of this router, and of the routers that share with it, at the instance"]
    pending_tokens: Annotated[int, "prefill: prompt tokens not computed yet; decode: KV tokens on their way"]
    short_queued: Annotated[int | None, "short prefills in its queue"]
    long_queued: Annotated[int | None, "long prefills in its queue"]
    parked: Annotated[int | None, "long prefills that wait between two chunks"]
    short_busy: Annotated[float | None, "share of the last seconds spent on short prefills"]
    long_busy: Annotated[float | None, "share of the last seconds spent on long prefills"]
    pressure: Annotated[float | None, "what the pool controller judges it by"]
    kv_used: Annotated[float | None, "share of its KV tokens in use"]
    running: Annotated[int | None, "requests that it runs by its own report"]


class RequestRow(NamedTuple):
    """One request of the sample, whenever it has come further."""

    request: Annotated[int, "its number in this stream"]
    id: Annotated[str, "request id as the client received it"]
    length_class: Annotated[str | None, "short or long; null before it was routed"]
    prompt_tokens: Annotated[int, "tokens of its prompt, estimated where they were not counted"]
    cached_tokens: Annotated[int, "of these, believed to be in the prefix cache"]
    output_tokens: Annotated[int | None, "tokens of its answer, once it has ended"]
    prefill: Annotated[int | None, "number of the prefill instance"]
    decode: Annotated[int | None, "number of the decode instance"]
    received_s: Annotated[float, "when it came"]
    sent_s: Annotated[float | None, "when it was sent to both instances, of the last attempt"]
    started_s: Annotated[float | None, "when its prefill began; null where that is unknown, as to a router"]
    prefilled_s: Annotated[float | None, "when prefill was done and its KV had been taken"]
    first_token_s: Annotated[float | None, "when the client was sent the first token"]
    ended_s: Annotated[float | None, "when its answer was whole, or it failed"]
    outcome: Annotated[str | None, "ok, client_left, error_before or error_after a first byte"]
    attempts: Annotated[int, "how often it was sent"]


class SpanRow(NamedTuple):
    """Work of one instance from start to end. A span that comes again with the same start and label has gone on."""

    instance: Annotated[int, "number of the instance"]
    kind: Annotated[str, "prefill, parked, transfer; of a long pool compute, ring, rebalance, idle, collect or failed"]
    start_s: Annotated[float, "its beginning; below 0: before that of the stream"]
    end_s: Annotated[float, "its end, or the time of the message while it goes on"]
    length_class: Annotated[str | None, "short, long, or mixed of a batch of both"]
    label: Annotated[str, "the request or prompt, or what the batch is made of"]
    tokens: Annotated[
        int | None, "new prompt tokens; of a parked prefill the tokens left, of a transfer the tokens whose KV was sent"
    ]
    requests: Annotated[int, "requests in the batch or transfer"]


class EventRow(NamedTuple):
    """Something that happened to an instance."""

    at_s: Annotated[float, "when it was seen"]
    kind: Annotated[str, "joined, left, state, mode, moved or move"]
    instance: Annotated[int, "number of the instance"]
    text: Annotated[str, "what happened, with the reason"]


class ClassRow(NamedTuple):
    """All requests of a class since the stream began; counts add up to the requests that were there or came since."""

    length_class: Annotated[str, "short, long, or unknown for those not routed yet or refused"]
    waiting: Annotated[int, "not sent to any instance yet"]
    prefilling: Annotated[int, "sent, and prefill has not answered: it queues, is computed, or its KV is on its way"]
    starting: Annotated[int, "prefilled, without a first token"]
    decoding: Annotated[int, "with a first token"]
    ended: Annotated[int, "answered whole"]
    failed: Annotated[int, "ended otherwise"]
    ttft_p50_s: Annotated[float | None, "median time to the first token of the last minute"]
    ttft_p90_s: Annotated[float | None, "its 90th percentile"]
    ttft_samples: Annotated[int, "requests that these were computed from"]
    objective_s: Annotated[float | None, "the objective for them"]


class PromptRow(NamedTuple):
    """A prompt that the long pool shares, whenever it has come further."""

    prompt: Annotated[int, "its number in the pool"]
    owner: Annotated[str, "the instance that the router sent it to"]
    tokens: Annotated[int, "tokens of the prompt"]
    cached_tokens: Annotated[int, "of these, cached when it was offered"]
    offered_s: Annotated[float, "when it was offered to the pool"]
    ended_s: Annotated[float | None, "when its owner had all KV, or it was declined"]
    outcome: Annotated[str | None, "streamed, collected, cancelled, owner_lost, or why it was declined"]
    chunks: Annotated[Sequence[Sequence[Any]], "[new tokens, [members], start_s, end_s or null] of each chunk begun"]
    planned: Annotated[Sequence[Sequence[Any]], "[new tokens, [members]] of each chunk planned and not begun"]


# Bytes that the rows of each kind may take in one message. With what stands around them they stay below the largest.
BUDGETS_BYTES = {
    "classes": 2_000,
    "instances": 14_000,
    "loads": 14_000,
    "requests": 16_000,
    "spans": 8_000,
    "events": 3_000,
    "prompts": 6_000,
}
ROWS: Mapping[str, type[tuple[Any, ...]]] = {
    "classes": ClassRow,
    "instances": InstanceRow,
    "loads": LoadRow,
    "requests": RequestRow,
    "spans": SpanRow,
    "events": EventRow,
    "prompts": PromptRow,
}
FRAME_FIELDS = {
    "kind": "frame",
    "number": "grows by one from frame to frame; a gap is what a slow reader has missed",
    "at_s": "the time of this frame",
    "in_flight": "requests that are sent or wait, of all classes",
    "is_estimate": "the counts of stages are scaled up from a part of the requests",
    "sampled_of": "one in this many ended requests is shown, with those seen on their way",
    "instances_known": "how many there are",
    "deferred": "rows that did not fit and come with the next frames",
    "dropped": "rows that were left out since the stream began, as too many came",
    "elsewhere": "of the router's other processes, or the other routers of its group, as of a second ago: `routers`, "
    "how many; `in_flight`, sent or waiting there; `ended` and `failed` since the stream began, null where that "
    "is unknown; null without any",
    "lanes": "of prefill instances: `telling`, how many report their work; `silent`, how many answer without it; "
    "`missed`, batches, parked times and transfers since the stream began that have no span, as they were too "
    "many; null in a simulation",
}
HELLO_FIELDS = {
    "kind": "hello",
    "version": "of this format",
    "source": "router or simulation",
    "name": "where it comes from",
    "began_unix_s": "Unix time at which the stream began; null in a simulation",
    "interval_s": "least time between two frames",
    "boundary_tokens": "most new tokens of a short prefill",
    "notes": "what this stream does not know, for people",
    "fields": "names of the fields of each kind of row",
}


def hello(
    *,
    source: str,
    name: str,
    began_unix_s: float | None,
    interval_s: float,
    boundary_tokens: int | None,
    notes: Sequence[str],
) -> bytes:
    """The first message of a stream, without a line's end."""
    fields: dict[str, object] = {
        "kind": "hello",
        "version": VERSION,
        "source": source,
        "name": name[:MAX_TEXT_CHARACTERS],
        "began_unix_s": None if began_unix_s is None else round(began_unix_s, 3),
        "interval_s": interval_s,
        "boundary_tokens": boundary_tokens,
        "notes": list(notes),
        "fields": {kind: list(row.__annotations__) for kind, row in ROWS.items()},
    }
    return encode(fields).encode()


def schema() -> dict[str, Any]:
    """JSON Schema of one message, made of the rows above."""
    rows = {
        name: {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [
                    {"title": field, "description": text, **types} for field, text, types in described(row)
                ],
                "minItems": len(row.__annotations__),
                "maxItems": len(row.__annotations__),
            },
        }
        for name, row in ROWS.items()
    }
    frame = {
        "type": "object",
        "required": list(FRAME_FIELDS),
        "properties": {
            **{name: {"description": text} for name, text in FRAME_FIELDS.items()},
            "kind": {"const": "frame"},
            **rows,
        },
        "additionalProperties": False,
    }
    greeting = {
        "type": "object",
        "required": list(HELLO_FIELDS),
        "properties": {
            **{name: {"description": text} for name, text in HELLO_FIELDS.items()},
            "kind": {"const": "hello"},
        },
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "oneOf": [greeting, frame]}


def described(row: type[tuple[Any, ...]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, meaning and JSON type of each field of a row."""
    found = []
    for field, hint in get_type_hints(row, include_extras=True).items():
        kind, text = get_args(hint)
        kinds = (kind,) if get_origin(kind) is Sequence or not get_args(kind) else get_args(kind)
        names = [_JSON_TYPES.get(kind, "array") for kind in kinds]
        found.append((field, text, {"type": names[0] if len(names) == 1 else names}))
    return found


_JSON_TYPES = {int: "integer", float: "number", str: "string", type(None): "null"}
