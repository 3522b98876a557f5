"""What a client may notice between the router and a plain SGLang server: the only place where differences are allowed.

`docs/reference/differences.md` is made of it by `python tools/render_differences.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from conformance.answers import Answer
from conformance.cases import Case
from sglang_ext_router.http.instance_paths import INSTANCE_PATHS, UNDIVIDED_PATHS, Handling

Applies = Callable[[Case, Answer, Answer], bool]


class Difference(NamedTuple):
    """One difference: what is sent, both answers, why the router's is what it is, and how a test knows it."""

    sent: str
    plain: str
    router: str
    reason: str
    applies: Applies


def _statuses(plain: int, router: int, names: str, path: str = r".*") -> Applies:
    """Answers of these statuses to cases of such a path, whose name has this text."""

    def applies(case: Case, theirs: Answer, ours: Answer) -> bool:
        is_of_path = re.fullmatch(path, case.path) is not None and re.search(names, case.name) is not None
        return (theirs.status, ours.status) == (plain, router) and is_of_path

    return applies


def _content(path: str) -> Applies:
    """Other content of the same status, below 400."""

    def applies(case: Case, theirs: Answer, ours: Answer) -> bool:
        return theirs.status == ours.status < 400 and re.fullmatch(path, case.path) is not None

    return applies


def _is_not_served(case: Case, plain: Answer, router: Answer) -> bool:
    paths = {entry.path for entry in INSTANCE_PATHS if entry.handling is Handling.NOT_SERVED}
    paths |= {path.decode() for path in UNDIVIDED_PATHS}
    return router.status == 404 and case.path in paths and "not served here" in router.message


def _refused_by_both(case: Case, plain: Answer, router: Answer) -> bool:
    return plain.status == router.status >= 400


def _takes_other_types(case: Case, plain: Answer, router: Answer) -> bool:
    kind = dict(case.headers).get("content-type", "application/json").partition(";")[0].strip().lower()
    return (plain.status, router.status) == (400, 200) and kind != "application/json"


