"""Log-probabilities of the prompt: which requests ask for them, the instances they need, and how replies are made.

A prefill instance computes them; a decode instance never sees the prompt. A request for at most one new token is served
by the prefill instance only. For more tokens the replies of both instances are joined.

SGLang does not know vLLM's `prompt_logprobs` of `/v1/completions`: such a request goes to `/generate`, and the reply is
translated.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import orjson

from sglang_ext_router.request.prompt import BadRequestError

MAX_TOP_LOGPROBS = 256  # alternatives per position; the most that a trainer has asked for
MAX_ENTRIES = 8_000_000  # positions x alternatives of one request: some 200 MB of JSON
MAX_CANDIDATES = 4096  # token ids whose log-probabilities are asked for at every position
# Alternatives of the first token that prefill can send to decode; a stock engine exits on more.
MAX_TOP_LOGPROBS_WITH_DECODE = 128
# JSON has no infinity; this is vLLM's value for it.
MINUS_INFINITY = -9999.0
COMPLETIONS_DEFAULT_TOKENS = 16
GENERATE_DEFAULT_TOKENS = 128

_INPUT_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
_CANDIDATES_FIELD = "output_token_ids_logprobs"
_SAMPLING_FIELDS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "presence_penalty"),
            *("frequency_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
            *("regex", "ebnf", "json_schema", "logit_bias", "custom_params"),
        )
    },
}


class CompletionForm(NamedTuple):
    """Describes how to make a completion from the reply of `/generate` with its log-probabilities."""

    model: str
    top_logprobs: int  # alternatives per prompt position
    output_logprobs: int | None  # alternatives per new token; None: no log-probabilities of these
    candidates: list[list[int]] | None  # per position, or one list for all
    prompts: list[list[int]] | None = None  # token ids as given; None: the prompts are texts


class ScorePlan(NamedTuple):
    """The needs of a request that asks for log-probabilities. `body`, if any, goes to `/generate` in its place."""

    is_prefill_only: bool
    is_joined: bool  # the client's reply is made from those of the instances
    body: dict[str, Any] | None
    form: CompletionForm | None
    entries_per_token: int  # log-probabilities in the reply for every token of the prompt

    def is_small(self, prompt_tokens: int) -> bool:
        """Return whether a reply about this many tokens, in all sequences, is not too large."""
        return prompt_tokens * self.entries_per_token <= MAX_ENTRIES

    def check_size(self, prompt_tokens: int) -> None:
        """Raise BadRequestError if the reply would be too large; `prompt_tokens` is the sum over all sequences."""
        if not self.is_small(prompt_tokens):
            raise BadRequestError(
                f"{prompt_tokens} tokens with {self.entries_per_token} log-probabilities each are more than the "
                f"{MAX_ENTRIES} that one request may ask for; send fewer sequences at a time"
            )


# A request without any of these fields asks for no log-probabilities.
SCORE_FIELDS = frozenset({"return_logprob", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_logprob_token_ids"})
NO_SCORES = ScorePlan(False, False, None, None, 0)


def plan_scores(path: bytes, body: dict[str, Any]) -> ScorePlan:
    """Return the needs of this request. Raise BadRequestError if it cannot be served."""
    if path == b"/generate":
        return _plan_generate(body) if body.get("return_logprob") else NO_SCORES
    if body.get("prompt_logprobs") is not None or body.get("prompt_logprob_token_ids") is not None:
        if path != b"/v1/completions":
            raise BadRequestError("prompt_logprobs is served on /v1/completions and /generate only", "prompt_logprobs")
        return _plan_completion(body)
    if path == b"/v1/completions":
        top = body.get("logprobs")
        if type(top) is int and top > 0:
            if body.get("echo") is True:
                return _plan_echo(body, top)
            _check_top(top, "logprobs", MAX_TOP_LOGPROBS_WITH_DECODE)
        return NO_SCORES
    top = body.get("top_logprobs")
    if type(top) is int and path != b"/v1/messages":  # which has no such field
        _check_top(top, "top_logprobs", MAX_TOP_LOGPROBS_WITH_DECODE)
    return NO_SCORES


def _plan_generate(body: dict[str, Any]) -> ScorePlan:
    starts = _integers(body.get("logprob_start_len"))
    if any(start < -1 for start in starts):  # an instance exits on it
        raise BadRequestError("logprob_start_len must be at least -1", "logprob_start_len")
    tops = _integers(body.get("top_logprobs_num"))
    top = max(tops, default=0)
    _check_top(top, "top_logprobs_num", MAX_TOP_LOGPROBS)
    candidates = body.get("token_ids_logprob")
    candidate_count = 0
    if type(candidates) is list:
        nested = [ids for ids in candidates if type(ids) is list]
        candidate_count = max(map(len, nested), default=len(candidates))
    if candidate_count > MAX_CANDIDATES:
        raise BadRequestError(f"token_ids_logprob has more than {MAX_CANDIDATES} ids", "token_ids_logprob")
    entries = 1 + candidate_count + top
    if _new_tokens(body.get("sampling_params")) <= 1:
        return ScorePlan(True, False, None, None, entries)
    _check_top(top, "top_logprobs_num", MAX_TOP_LOGPROBS_WITH_DECODE)
    if body.get("stream") is not True:
        return ScorePlan(False, True, None, None, entries)
    if any(start >= 0 for start in starts):
        raise BadRequestError(
            "logprob_start_len of at least 0 in a streamed reply needs max_new_tokens 0 or 1", "logprob_start_len"
        )
    return NO_SCORES


def _integers(value: Any) -> list[int]:
    """Return the integers of a field that holds one value or a list of values."""
    return [item for item in (value if type(value) is list else [value]) if type(item) is int]


def _new_tokens(parameters: Any) -> int:
    """Return the largest number of new tokens that a sequence may get; several samples count as more than one token."""
    largest = 0
    for item in parameters if type(parameters) is list and parameters else [parameters]:
        if type(item) is not dict:
            return GENERATE_DEFAULT_TOKENS
        wanted, samples = item.get("max_new_tokens"), item.get("n")
        if type(wanted) is not int or not (samples is None or samples == 1):
            return GENERATE_DEFAULT_TOKENS
        largest = max(largest, wanted)
    return largest


def _plan_echo(body: dict[str, Any], top: int) -> ScorePlan:
    """Plan a prompt's log-probabilities in the form of OpenAI's old completions: `echo` with `logprobs`."""
    if not _is_single(body):
        raise BadRequestError("echo with logprobs is served with n 1 only", "echo")
    if _completion_tokens(body) <= 1:
        _check_top(top, "logprobs", MAX_TOP_LOGPROBS)
        return ScorePlan(True, False, None, None, 1 + top)
    if body.get("stream") is True:
        raise BadRequestError("echo with logprobs is streamed with max_tokens 0 or 1 only", "echo")
    _check_top(top, "logprobs", MAX_TOP_LOGPROBS_WITH_DECODE)
    return ScorePlan(False, True, None, None, 1 + top)


def _plan_completion(body: dict[str, Any]) -> ScorePlan:
    top = body.get("prompt_logprobs")
    if top is None:
        top = 0
    if type(top) is not int:
        raise BadRequestError("prompt_logprobs must be an integer", "prompt_logprobs")
    if top < 0:
        raise BadRequestError("prompt_logprobs must be at least 0", "prompt_logprobs")
    new_tokens = _completion_tokens(body)
    is_prefill_only = new_tokens <= 1
    _check_top(top, "prompt_logprobs", MAX_TOP_LOGPROBS if is_prefill_only else MAX_TOP_LOGPROBS_WITH_DECODE)
    if body.get("stream") is True:
        raise BadRequestError("prompt_logprobs cannot be streamed", "stream")
    if body.get("echo") is True:
        raise BadRequestError("give either echo with logprobs or prompt_logprobs", "echo")
    if not _is_single(body):
        raise BadRequestError("prompt_logprobs is served with n 1 only", "n")
    output = body.get("logprobs")
    if output is not None and (type(output) is not int or output < 0):
        raise BadRequestError("logprobs must be a non-negative integer", "logprobs")
    if output is not None:
        _check_top(output, "logprobs", MAX_TOP_LOGPROBS_WITH_DECODE)
    prompt = body.get("prompt")
    ids = type(prompt) is list and bool(prompt) and type(prompt[0]) is not str
    candidates = _read_candidates(body.get("prompt_logprob_token_ids"), prompt)
    asked: dict[str, Any] = {
        "input_ids" if ids else "text": prompt,
        "sampling_params": {
            name: body[given] for given, name in _SAMPLING_FIELDS.items() if body.get(given) is not None
        },
        "return_logprob": True,
        "logprob_start_len": 0,
        # The first alternative shows whether the actual token has rank 1.
        "top_logprobs_num": max(1, top, output or 0),
        "return_text_in_logprobs": output is not None or body.get("return_text_in_logprobs") is True,
    }
    asked["sampling_params"]["max_new_tokens"] = new_tokens
    if candidates is not None:
        asked["token_ids_logprob"] = sorted({token for position in candidates for token in position})
    for name in ("lora_path", "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
        if name in body:
            asked[name] = body[name]
    prompts: list[list[int]] | None = None
    if type(prompt) is list and ids:
        prompts = prompt if type(prompt[0]) is list else [prompt]
    form = CompletionForm(str(body.get("model") or ""), top, output, candidates, prompts)
    entries = asked["top_logprobs_num"] + len(asked.get("token_ids_logprob", ())) + 1
    return ScorePlan(is_prefill_only, True, asked, form, entries)


def _completion_tokens(body: dict[str, Any]) -> int:
    wanted = body.get("max_tokens")
    if wanted is None:
        return COMPLETIONS_DEFAULT_TOKENS
    if type(wanted) is not int or wanted < 0:
        raise BadRequestError("max_tokens must be a non-negative integer", "max_tokens")
    return wanted


def _is_single(body: dict[str, Any]) -> bool:
    return body.get("n") in (None, 1) and body.get("best_of") in (None, 1)


def _check_top(top: int, name: str, limit: int) -> None:
    if top > limit:
        reason = "" if limit == MAX_TOP_LOGPROBS else " when tokens are generated beyond the first"
        raise BadRequestError(f"{name} is {top}; at most {limit} are served{reason}", name)


def _read_candidates(given: Any, prompt: Any) -> list[list[int]] | None:
    """Return candidate ids: one list for all positions, or one for each position of a single prompt."""
    name = "prompt_logprob_token_ids"
    if given is None:
        return None
    if type(given) is not list or not given:
        raise BadRequestError(f"{name} must be a non-empty list", name)
    lists: list[list[int]] = given if type(given[0]) is list else [given]
    if not all(type(item) is list and all(type(token) is int and token >= 0 for token in item) for item in lists):
        raise BadRequestError(f"{name} must hold token ids, or a list of them for each position", name)
    if len({token for item in lists for token in item}) > MAX_CANDIDATES:
        raise BadRequestError(f"{name} has more than {MAX_CANDIDATES} different ids", name)
    if type(given[0]) is list:
        is_one_prompt = type(prompt) is list and bool(prompt) and type(prompt[0]) is int
        if not is_one_prompt or len(lists) != len(prompt):
            raise BadRequestError(f"{name} as a list for each position needs one prompt of as many token ids", name)
    return lists


# -- replies ------------------------------------------------------------------------------------------------


def build_reply(form: CompletionForm | None, prefill: bytes, decode: bytes | None) -> bytes:
    """Make the client's reply from those of the instances; `decode` is None if only prefill has served.

    Raise ValueError, KeyError, TypeError, IndexError or AttributeError for malformed replies.
    """
    body = prefill if decode is None else join_logprobs(prefill, decode)
    return body if form is None else completion_reply(form, body)


def join_logprobs(prefill: bytes, decode: bytes) -> bytes:
    """Return the decode reply with the prefill reply's prompt log-probabilities. Raise ValueError if they do not match.

    Under prefill-decode disaggregation a decode instance reports an empty list for the prompt's tokens.
    """
    ours, theirs = orjson.loads(decode), orjson.loads(prefill)
    if isinstance(ours, dict) and "choices" in ours:
        return _join_completions(ours, theirs)
    outputs: list[Any] = ours if isinstance(ours, list) else [ours]
    prompts: list[Any] = theirs if isinstance(theirs, list) else [theirs]
    if len(outputs) != len(prompts):
        raise ValueError("prefill and decode answered for different numbers of sequences")
    for output, prompt in zip(outputs, prompts, strict=True):
        for field in _INPUT_FIELDS:
            found = prompt["meta_info"].get(field)
            if found:
                output["meta_info"][field] = found + (output["meta_info"].get(field) or [])
        first = prompt["meta_info"].get(_CANDIDATES_FIELD)
        generated = output["meta_info"].get(_CANDIDATES_FIELD)
        if first and generated and generated[0] is None:  # decode has the first token from prefill, without these
            generated[0] = first[0]
    return orjson.dumps(ours)


def _join_completions(ours: dict[str, Any], theirs: dict[str, Any]) -> bytes:
    """Return the decode completion with the prompt's log-probabilities from prefill before its own.

    Prefill's list ends with the first new token, which decode's list begins with.
    """
    for output, prompt in zip(ours["choices"], theirs["choices"], strict=True):
        generated, scored = output["logprobs"], prompt["logprobs"]
        if generated["tokens"][:1] != scored["tokens"][-1:]:
            raise ValueError("prefill and decode begin with different tokens")
        for field, values in scored.items():
            generated[field] = [*(values or ())[:-1], *(generated.get(field) or ())]
    return orjson.dumps(ours)


def completion_reply(form: CompletionForm, raw: bytes) -> bytes:
    """Make vLLM's completion with `prompt_logprobs` from a reply of `/generate`."""
    answered = orjson.loads(raw)
    outputs: list[Any] = answered if isinstance(answered, list) else [answered]
    choices = []
    prompt_tokens = new_tokens = cached_tokens = 0
    for index, output in enumerate(outputs):
        info = output["meta_info"]
        prompt_tokens += info["prompt_tokens"]
        new_tokens += info["completion_tokens"]
        cached_tokens += info.get("cached_tokens") or 0
        reason = info["finish_reason"]
        choices.append(
            {
                "index": index,
                "text": output["text"],
                "logprobs": None if form.output_logprobs is None else _output_logprobs(info, form.output_logprobs),
                "finish_reason": None if reason is None else reason["type"],
                "matched_stop": None if reason is None else reason.get("matched"),
                "prompt_logprobs": _prompt_logprobs(info, form, None if form.prompts is None else form.prompts[index]),
            }
        )
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    first = outputs[0]["meta_info"]["id"]
    return orjson.dumps(
        {
            "id": first,
            "object": "text_completion",
            "created": int(time.time()),
            "model": form.model,
            "choices": choices,
            "usage": usage,
        }
    )


