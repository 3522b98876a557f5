"""A client that asks for a deadline or a priority that is none learns so: 400, with the field in it.

Both are in the `custom_params` of the sampling parameters (`sglang_ext_ttft_slo_ms`, `sglang_ext_priority`), which
SGLang hands through to the scheduler unread. A scheduler cannot refuse any more, and without a word a mistyped
objective would be the default one. Refused here, before a stream begins; what comes in by other ways than these two,
in `bootstrap_rooms.validate_one_request`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from sglang_ext.sglang_plugin.laps.queued_request import InvalidHintError, check_hints


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
    for one in parameters if isinstance(parameters, list) else [parameters]:
        if isinstance(one, Mapping):
            check_hints(one.get("custom_params"))


def _error(error: InvalidHintError) -> dict[str, object]:
    """OpenAI's error."""
    return {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": None}
