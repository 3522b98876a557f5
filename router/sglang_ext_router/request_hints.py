"""A request's TTFT deadline and priority, from its headers into the body that both instances get.

SGLang hands `custom_params` of the sampling parameters through to the scheduler unread; that is where the
instances look for them. Only requests with such a header come here.
"""

from __future__ import annotations

from typing import Any

import orjson

from sglang_ext_router.prompt import ROUTER_FIELDS, BadRequestError, CleanBody

OWN_PREFIX = "sglang_ext_"
SLO_FIELD = "sglang_ext_ttft_slo_ms"
PRIORITY_FIELD = "sglang_ext_priority"
PRIORITIES = ("real-time", "high", "normal", "low")
MIN_SLO_MS = 1.0  # of a request that is late already


class RequestHints:
    """Puts deadline and priority into one request's body, anew for every attempt."""

    def __init__(
        self, path: bytes, body: dict[str, Any], clean: CleanBody, ttft_slo_s: float | None, priority: str | None
    ) -> None:
        """`body` is the parsed request, `clean` its text without the router's own fields.

        BadRequestError where the client's own parameters are not objects, or nested too deeply.
        """
        self._slo_s = ttft_slo_s
        self._priority = priority
        self._field = field = "sampling_params" if path == b"/generate" else "custom_params"
        self._given = given = body.get(field)
        if field in body:
            rest = {key: value for key, value in body.items() if key != field and key not in ROUTER_FIELDS}
            clean = CleanBody(_dump(rest), not rest, clean.request_ids)
        self._clean = clean
        if field == "custom_params":
            _check_object(given, field)
        else:
            for item in given if isinstance(given, list) else [given]:
                _check_object(item, field)
                _check_object((item or {}).get("custom_params"), f"{field}.custom_params")
        self.body(0.0)  # what cannot be written is refused now

    def body(self, spent_s: float) -> CleanBody:
        """The body to send after `spent_s` in the router: what is left of the deadline, and the priority."""
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
        clean = self._clean
        comma = b"" if clean.is_empty else b","
        end = clean.raw.rindex(b"}")
        raw = b'%b%b"%b":%b}' % (clean.raw[:end], comma, self._field.encode(), _dump(value))
        return CleanBody(raw, False, clean.request_ids)


def _with_params(parameters: dict[str, Any] | None, own: dict[str, float | str]) -> dict[str, Any]:
    parameters = parameters or {}
    return {**parameters, "custom_params": _merged(parameters.get("custom_params"), own)}


def _merged(given: dict[str, Any] | None, own: dict[str, float | str]) -> dict[str, Any]:
    """The client's parameters with ours; what it gives under our names does not count."""
    return {**{key: value for key, value in (given or {}).items() if not key.startswith(OWN_PREFIX)}, **own}


def _check_object(value: object, name: str) -> None:
    if value is not None and not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object", name)


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise BadRequestError("the body is nested too deeply") from None
