"""A request as it was read: what the client asks for, in its headers and its body, and what the instances get of it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_ext.token_marks import MARKS_HEADER
from sglang_ext.types import PRIORITIES
from sglang_ext_router.decide.session_hints import NO_SESSION, session_key
from sglang_ext_router.http.instance_paths import UNDIVIDED_PATHS
from sglang_ext_router.http.replies import MODEL_NOT_FOUND, shown_names, unknown_model
from sglang_ext_router.http.request_parser import Request
from sglang_ext_router.instances.online_load import OFFLINE_PRIORITY
from sglang_ext_router.observe.trace_spans import TraceContext
from sglang_ext_router.request.migration import Delivered, may_migrate
from sglang_ext_router.request.prompt import BadRequestError, Prompt, dump, list_size, measure, parse_body
from sglang_ext_router.request.request_body import (
    CleanBody,
    HintField,
    RequestHints,
    body_end,
    clean_body,
    clean_response_body,
    hint_field,
)
from sglang_ext_router.request.request_fields import read_fields
from sglang_ext_router.request.request_ids import room_id
from sglang_ext_router.request.scores import NO_SCORES, SCORE_FIELDS, ScorePlan, plan_scores

if TYPE_CHECKING:
    from sglang_ext_router.instances.registry import ModelPools, WorkerRegistry

SLO_HEADER = b"x-sgl-ttft-slo-ms"
PRIORITY_HEADER = b"x-sgl-priority"
SESSION_HEADER = b"x-session-id"
# Fields that name a conversation, or its user; the first that is given counts. (Anthropic's is in `metadata`.)
SESSION_FIELDS = ("prompt_cache_key", "safety_identifier", "user")
MAX_REQUEST_ID_BYTES = 256
MARKS_LINE = f"{MARKS_HEADER}: 1\r\n".encode()
COPIED_BYTES = 16384  # beyond it a system call with several parts costs less than one more copy
# What every instance of SGLang may read, or a tracer behind it.
FORWARDED = {
    *(b"traceparent", b"tracestate", b"baggage", SLO_HEADER, b"x-sgl-tps-slo", b"x-smg-routing-key"),
    *(b"x-sglext-return-input-ids", b"x-sglext-return-output-ids", b"x-sglext-ids-framed"),
}


class ClientHeaders(NamedTuple):
    """Header lines for the instances, the client's own request id (may be empty), its deadline and priority."""

    forwarded: bytes
    request_id: bytes
    ttft_slo_s: float | None
    priority: str | None  # one of PRIORITIES
    trace: TraceContext | None = None  # of one whose spans are wanted
    session: bytes = b""  # the client's name of its conversation


def read_headers(
    headers: Sequence[tuple[bytes, bytes]], authorization: bytes, relays_own: bool, forwarded_names: Set[bytes]
) -> ClientHeaders:
    """Read headers with lower-case names. `authorization` replaces the client's, which goes on only if `relays_own`.

    Of the others instances get those in `forwarded_names`.

    BadRequestError for a deadline or a priority that is none.
    """
    forwarded = authorization
    request_id = b""
    slo_s: float | None = None
    priority: str | None = None
    session = b""
    for name, value in headers:
        if name == SESSION_HEADER:
            session = value
        if name in forwarded_names:
            forwarded += b"%b: %b\r\n" % (name, value)
            if name == SLO_HEADER:
                slo_s = _slo_seconds(value)
        elif name == b"authorization":
            if relays_own:
                forwarded += b"authorization: %b\r\n" % value
        elif name == b"x-request-id" and len(value) <= MAX_REQUEST_ID_BYTES:
            request_id = value
        elif name == PRIORITY_HEADER:
            priority = _priority(value)
    return ClientHeaders(forwarded, request_id, slo_s, priority, session=session)


class ReadBody(NamedTuple):
    """The content of a body, and the body for the instances; it can be passed between processes."""

    model: str | None  # as the client names it; None or empty: it does not
    prompt: Prompt
    scores: ScorePlan
    clean: CleanBody
    target: bytes | None  # where the instances are asked, if not where the client asks
    hint_field: HintField | None
    may_migrate: bool = False  # the stream that it asks for can go on on other instances
    session: str = ""  # the client's name of its conversation, or of its user


