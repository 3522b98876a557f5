"""A client that asks for a deadline or a priority that is none learns so: 400, with the field in it.

Both are in the `custom_params` of the sampling parameters (`sglang_ext_ttft_slo_ms`, `sglang_ext_priority`), which
SGLang hands through to the scheduler unread. A scheduler cannot refuse any more, and without a word a mistyped
objective would be the default one. Refused here, before a stream begins; what comes in by other ways than these two,
in `bootstrap_rooms.validate_one_request`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from math import inf
from typing import Any

from sglang_ext.laps.decide.round_plan import PriorityClass

TTFT_SLO_MS_PARAMETER = "sglang_ext_ttft_slo_ms"
PRIORITY_PARAMETER = "sglang_ext_priority"
_SHOWN_CHARACTERS = 60  # of a value that is refused
PRIORITY_NAMES = {
    "real-time": PriorityClass.REAL_TIME,
    "high": PriorityClass.HIGH,
    "normal": PriorityClass.NORMAL,
    "low": PriorityClass.LOW,
}


class InvalidHintError(ValueError):
    """A client asks for a deadline or a priority that is none; the message names the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"custom_params.{field} {problem}")
        self.param = f"custom_params.{field}"


def check_hints(custom_params: object) -> None:
    """Raise InvalidHintError for a deadline or a priority in a request's `custom_params` that is none."""
    if not isinstance(custom_params, dict):
        return
    slo_ms = custom_params.get(TTFT_SLO_MS_PARAMETER)
    if slo_ms is not None and slo_seconds(slo_ms) is None:
        raise InvalidHintError(
            TTFT_SLO_MS_PARAMETER, f"must be a positive number of milliseconds, got {_shortened(slo_ms)}"
        )
    priority = custom_params.get(PRIORITY_PARAMETER)
    if priority is not None and not (isinstance(priority, str) and priority in PRIORITY_NAMES):
        raise InvalidHintError(
            PRIORITY_PARAMETER, f"must be one of {', '.join(PRIORITY_NAMES)}, got {_shortened(priority)}"
        )


def slo_seconds(value: object) -> float | None:
    """A number of milliseconds in seconds; None for what is not above 0 or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        slo_s = value / 1e3
    except OverflowError:  # an integer beyond every float
        return None
    # In seconds: the smallest positive floats are 0 there.
    return slo_s if 0 < slo_s < inf else None


def _shortened(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        text = "a number of too many digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


async def handle_request(
    stock: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `OpenAIServingBase.handle_request(request, raw_request)`."""
    try:
        check_hints(getattr(request, "custom_params", None))
    except InvalidHintError as error:
        from fastapi.responses import JSONResponse

        return JSONResponse({"error": _error(error)}, status_code=HTTPStatus.BAD_REQUEST)
    return await stock(serving, request, raw_request, *args, **kwargs)


def generate_contract_error(stock: Callable[[Any], Any], body: Any) -> Any:
    """AROUND `generate_contract_error(body)`: what is wrong with the parsed body of `/generate`, or None.

    SGLang answers with 400 and `{"error": what is returned here}`.
    """
    problem = stock(body)
    if problem is not None:
        return problem
    try:
        check_body(body)
    except InvalidHintError as error:
        return _error(error)
    return None


def check_body(body: object) -> None:
    """Raise InvalidHintError for the parsed body of `/generate`: one set of parameters, or one per prompt."""
    parameters = body.get("sampling_params") if isinstance(body, Mapping) else None
    for parameter in parameters if isinstance(parameters, list) else [parameters]:
        if isinstance(parameter, Mapping):
            check_hints(parameter.get("custom_params"))


def _error(error: InvalidHintError) -> dict[str, object]:
    """OpenAI's error."""
    return {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": None}
