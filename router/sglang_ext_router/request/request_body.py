"""The body for both instances: the client's, with bootstrap fields, request id, deadline and priority added."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_ext_router.request.prompt import BadRequestError, dump
from sglang_ext_router.request.request_ids import unique_ids

ROUTER_FIELDS = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"})
_NEEDS_KEPT = ("previous_response_id", "conversation", "background")
RESPONSE_FIELDS = ROUTER_FIELDS | {"request_id"}  # as /v1/responses calls an id
OWN_PREFIX = "sglang_ext_"
SLO_FIELD = "sglang_ext_ttft_slo_ms"
PRIORITY_FIELD = "sglang_ext_priority"
OUTPUT_IDS_FIELD = "sglang_ext_output_ids"
MAX_PARAMETERS_BYTES = 1 << 20
MIN_SLO_MS = 1.0  # sent for a request whose deadline has passed


class CleanBody(NamedTuple):
    """A body without the fields that the router sets."""

    raw: bytes | bytearray
    is_empty: bool
    request_ids: str | list[str] | None  # the client's own, which appear in its reply
    id_field: bytes = b"rid"
    list_size: int = 0  # above 0: the instances take a list of as many ids


def clean_response_body(raw: bytes | bytearray, body: dict[str, Any]) -> CleanBody:
    """Do as `clean_body` does, for a body of /v1/responses."""
    given = body.get("request_id")
    if given is not None and type(given) is not str:
        raise BadRequestError("request_id must be a string", "request_id")
    for name in _NEEDS_KEPT:
        if body.get(name):
            raise BadRequestError(f"{name} is not served: replies are not kept; send the conversation as input", name)
    if RESPONSE_FIELDS.isdisjoint(body):
        return CleanBody(raw, not body, None, b"request_id")
    kept = {key: value for key, value in body.items() if key not in RESPONSE_FIELDS}
    return CleanBody(dump(kept), not kept, given, b"request_id")


def clean_body(raw: bytes | bytearray, body: dict[str, Any], has_id: bool = True) -> CleanBody:
    """Remove a client's bootstrap fields and request id; a body without any keeps its text unchanged.

    `has_id`: the path has a field for an id. Raise BadRequestError for an id that is not a string or a list of strings.
    """
    given = body.get("rid") if has_id else None
    if not (given is None or type(given) is str or (type(given) is list and all(type(item) is str for item in given))):
        raise BadRequestError("rid must be a string or a list of strings", "rid")
    if ROUTER_FIELDS.isdisjoint(body):
        return CleanBody(raw, not body, None)
    kept = {key: value for key, value in body.items() if key not in ROUTER_FIELDS}
    return CleanBody(dump(kept), not kept, given)


def body_end(clean: CleanBody, own: bytes, bootstrap_json: bytes, room: int, made_id: bytes) -> bytes:
    """Return the text that replaces the body's last brace: a member `own`, the bootstrap fields, and a request id.

    `bootstrap_json` ends in `"bootstrap_room":`; it is empty for an undivided instance, which has no such fields. The
    text is extended, as writing all of it again would take longer.
    """
    start = b"" if clean.is_empty else b","
    if own:
        start += own + b","
    given = clean.request_ids
    if not bootstrap_json:
        if clean.list_size:
            ids = dump([f"{made_id.decode()}_{i}" for i in range(clean.list_size)])
        else:
            ids = b'"%b"' % made_id if given is None else dump(unique_ids(given, made_id))
        return b'%b"%b":%b}' % (start, clean.id_field, ids)
    if given is None:
        return b'%b%b%d,"%b":"%b"}' % (start, bootstrap_json, room, clean.id_field, made_id)
    return b'%b%b%d,"%b":%b}' % (start, bootstrap_json, room, clean.id_field, dump(unique_ids(given, made_id)))


class HintField(NamedTuple):
    """The field of a body that takes deadline and priority, the client's value of it, and the body without it."""

    name: str
    given: Any
    clean: CleanBody


def hint_field(path: bytes, body: dict[str, Any], clean: CleanBody) -> HintField:
    """Return the hint field of the parsed `body`; `clean` is its text without the router's own fields.

    SGLang passes `custom_params` of the sampling parameters to the scheduler unread, where the instances read deadline
    and priority. Raise BadRequestError if the client's own parameters are not objects, are nested too deeply, or are
    too large to be written again for every attempt.
    """
    field = "sampling_params" if path == b"/generate" else "custom_params"
    given = body.get(field)
    if field in body:
        rest = {key: value for key, value in body.items() if key != field and key not in ROUTER_FIELDS}
        clean = CleanBody(dump(rest), not rest, clean.request_ids)
    if field == "custom_params":
        _check_object(given, field)
    else:
        for item in given if isinstance(given, list) else [given]:
            _check_object(item, field)
            _check_object((item or {}).get("custom_params"), f"{field}.custom_params")
    if len(dump(given)) > MAX_PARAMETERS_BYTES:
        raise BadRequestError(f"{field} is larger than {MAX_PARAMETERS_BYTES} bytes", field)
    return HintField(field, given, clean)


class RequestHints:
    """Puts TTFT deadline, priority and the output so far into one request's body, for every attempt again."""

    def __init__(
        self, field: HintField, ttft_slo_s: float | None, priority: str | None, output_ids: list[int] | None = None
    ) -> None:
        """Raise BadRequestError for a field that cannot be written as JSON."""
        self._slo_s = ttft_slo_s
        self._priority = priority
        self._output_ids = output_ids  # of tokens that instances have generated which were lost
        self._field = field.name
        self._given = field.given
        self.clean = field.clean  # the body without the field
        self.member(0.0)  # raises now if the field cannot be written

    def member(self, spent_s: float) -> bytes:
        """Return the field as JSON after `spent_s` in the router: the rest of the deadline, and the priority."""
        own: dict[str, object] = {}
        if self._slo_s is not None:
            own[SLO_FIELD] = max(MIN_SLO_MS, round((self._slo_s - spent_s) * 1000, 3))
        if self._priority is not None:
            own[PRIORITY_FIELD] = self._priority
        if self._output_ids:
            own[OUTPUT_IDS_FIELD] = self._output_ids
        given = self._given
        value: object
        if self._field == "custom_params":
            value = _merged(given, own)
        elif isinstance(given, list):
            value = [_with_params(item, own) for item in given]
        else:
            value = _with_params(given, own)
        return b'"%b":%b' % (self._field.encode(), dump(value))


def _with_params(parameters: dict[str, Any] | None, own: dict[str, object]) -> dict[str, Any]:
    parameters = parameters or {}
    return {**parameters, "custom_params": _merged(parameters.get("custom_params"), own)}


def _merged(given: dict[str, Any] | None, own: dict[str, object]) -> dict[str, Any]:
    """Return the client's parameters with our own, which replace what the client gives under our prefix."""
    return {**{key: value for key, value in (given or {}).items() if not key.startswith(OWN_PREFIX)}, **own}


def _check_object(value: object, name: str) -> None:
    if value is not None and not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object", name)
