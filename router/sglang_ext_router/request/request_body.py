"""The body that both instances get: the client's, with bootstrap fields, request id, deadline and priority put in."""

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
PRIORITIES = ("real-time", "high", "normal", "low")
MAX_PARAMETERS_BYTES = 1 << 20
MIN_SLO_MS = 1.0  # of a request that is late already


class CleanBody(NamedTuple):
    """A body without the fields that the router sets itself."""

    raw: bytes | bytearray
    is_empty: bool
    request_ids: str | list[str] | None  # the client's own, under which it finds its reply
    id_field: bytes = b"rid"


def clean_response_body(raw: bytes | bytearray, body: dict[str, Any]) -> CleanBody:
    """As `clean_body`, for /v1/responses."""
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


def clean_body(raw: bytes | bytearray, body: dict[str, Any]) -> CleanBody:
    """Take out a client's bootstrap fields and request id; where there are none the text stays as it came.

    BadRequestError for an id that is not a string or a list of strings.
    """
    given = body.get("rid")
    if not (given is None or type(given) is str or (type(given) is list and all(type(item) is str for item in given))):
        raise BadRequestError("rid must be a string or a list of strings", "rid")
    if ROUTER_FIELDS.isdisjoint(body):
        return CleanBody(raw, not body, None)
    kept = {key: value for key, value in body.items() if key not in ROUTER_FIELDS}
    return CleanBody(dump(kept), not kept, given)


def body_end(clean: CleanBody, own: bytes, bootstrap_json: bytes, room: int, made_id: bytes) -> bytes:
    """What takes the place of the body's last brace: a member `own`, where to meet, and a request id.

    `bootstrap_json` ends in `"bootstrap_room":`. The text is extended rather than written anew: parsing is paid
    already, writing is not.
    """
    start = b"" if clean.is_empty else b","
    if own:
        start += own + b","
    given = clean.request_ids
    if given is None:
        return b'%b%b%d,"%b":"%b"}' % (start, bootstrap_json, room, clean.id_field, made_id)
    return b'%b%b%d,"%b":%b}' % (start, bootstrap_json, room, clean.id_field, dump(unique_ids(given, made_id)))


class HintField(NamedTuple):
    """Where in a body a deadline and a priority go, what the client has there, and the body without it."""

    name: str
    given: Any
    clean: CleanBody


def hint_field(path: bytes, body: dict[str, Any], clean: CleanBody) -> HintField:
    """`body` is the parsed request, `clean` its text without the router's own fields.

    SGLang hands `custom_params` of the sampling parameters through to the scheduler unread; that is where the
    instances look for them. BadRequestError where the client's own parameters are not objects, nested too deeply, or
    too large: they are written anew for every attempt.
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
    """Puts TTFT deadline and priority into one request's body, anew for every attempt."""

    def __init__(self, field: HintField, ttft_slo_s: float | None, priority: str | None) -> None:
        """BadRequestError for what cannot be written."""
        self._slo_s = ttft_slo_s
        self._priority = priority
        self._field = field.name
        self._given = field.given
        self.clean = field.clean  # the body without the field
        self.member(0.0)  # what cannot be written is refused now

    def member(self, spent_s: float) -> bytes:
        """The field as JSON to send after `spent_s` in the router: what is left of the deadline, and the priority."""
        own: dict[str, float | str] = {}
        if self._slo_s is not None:
            own[SLO_FIELD] = max(MIN_SLO_MS, round((self._slo_s - spent_s) * 1000, 3))
        if self._priority is not None:
            own[PRIORITY_FIELD] = self._priority
        given = self._given
        value: object
        if self._field == "custom_params":
            value = _merged(given, own)
        elif isinstance(given, list):
            value = [_with_params(item, own) for item in given]
        else:
            value = _with_params(given, own)
        return b'"%b":%b' % (self._field.encode(), dump(value))


def _with_params(parameters: dict[str, Any] | None, own: dict[str, float | str]) -> dict[str, Any]:
    parameters = parameters or {}
    return {**parameters, "custom_params": _merged(parameters.get("custom_params"), own)}


def _merged(given: dict[str, Any] | None, own: dict[str, float | str]) -> dict[str, Any]:
    """The client's parameters with ours; what it gives under our names does not count."""
    return {**{key: value for key, value in (given or {}).items() if not key.startswith(OWN_PREFIX)}, **own}


def _check_object(value: object, name: str) -> None:
    if value is not None and not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object", name)