def read_body(path: bytes, raw: bytes | bytearray, has_hints: bool) -> ReadBody:
    """Read a request's body; `has_hints`: a deadline or a priority will be put into it.

    BadRequestError where the client asks for something that cannot be served.
    """
    body = parse_body(raw)
    read_fields(path, body)
    model = body.get("model")
    if model is not None and type(model) is not str:
        raise BadRequestError("model must be a string", "model")
    prompt = measure(path, body)
    target: bytes | None = None
    if path in UNDIVIDED_PATHS:  # where a client's own ids name nothing that is in the reply
        clean = clean_body(raw, body, has_id=False)._replace(list_size=list_size(body))
        return ReadBody(model, prompt, NO_SCORES, clean, target, None)
    scores: ScorePlan = NO_SCORES if SCORE_FIELDS.isdisjoint(body) else plan_scores(path, body)
    asked = scores.body
    if asked is not None:  # SGLang is asked in its own words
        body, raw, path = asked, dump(asked), b"/generate"
        target = path
        scores = scores._replace(body=None)
    session = named_session(path, body)
    if path == b"/v1/responses":  # which has no place for hints
        return ReadBody(model, prompt, scores, clean_response_body(raw, body), target, None, session=session)
    if path == b"/v1/messages":  # which has no place for hints either, nor for an id
        return ReadBody(model, prompt, scores, clean_body(raw, body, has_id=False), target, None, session=session)
    clean = clean_body(raw, body)
    hints = hint_field(path, body, clean) if has_hints else None
    return ReadBody(model, prompt, scores, clean, target, hints, may_migrate(path, body, prompt), session)


def named_session(path: bytes, body: dict[str, Any]) -> str:
    """Return the name of the conversation, or else of its user, that a body gives; empty where it gives none."""
    if path == b"/v1/messages":
        metadata = body.get("metadata")
        given = metadata.get("user_id") if type(metadata) is dict else None
        return given if type(given) is str else ""
    for name in SESSION_FIELDS:
        given = body.get(name)
        if type(given) is str and given:
            return given
    return ""


class PreparedRequest:
    """One request, read and checked; nothing of it changes but what a tokenizer finds out of its prompt."""

    __slots__ = (
        "_clean",
        "_continued",
        "_hints",
        "headers",
        "is_online",
        "is_undivided",
        "may_migrate",
        "model",
        "output_tokens",
        "path",
        "prompt",
        "prompt_tokens",
        "scores",
        "session",
        "started_s",
        "target",
    )

    def __init__(
        self, request: Request, headers: ClientHeaders, body: ReadBody, model: ModelPools, started_s: float
    ) -> None:
        self.headers = headers
        self.model = model
        self.is_online = headers.priority != OFFLINE_PRIORITY
        self.path = request.path
        self.is_undivided = request.path in UNDIVIDED_PATHS  # only an undivided instance can serve it
        own_target = request.path + b"?" + request.query if request.query else request.path
        self.target = body.target or own_target
        self.started_s = started_s
        self.prompt = body.prompt
        self.prompt_tokens = 0  # of the longest single prompt; known once the request is offered for admission
        self.scores = body.scores
        self.session = NO_SESSION
        if (headers.session or body.session) and not self.is_undivided:
            self.session = session_key(headers.session or body.session)
        self.may_migrate = body.may_migrate
        self.output_tokens = 0  # that other instances have generated
        self._continued: RequestHints | None = None  # for instances that take the output so far
        self._clean = body.clean
        self._hints: RequestHints | None = None  # for requests with a deadline or a priority
        if body.hint_field is not None:
            self._hints = RequestHints(body.hint_field, headers.ttft_slo_s, headers.priority)

    @property
    def raw_body(self) -> bytes | bytearray:
        """The body as JSON, without the fields that the router sets."""
        return self._clean.raw

    def made_id(self, room: int) -> bytes:
        """The request id made of a room; that of a response is the response's id, too."""
        made = room_id(room)
        return made if self._clean.id_field == b"rid" else b"resp_" + made

    @property
    def own_ids(self) -> str | list[str] | None:
        """The client's own ids of its sequences, under which it finds its reply."""
        return self._clean.request_ids

    def continue_behind(self, delivered: Delivered) -> bool:
        """Have other instances go on behind what the client has; return whether they can.

        Without ids of the tokens they begin again, and generate the same text only where the request is greedy.
        """
        body = parse_body(self._clean.raw)
        if not delivered.ids:
            parameters = body.get("sampling_params", body) if self.path == b"/generate" else body
            return not delivered.has_text or parameters.get("temperature") == 0
        headers = self.headers
        field = hint_field(self.path, body, self._clean)
        self._continued = RequestHints(field, headers.ttft_slo_s, headers.priority, delivered.ids)
        self.prompt_tokens += len(delivered.ids) - self.output_tokens
        self.output_tokens = len(delivered.ids)
        return True

    def message(
        self, bootstrap_json: bytes, room: int, made_id: bytes, now_s: float, takes_output: bool = False
    ) -> tuple[bytes, memoryview | None, bytes]:
        """Return what follows the request head of each instance: the last headers, then the body.

        `takes_output`: the instances take the output so far, if there is any.

        The middle one of the three parts is most of a large body, which is not copied; of a small one it is None.
        """
        hints, headers = self._continued if takes_output and self._continued else self._hints, self.headers
        clean = self._clean
        own = b""
        if hints is not None:
            clean, own = hints.clean, hints.member(now_s - self.started_s)
        further = b""
        if self.may_migrate:
            further = MARKS_LINE
        elif self.path == b"/v1/messages":
            further = b"x-override-rid: %b\r\n" % made_id
        end = clean.raw.rindex(b"}")
        tail = body_end(clean, own, bootstrap_json, room, made_id)
        head = b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            headers.forwarded,
            further,
            headers.request_id or made_id,
            end + len(tail),
        )
        if end <= COPIED_BYTES:
            return b"".join((head, clean.raw[:end], tail)), None, b""
        return head, memoryview(clean.raw)[:end], tail


