"""Lines of a batch's output and error file, in OpenAI's shape, and what stands for requests that were not finished."""

from __future__ import annotations

import orjson

from sglang_ext.batch.service.metrics import RequestOutcome
from sglang_ext.batch.store import LineResult, StoredResult
from sglang_ext.policy.batch.batch_lifecycle import BatchStatus

OUTPUT_PURPOSE = "batch_output"
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"


def unfinished_result(line: int, status: BatchStatus) -> LineResult:
    """The error of a request that has no result when its batch has expired, or was cancelled."""
    code = CANCELLED if status is BatchStatus.CANCELLING else EXPIRED
    return LineResult(line, False, None, "", code, b"")


_MESSAGES = {
    EXPIRED: "This request could not be executed before the completion window ended.",
    CANCELLED: "This request was not executed: the batch was cancelled.",
}


def outcome_of(result: StoredResult) -> RequestOutcome:
    """How a result is counted."""
    if result.is_ok:
        return RequestOutcome.SUCCEEDED
    kinds = {EXPIRED: RequestOutcome.EXPIRED, CANCELLED: RequestOutcome.CANCELLED}
    return kinds.get(result.error or "", RequestOutcome.FAILED)


def output_line(result: StoredResult) -> bytes:
    """One line of an output or error file, with its newline."""
    error = None
    if not result.is_ok:
        text = result.error or "failed"
        code = text if text in _MESSAGES else "request_failed"
        error = {"code": code, "message": _MESSAGES.get(text, text)}
    response = None
    if result.status_code is not None:
        response = {
            "status_code": result.status_code,
            "request_id": result.request_id,
            "body": orjson.Fragment(result.body) if result.body else None,
        }
    return orjson.dumps(
        {"id": f"batch_req_{result.request_id}", "custom_id": result.custom_id, "response": response, "error": error},
        option=orjson.OPT_APPEND_NEWLINE,
    )