def _prompt_logprobs(info: dict[str, Any], form: CompletionForm, ids: list[int] | None) -> list[dict[str, Any] | None]:
    """Return one entry per position: the actual token, then the most likely tokens by rank, then the candidates.

    The rank of an actual token that is not among the alternatives is their number plus 1. `ids` are the prompt's, if
    known: SGLang reports id 0 for the last token of a vocabulary, with the log-probability of the right token.
    """
    actual: list[Any] = info["input_token_logprobs"]
    tops: list[Any] = info["input_top_logprobs"]
    wanted: list[Any] | None = info.get("input_token_ids_logprobs") if form.candidates is not None else None
    positions: list[dict[str, Any] | None] = []
    for position, (value, token, text) in enumerate(actual):
        if position == 0:
            positions.append(None)  # nothing comes before the first token
            continue
        if ids is not None:
            token = ids[position]
        top: list[Any] = tops[position]
        entries: dict[str, Any] = {str(token): None}
        for rank, (top_value, top_token, top_text) in enumerate(top[: form.top_logprobs], start=1):
            entries[str(top_token)] = _entry(top_value, rank, top_text)
        if entries[str(token)] is None:
            rank = next((i for i, item in enumerate(top, start=1) if item[1] == token), len(top) + 1)
            entries[str(token)] = _entry(value, rank, text)
        if wanted is not None and form.candidates is not None:
            lists = form.candidates
            chosen = set(lists[position] if len(lists) > 1 else lists[0])
            for other_value, other, other_text in wanted[position]:
                if other in chosen and str(other) not in entries:
                    entries[str(other)] = _entry(other_value, None, other_text)
        positions.append(entries)
    return positions


def _entry(logprob: float | None, rank: int | None, text: str | None) -> dict[str, Any]:
    return {"logprob": MINUS_INFINITY if logprob is None else logprob, "rank": rank, "decoded_token": text}


def _output_logprobs(info: dict[str, Any], top: int) -> dict[str, Any]:
    """Return the log-probabilities of the new tokens in the shape of OpenAI's completions."""
    actual: list[Any] = info["output_token_logprobs"]
    tops: list[Any] = info.get("output_top_logprobs") or []
    return {
        "tokens": [text for _, _, text in actual],
        "token_logprobs": [value for value, _, _ in actual],
        "top_logprobs": [{text: value for value, _, text in item[:top]} for item in tops[: len(actual)]],
        "text_offset": [-1] * len(actual),
    }