def _refused_before_a_stream(case: Case, plain: Answer, router: Answer) -> bool:
    ends = (b"event: error", b".failed", b'data: {"error"')
    is_error = plain.content_type == "text/event-stream" and any(end in plain.raw for end in ends)
    return (plain.status, router.status) == (200, 400) and is_error


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "a request that both refuse with the same status",
        "one of four shapes of errors, in which a traceback's paths may stand",
        "OpenAI's error object; in the instance's words, or in its own where the router refuses it, with `param`",
        "clients show other shapes as \"no body\"; /v1/messages has Anthropic's shape, /generate keeps SGLang's",
        _refused_by_both,
    ),
    Difference(
        "a path that the router does not serve, or not for a model that has prefill and decode instances only",
        "what the path answers",
        "404 with the reason",
        "see the table below",
        _is_not_served,
    ),
    Difference(
        "a `model` that is not served, on any path with a body; on /generate also one that is no string",
        "200: the name is not looked at",
        "404 `model_not_found`; 400",
        "a router has several models; `--accept-any-model` takes every name for the only one",
        lambda case, plain, router: (
            (plain.status, router.status) in {(200, 404), (200, 400)} and "model" in router.message
        ),
    ),
    Difference(
        "a body whose content type is not `application/json`, or that has none",
        "400",
        "200: it is read as JSON",
        "clients and proxies that leave the header out are served",
        _takes_other_types,
    ),
    Difference(
        "a stream of /v1/responses, /v1/messages or /generate that is refused: a number out of its range, no prompt",
        "200, and an error in the stream",
        "400",
        "it is known before the stream begins; as without `stream`",
        _refused_before_a_stream,
    ),
    Difference(
        "`prompt_logprobs`, a field of vLLM's",
        "ignored",
        "/v1/completions answers with them; 400 for a stream of it, and on the other paths but /generate",
        "a client that asks for them must not take a reply without them for one that has them",
        lambda case, plain, router: plain.status == 200 and "prompt_logprobs" in case.name,
    ),
    Difference(
        "`bootstrap_host`, `bootstrap_port`, `bootstrap_room` and their like",
        "read",
        "replaced",
        "the router pairs the instances",
        lambda case, plain, router: router.status == 200 and "bootstrap_" in case.name,
    ),
    Difference(
        "`x-data-parallel-rank`",
        "the rank; 400 where there is no such rank",
        "not passed on",
        "a rank is one of an instance, which the router chooses",
        lambda case, plain, router: "x-data-parallel-rank" in dict(case.headers),
    ),
    Difference(
        "`x-sgl-ttft-slo-ms` or `x-sgl-priority` with a value that the router cannot read",
        "not read",
        "400",
        "it is the client's mistake",
        lambda case, plain, router: router.status == 400 and any(name.startswith("x-sgl-") for name, _ in case.headers),
    ),
    Difference(
        "`n` below 1",
        "1 sequence, or 500",
        "400",
        "each sequence takes a room at both instances, so that their number must be known",
        lambda case, plain, router: _statuses(plain.status, 400, '"n": (0|-1|null)')(case, plain, router),
    ),
    Difference(
        "`logprobs` of /v1/completions below 0",
        "200, without alternatives",
        "400",
        "it is the client's mistake",
        _statuses(200, 400, '"logprobs": -1', "/v1/completions"),
    ),
    Difference(
        "`max_output_tokens` of 2",
        "200, without output: SGLang generates two tokens fewer",
        "400",
        "a decode instance would be asked for nothing",
        _statuses(200, 400, '"max_output_tokens": 2[,}]', "/v1/responses"),
    ),
    Difference(
        "/generate with `text` and `input_ids`",
        "200, by the ids, or 500",
        "400",
        "which of them the prefix cache and the length class go by would be a guess",
        lambda case, plain, router: router.status == 400 and "either text or input_ids" in router.message,
    ),
    Difference(
        "a stream with log-probabilities of the prompt and more than one new token: /generate with `logprob_start_len` "
        "of 0 or more, /v1/completions with `echo` and `logprobs`",
        "200",
        "400",
        "prefill has the prompt's, decode the stream; without `stream` the reply is made of both",
        lambda case, plain, router: (plain.status, router.status) == (200, 400) and "streamed" in router.message,
    ),
    Difference(
        "a stream of /generate with `token_ids_logprob`",
        "the log-probabilities of these ids at every new token",
        "null at the first new token",
        "SGLang does not hand them from prefill to decode; without `stream` the reply is made of both",
        lambda case, plain, router: '"stream": true' in case.name and "token_ids_logprob" in case.name,
    ),
    Difference(
        "a stream of /generate that is aborted before its first token, as for a grammar that cannot be compiled",
        "one token that was never computed, then the reason",
        "the reason",
        "decode has not begun",
        lambda case, plain, router: b'"type":"abort"' in plain.raw and b'"type":"abort"' in router.raw,
    ),
    Difference(
        '/generate with an empty batch, `"text": []`',
        "200 `[]`",
        "400",
        "there is nothing that two instances could do",
        _statuses(200, 400, '"text": \\[\\]', "/generate"),
    ),
    Difference(
        "/generate with lists of `sampling_params` or `rid` that do not fit the batch, with other names in "
        "`session_params`, or with a `stop_regex` that cannot be compiled",
        "500; a stream is cut",
        "400",
        "it is the client's mistake, and would count as a failure of each instance that it reached",
        lambda case, plain, router: (
            plain.status in {0, 500}
            and _statuses(plain.status, 400, r'"(sampling_params|rid)": \[|nope|"stop_regex', "/generate")(
                case, plain, router
            )
        ),
    ),
    Difference(
        "token ids to detokenise below 0 or beyond 32 bits",
        "500",
        "400",
        "it is the client's mistake",
        _statuses(500, 400, "tokens", "/v1/detokenize|/detokenize"),
    ),
    Difference(
        "a chat whose body is a JSON list",
        "500",
        "400",
        "it is the client's mistake",
        _statuses(500, 400, r" \[.*\]$", "/v1/chat/completions"),
    ),
    Difference(
        "/v1/models",
        "`max_model_len` is the model's context length",
        "the longest prompt that every instance of the model takes",
        "what is longer is refused by an instance",
        _content("/v1/models.*|/v1/%6dodels"),
    ),
    Difference(
        "/v1/loads",
        "the load of one server",
        "the loads of all instances, each with `url` and `role`; only as JSON",
        "one router stands for all of them; /metrics has the figures for Prometheus",
        lambda case, plain, router: case.path == "/v1/loads",
    ),
    Difference(
        "probes: /, /health, /health_generate, /ready, /ping",
        "an empty body, or a greeting",
        '`{"status": ...}`; HEAD works, too',
        "what probes look at is the status",
        lambda case, plain, router: case.path in {"/", "/health", "/health_generate", "/ready", "/ping"},
    ),
    Difference(
        "/model_info, /metrics, /openapi.json, /docs",
        "of one server",
        "of one of the instances (/model_info), of the router (the others); there is no /redoc",
        "they describe what answers",
        lambda case, plain, router: (
            case.path in {"/model_info", "/get_model_info", "/metrics", "/openapi.json", "/docs", "/redoc"}
        ),
    ),
    Difference(
        "a response that was made earlier, `/v1/responses/ID`",
        "400 without `--enable-response-store`",
        "404",
        "replies are not kept; OpenAI answers 404",
        lambda case, plain, router: case.path.startswith("/v1/responses/") and router.status == 404,
    ),
    Difference(
        "/server_info",
        "of one server",
        "of every instance, in two lists: `prefill` and `decode`; without keys",
        "one router stands for all of them",
        lambda case, plain, router: case.path in {"/server_info", "/get_server_info"},
    ),
    Difference(
        "/abort_request with `abort_all`",
        "everybody may",
        "only the administrator may: 401, or 403 without `--admin-api-key`",
        "it ends the requests of all clients",
        lambda case, plain, router: case.path == "/abort_request" and router.status in {401, 403},
    ),
    Difference(
        "/abort_request with a list of ids",
        "400",
        "200: all of them",
        "one call ends a batch",
        lambda case, plain, router: case.path == "/abort_request" and (plain.status, router.status) == (400, 200),
    ),
    Difference(
        "/flush_cache",
        "everybody may",
        "only the administrator may: 401, or 403 without `--admin-api-key`",
        "it empties the caches of all instances",
        lambda case, plain, router: case.path == "/flush_cache" and router.status in {401, 403},
    ),
)
# What ends a plain server or every instance that it reaches, and is refused by the router (400); tested elsewhere.
FATAL = (
    ("`logprob_start_len` below -1, with `return_logprob`", "its scheduler ends"),
    (
        "more than 256 `top_logprobs_num`, or `logprobs`; 128 where decode takes part",
        "its scheduler ends at some number",
    ),
    ("`custom_labels` in the body of /generate", "with `--enable-metrics` it ends at a label that it does not know"),
    (
        "a member of `session_params` of another type than SGLang's",
        "its scheduler ends at an `id` that is a list or an object",
    ),
    ("`lora_id`, `positional_embed_overrides` and other fields that are SGLang's own", "its tokenizer process ends"),
    (
        "`embed_overrides`, `query_embed_overrides` and their like",
        "it ends at embeddings of another size than its model's, or answers 500",
    ),
    (
        "a list of `top_logprobs_num`, `return_hidden_states`, `logprob_start_len` that does not fit the batch",
        "it may end",
    ),
    ("`top_k`, `max_tokens`, `n`, `min_tokens` beyond 32 bits", "sampling on a GPU ends"),
    ("`repetition_penalty` below 0.001, `logit_bias` beyond 1e30", "logits become infinite, and sampling ends"),
)


def explanation(case: Case, plain: Answer, router: Answer) -> Difference | None:
    """Return the difference that these answers show; None if it is not listed."""
    return next((known for known in DIFFERENCES if known.applies(case, plain, router)), None)