class RefusedError(Exception):
    """A request is answered by the router: `status` over HTTP, `reason` in the metrics, the rest in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, reason: str = "bad_request", param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.code = code


def find_model(registry: WorkerRegistry, body: ReadBody) -> ModelPools:
    """Return the instances of the model that a body names, or of the only one. Raises RefusedError."""
    name = body.model or ""
    model = registry.find_model(body.model)
    if model is None:
        names = registry.served_names()
        if not names or (name and not registry.is_complete):
            raise RefusedError(503, "no instance that is ready serves this model yet; try again later", "no_instance")
        if name:
            raise RefusedError(404, unknown_model(name, names), "model_not_found", "model", MODEL_NOT_FOUND)
        raise RefusedError(400, f"name a model in `model`: {shown_names(names)}", "no_model", "model")
    if body.target is not None and name and registry.names_adapter(name):
        # SGLang's own way of scoring knows no such names.
        message = f"log-probabilities of the prompt by an adapter: name it in lora_path, not in model {name!r}"
        raise RefusedError(400, message, param="model")
    return model


def check_request(registry: WorkerRegistry, request: PreparedRequest, max_sequences: int) -> None:
    """Refuse a path or text that the model's instances cannot give, and more than `max_sequences` sequences.

    Only undivided instances serve some paths, and an instance of a model that embeds ends when it is asked to generate.
    Raises RefusedError.
    """
    model = request.model
    shown = f"the model {model.name!r}" if model.name else "the model"
    if request.is_undivided:
        if not registry.may_be_undivided(model):
            message = f"it needs an undivided instance (--plain URL), and {shown} has prefill and decode instances only"
            raise RefusedError(404, f"{request.path.decode()} of SGLang is not served here: {message}")
        return  # its inputs take no rooms
    if not model.generates:
        message = f"{shown} does not generate: ask /v1/embeddings, /v1/rerank, /v1/score or /v1/classify"
        raise RefusedError(400, message, param="model")
    sequences = request.prompt.sequence_count
    if sequences > max_sequences:
        field = "n" if request.prompt.samples_per_prompt > max_sequences else None
        message = (
            f"the request makes {sequences} sequences (prompts × n), more than the {max_sequences} that are allowed"
        )
        raise RefusedError(400, message, "too_many_sequences", field)


def _slo_seconds(value: bytes) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not 0 < milliseconds < float("inf"):
        raise BadRequestError("x-sgl-ttft-slo-ms must be a positive number of milliseconds", "x-sgl-ttft-slo-ms")
    return milliseconds / 1000


def _priority(value: bytes) -> str:
    given = value.decode("latin-1").lower()
    if given not in PRIORITIES:
        raise BadRequestError(f"x-sgl-priority must be one of {', '.join(PRIORITIES)}", "x-sgl-priority")
    return given
