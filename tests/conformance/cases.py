"""Requests that are sent to a router and to a plain SGLang server, and what they are about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_ext_router.request.request_fields import BODIES

MODEL = "m"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
GENERATE = "/generate"
USER = [{"role": "user", "content": "What is a parser?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
# A body for each path that generates, short and greedy.
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": USER, "max_tokens": 3, "top_k": 1},
    COMPLETIONS: {"model": MODEL, "prompt": "def parse(", "max_tokens": 3, "top_k": 1},
    RESPONSES: {"model": MODEL, "input": "What is a parser?", "max_output_tokens": 6, "top_k": 1},
    MESSAGES: {"model": MODEL, "messages": USER, "max_tokens": 3, "top_k": 1},
    GENERATE: {"text": "def parse(", "sampling_params": {"max_new_tokens": 3, "top_k": 1}},
}
ABSENT: Any = object()


class Case(NamedTuple):
    """One request; `body` is JSON to write, or bytes to send as they are."""

    name: str
    method: str
    target: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def data(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


def changed(path: str, **fields: Any) -> dict[str, Any]:
    """The path's base body with these fields; ABSENT removes one."""
    return {name: value for name, value in {**BASE[path], **fields}.items() if value is not ABSENT}


def parameters(**fields: Any) -> dict[str, Any]:
    """A body of /generate with these sampling parameters."""
    return {**BASE[GENERATE], "sampling_params": {**BASE[GENERATE]["sampling_params"], **fields}}


def case(path: str, body: Any, method: str = "POST", **headers: str) -> Case:
    shown = body if isinstance(body, bytes) else json.dumps(body)
    shown = shown.decode("latin-1") if isinstance(shown, bytes) else shown
    extra = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Case(f"{method} {path} {shown[:160]} {dict(extra) or ''}".strip(), method, path, body, extra)


SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
FIELD_VALUES = (1.0, "1", True, None, 0, [1], "x")


def greedily(field: str, value: Any) -> dict[str, Any]:
    """The field, and what keeps the answer the same at every sending."""
    return {field: value, "temperature": 0} if field == "top_k" else {field: value}


def field_cases() -> Iterator[Case]:
    """Every field that the router declares, with values of several types."""
    for path in BASE:
        for field, schema in BODIES[path]["properties"].items():
            if field in {"model", "prompt_logprobs", "sampling_params"} or "type" not in schema:
                continue
            for value in FIELD_VALUES:
                yield case(path, changed(path, **greedily(field, value)))
    for field in BODIES[GENERATE]["properties"]["sampling_params"]["properties"]:
        for value in FIELD_VALUES:
            yield case(GENERATE, parameters(**greedily(field, value)))


def range_cases() -> Iterator[Case]:
    """Values at and beyond the ends of ranges."""
    ranges: dict[str, tuple[Any, ...]] = {
        "temperature": (-0.1, 1e-9, 2, 100.0, 1e308),
        "top_p": (-1, 0, 1e-9, 1, 1.01),
        "top_k": (-2, -1, 1, 2048, 2049),
        "min_p": (-0.1, 1, 1.1),
        "repetition_penalty": (-1, 0, 0.5, 2, 2.1),
        "frequency_penalty": (-2, -2.1, 2, 2.1),
        "presence_penalty": (-2, -2.1, 2, 2.1),
        "seed": (-1, 2**63 - 1, 2**63, -(2**63)),
        "max_tokens": (-1, 1, 2047, 2048, 2**31 - 1),
        "min_tokens": (-1, 2, 4),
        "n": (2, 3),
        "stop": ("", "parse", ["a", "b", "c"], [], ["x"] * 65),
        "logit_bias": ({}, {"5": 100}, {"5": -100}, {"-1": 1}, {"2047": 1}, {"2048": 1}, {"x": 1}, {"5": None}, []),
        "logprobs": (-1, 0, 1, 5, 20),
        "user": ("u", ""),
        "stop_token_ids": ([5], [], [2048], [-1], 5, ["5"]),
        "ignore_eos": (True, False),
        "regex": ("[a-z]+", "("),
        "unknown_field": (1, {"a": [None]}),
    }
    for field, values in ranges.items():
        for value in values:
            yield case(COMPLETIONS, changed(COMPLETIONS, **greedily(field, value)))
            if field != "logprobs":
                yield case(CHAT, changed(CHAT, **greedily(field, value)))
    for field, values in ranges.items():
        theirs = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}.get(
            field, field
        )
        if field not in {"logprobs", "user", "n"}:
            for value in values:
                yield case(GENERATE, parameters(**greedily(theirs, value)))


def chat_cases() -> Iterator[Case]:
    message_lists: tuple[Any, ...] = (
        *([], None, "hi", [None], [{}], [{"role": "user"}], [{"content": "a"}], [{"role": "robot", "content": "a"}]),
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "what", "text": "a"}]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": "a", "name": "n", "extra": 1}],
        [{"role": "system", "content": "s"}, *USER],
        [{"role": "developer", "content": "s"}, *USER],
        [*USER, {"role": "assistant", "content": "It is"}],
        [*USER, {"role": "assistant", "content": None}],
        [*USER, {"role": "assistant"}, *USER],
        [{"role": "assistant", "content": "a"}],
        [{"role": "system", "content": "only"}],
        [{"role": "USER", "content": "a"}],
        [{"role": "user", "content": "Grüße, 世界 👋 \u2028 \u0000 \ud83d\ude00"}],
        [{"role": "user", "content": "x " * 3000}],
        [
            *USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "parser"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a program"},
        ],
    )
    for messages in message_lists:
        yield case(CHAT, changed(CHAT, messages=messages))
    further: tuple[dict[str, Any], ...] = (
        {"messages": ABSENT},
        {"max_tokens": ABSENT, "max_completion_tokens": 3},
        {"max_completion_tokens": 2},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "n": 2},
        {"stream": True, "logprobs": True, "top_logprobs": 2},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"stream_options": {}},
        {"stream_options": 5},
        {"n": 2},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": False, "top_logprobs": 3},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": True, "top_logprobs": "2"},
        {"logprobs": True, "top_logprobs": 2.0},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "auto", "stream": True},
        {"tools": []},
        {"tools": "x"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"tool_choice": "maybe"},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}, "max_tokens": 5},
        {"response_format": {"type": "what"}},
        {"response_format": "json"},
        {"model": ABSENT},
        {"model": ""},
        {"model": None},
        {"model": 5},
        {"model": "m:adapter"},
        {"model": "nobody's"},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "x"},
        {"reasoning_effort": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": []},
        {"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": "It is"}]},
        {"input_ids": [5, 6, 7]},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False},
        {"priority": 5},
        {"custom_params": {"a": 1}},
        {"custom_params": [1]},
        {"extra_key": "k", "cache_salt": "s"},
        {"lora_path": None},
        {"return_hidden_states": False},
        {"stop": ["\n"], "stream": True},
        {"logit_bias": {"100": 100}, "stream": True},
        {"separate_reasoning": "no", "stream_reasoning": 0},
        *({"stream": True, "stream_options": {"include_usage": usage}} for usage in (None, "yes", 0, 5)),
        *({"echo": 5}, {"prompt": 5}, {"suffix": []}, {"stop_sequences": 5}, {"max_output_tokens": "x"}),
        *({"prompt_logprobs": 1}, {"bootstrap_port": "x"}, {"bootstrap_room": 7}, {"bootstrap_host": "x"}),
        *({"logit_bias": {"5": "1"}}, {"stop": [""]}, {"stop_regex": "("}, {"functions": []}, {"seed": 1.5}),
    )
    for fields in further:
        yield case(CHAT, changed(CHAT, **fields))


def completion_cases() -> Iterator[Case]:
    prompts: tuple[Any, ...] = (
        *(
            "",
            " ",
            "a\u0000b",
            "Grüße, 世界 👋",
            ["def parse(", "class A"],
            ["a"],
            [""],
            ["a", ""],
            [],
            [[]],
            [None],
            None,
            5,
        ),
        *(
            [5, 6, 7],
            [[5, 6], [7]],
            [5.0, 6],
            [5, 6.0],
            ["5", 6],
            ["5", "6"],
            [True],
            [-1],
            [2047],
            [2048],
            [2**31],
            [2**63],
        ),
        *(
            [[5], "a"],
            ["a", 5],
            [[5, "a"]],
            [[5], 6],
            {"text": "a"},
            True,
            "x " * 3000,
            [5] * 2047,
            [5] * 2048,
            [5] * 3000,
        ),
    )
    for prompt in prompts:
        yield case(COMPLETIONS, changed(COMPLETIONS, prompt=prompt))
    further: tuple[dict[str, Any], ...] = (
        {"prompt": ABSENT},
        {"max_tokens": ABSENT},
        {"echo": True},
        {"echo": True, "stream": True},
        {"echo": True, "n": 2},
        {"echo": True, "max_tokens": 1},
        {"echo": True, "logprobs": 2, "max_tokens": 1},
        {"echo": True, "logprobs": 2.0, "max_tokens": 1},
        {"echo": True, "logprobs": "2", "max_tokens": 1},
        {"echo": True, "logprobs": True, "max_tokens": 1},
        {"echo": True, "logprobs": 2},
        {"echo": "true", "logprobs": 1},
        {"echo": True, "logprobs": 0, "max_tokens": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 1, "stream": True},
        {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": ["a b", "c d e"]},
        {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt": [5, 6, 7]},
        {"logprobs": 2},
        {"logprobs": 2, "stream": True},
        {"echo": True, "logprobs": 1, "stream": True},
        *({"prompt_logprobs": 1}, {"prompt_logprobs": 1, "stream": True}),
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "n": 2},
        {"stream": True, "prompt": ["a", "b"]},
        {"n": 2, "prompt": ["a", "b"]},
        {"suffix": "x"},
        {"best_of": 2},
        {"best_of": "x"},
        {"stop": "parse", "stream": True},
        {"response_format": {"type": "json_object"}, "max_tokens": 5},
        {"json_schema": '{"type": "object"}', "max_tokens": 5},
        {"model": ABSENT},
        {"model": "nobody's"},
        {"return_token_ids": True},
        {"min_tokens": 2, "max_tokens": 3},
        {"custom_params": {"a": 1}},
    )
    for fields in further:
        yield case(COMPLETIONS, changed(COMPLETIONS, **fields))


def generate_cases() -> Iterator[Case]:
    prompts: tuple[dict[str, Any], ...] = (
        {},
        {"text": None},
        {"text": ""},
        {"text": []},
        {"text": [""]},
        {"text": 5},
        {"text": [5]},
        {"text": ["def parse(", "class A"]},
        {"text": "a", "input_ids": [5]},
        {"input_ids": [5, 6, 7]},
        {"input_ids": [[5, 6], [7]]},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": ["5"]},
        {"input_ids": [5.0]},
        {"input_ids": [5, 6.0]},
        {"input_ids": [True]},
        {"input_ids": [-1]},
        {"input_ids": [2048]},
        {"input_ids": "5"},
        {"input_ids": [2**63]},
    )
    for prompt in prompts:
        yield case(GENERATE, {**prompt, "sampling_params": {"max_new_tokens": 3, "top_k": 1}})
    further: tuple[dict[str, Any], ...] = (
        {"sampling_params": []},
        {"sampling_params": [{"max_new_tokens": 2, "top_k": 1}]},
        {"sampling_params": "x"},
        {"sampling_params": {"what": 1}},
        {"sampling_params": {"max_new_tokens": 0}},
        {"sampling_params": {"max_new_tokens": 2, "n": 2, "top_k": 1}},
        {"sampling_params": {"max_new_tokens": 2, "top_k": 1, "stop": ["a"], "stop_token_ids": [5]}},
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1, "top_k": 1}, {"max_new_tokens": 2, "top_k": 1}]},
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1, "top_k": 1}]},
        {"stream": True},
        {"stream": True, "text": ["a", "b"]},
        {"stream": None},
        {"stream": "true"},
        {"return_logprob": True},
        {"return_logprob": True, "sampling_params": {"max_new_tokens": 1, "top_k": 1}},
        {"return_logprob": True, "sampling_params": {"max_new_tokens": 0, "top_k": 1}, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 0},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5, 6]},
        {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True},
        {"return_logprob": True, "logprob_start_len": 100},
        {"return_logprob": True, "top_logprobs_num": -1},
        {"return_logprob": True, "top_logprobs_num": 2.0},
        {"return_logprob": True, "top_logprobs_num": "2"},
        {"return_logprob": True, "stream": True},
        {"return_logprob": True, "stream": True, "logprob_start_len": 0},
        {"return_logprob": True, "stream": True, "token_ids_logprob": [5, 6]},
        {"stream": True, "sampling_params": {"max_new_tokens": 3, "top_k": 1, "json_schema": "{"}},
        {"stream": True, "sampling_params": {"max_new_tokens": 3, "top_k": 1, "temperature": -1}},
        {"sampling_params": {"max_new_tokens": 3, "top_k": 1, "stop_regex": "["}},
        {"return_logprob": True, "stream": True, "top_logprobs_num": 2},
        {"return_logprob": 1},
        {"return_logprob": "true"},
        {"return_logprob": None},
        {"return_logprob": [True], "text": ["a"]},
        {"return_logprob": [True, False], "text": ["a", "b"]},
        {"model": MODEL},
        {"model": "nobody's"},
        {"rid": "mine"},
        {"rid": 5},
        {"rid": ["a"]},
        {"rid": ["a", "b"], "text": ["a", "b"]},
        {"rid": ["a"], "text": ["a", "b"]},
        {"rid": ["a", "a"], "text": ["a", "b"]},
        {"lora_path": None},
        {"priority": "x"},
        {"return_prompt_token_ids": True},
        {"image_data": None},
        {"custom_labels": {}},
        {"return_hidden_states": False},
        {"session_params": {"id": "nobody's"}},
        *({"session_params": given} for given in ({}, {"nope": 1}, [{"id": "x"}], "x", {"rid": "y", "offset": 0})),
        *({"logprobs": "x"}, {"prompt_logprobs": "x"}, {"n": "x"}, {"request_id": 5}, {"model": ["m"]}),
    )
    for fields in further:
        yield case(GENERATE, changed(GENERATE, **fields))


def anthropic_cases() -> Iterator[Case]:
    bodies: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"stream": None},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief."}]},
        {"system": 5},
        {"messages": []},
        {"messages": ABSENT},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "system", "content": "a"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [*USER, {"role": "assistant", "content": "It is"}]},
        {"max_tokens": ABSENT},
        {"max_tokens": -1},
        {"model": ABSENT},
        {"model": ""},
        {"model": "nobody's"},
        {"stop_sequences": ["a"]},
        {"stop_sequences": "a"},
        {"metadata": {"user_id": "u"}},
        {"tools": [{"name": "look_up", "input_schema": {"type": "object"}}]},
        {"tools": [{"name": "look_up"}]},
        {"tool_choice": {"type": "auto"}},
        {"thinking": {"type": "disabled"}},
        {"top_p": 2},
        {"betas": ["x"]},
        *({"n": "x"}, {"rid": 5}, {"request_id": 5}, {"logit_bias": "x"}, {"top_logprobs": 500}, {"stop": 5}),
        *({"stream": True, "temperature": -1}, {"stream": True, "top_p": 0}, {"stream_options": 5}, {"echo": 5}),
        *({"system": ""}, {"system": []}, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"tools": None}),
        {"messages": [*USER, *USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
    )
    for fields in bodies:
        yield case(MESSAGES, changed(MESSAGES, **fields), anthropic_version="2023-06-01")
        counted = changed(MESSAGES, **fields)
        counted.pop("max_tokens", None)
        yield case("/v1/messages/count_tokens", counted)


def response_cases() -> Iterator[Case]:
    bodies: tuple[dict[str, Any], ...] = (
        {},
        {"stream": True},
        {"instructions": "Be brief."},
        {"input": ABSENT},
        {"input": []},
        {"input": [{"role": "user", "content": "a"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        {"input": 5},
        {"max_output_tokens": ABSENT, "stop": "a"},
        *({"max_output_tokens": -1}, {"max_output_tokens": 1}, {"max_output_tokens": 2}),
        {"store": False},
        {"store": "no"},
        {"metadata": {"a": "b"}},
        {"top_p": 2},
        {"tools": []},
        {"text": {"format": {"type": "text"}}},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"truncation": "auto"},
        {"service_tier": "x"},
        {"model": ABSENT},
        *({"stream": True, "top_p": 5}, {"stream": True, "min_p": 5}, {"stream": True, "frequency_penalty": 9}),
        *({"n": "x"}, {"rid": 5}, {"request_id": "mine"}, {"logit_bias": "x"}, {"max_tokens": "x"}, {"echo": 5}),
    )
    for fields in bodies:
        yield case(RESPONSES, changed(RESPONSES, **fields))


def other_cases() -> Iterator[Case]:
    """Paths that do not generate."""
    tokenise: tuple[Any, ...] = (
        *({"prompt": "a b"}, {"prompt": ["a", "b"]}, {"prompt": None}, {"prompt": "a", "messages": None}, {}, [], "x"),
        *({"messages": USER}, {"messages": USER, "prompt": None}, {"messages": USER, "prompt": "a"}, {"messages": []}),
        *({"prompt": "a", "add_special_tokens": 0}, {"prompt": "a", "add_special_tokens": None}, {"prompt": 5}),
        *({"prompt": "a", "model": "m"}, {"prompt": "a", "model": "nobody's"}, {"messages": USER, "tools": [TOOL]}),
    )
    for body in tokenise:
        for path in ("/tokenize", "/v1/tokenize"):
            yield case(path, body)
    detokenise: tuple[Any, ...] = (
        *(
            {"tokens": [5, 6]},
            {"tokens": [[5], [6]]},
            {"tokens": []},
            {"tokens": ["5"]},
            {"tokens": [5.0]},
            {"tokens": None},
        ),
        *({}, {"tokens": [5.5]}, {"tokens": [[5], 6]}, {"tokens": [5], "skip_special_tokens": "no"}, {"tokens": [-1]}),
        *({"tokens": [2**32]}, {"tokens": [2**31]}, {"tokens": "5"}),
    )
    for body in detokenise:
        yield case("/v1/detokenize", body)
    calls: tuple[Any, ...] = (
        {"text": "a", "tools": [TOOL], "tool_call_parser": "qwen25"},
        {
            "text": '<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>',
            "tools": [TOOL],
            "tool_call_parser": "qwen25",
        },
        *({"text": "a"}, {"tools": []}, {}, [], {"text": 5, "tools": [], "tool_call_parser": "qwen25"}),
    )
    for body in calls:
        yield case("/parse_function_call", body)
    thoughts: tuple[Any, ...] = (
        {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
        {"text": "<think>a</think>b", "reasoning_parser": "qwen3", "return_blocks": True},
        *({"text": "a"}, {"reasoning_parser": "qwen3"}, {}, {"text": 5, "reasoning_parser": "qwen3"}),
    )
    for body in thoughts:
        yield case("/separate_reasoning", body)
    for body in ({"model": MODEL}, {}, {"model": 5}):
        yield case("/api/show", body)
    for target in ("/api/tags", "/v1/models", f"/v1/models/{MODEL}", "/v1/models/x", "/v1/models/", "/v1/loads"):
        yield case(target, None, "GET")
    for target in (
        "/v1/loads?include=core",
        "/v1/loads?include=nothing",
        "/v1/loads?format=prometheus",
        "/flush_cache",
        "/server_info",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ):
        yield case(target, None, "GET")
    for target in ("/v1/responses/x", "/v1/embeddings", "/redoc", "/docs", "/openapi.json", "/metrics"):
        yield case(target, None, "GET")
    yield case("/v1/responses/x/cancel", {})
    yield case("/v1/responses/x", None, "DELETE")
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"):
        yield case(path, {"model": MODEL, "input": "a"})
    yield case("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5, 6], "model": MODEL})
    yield case("/api/chat", {"model": MODEL, "messages": USER, "stream": False, "options": {"num_predict": 3}})
    yield case("/api/generate", {"model": MODEL, "prompt": "a", "stream": False, "options": {"num_predict": 3}})
    yield case("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"sampling_params": {"top_k": 1}}})
    for target in ("/", "/health", "/health_generate", "/ready", "/ping", "/model_info", "/get_model_info"):
        yield case(target, None, "GET")
    for target in ("/", "/health", "/ready"):
        yield case(target, None, "HEAD")
    yield case("/invocations", BASE[CHAT])
    yield case("/invocations", {})
    yield case("/abort_request", {"rid": "nobody's"})
    yield case("/abort_request", {})
    for body in ({"rid": 5}, {"rid": None}, {"rid": ""}, {"rid": ["x"]}, {"abort_all": True}, {"abort_message": "m"}):
        yield case("/abort_request", body)


def target_cases() -> Iterator[Case]:
    """Forms of targets, and methods."""
    for path in (CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, "/tokenize"):
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            yield case(path, BASE.get(path, {"prompt": "a"}) if method == "PUT" else None, method)
        body = BASE.get(path, {"prompt": "a"})
        for target in (
            f"{path}/",
            f"{path}?a=b",
            f"{path}?",
            f"/{path}",
            f"{path}%20",
            f"{path}#x",
            path.upper(),
            f"{path}/x",
        ):
            yield case(target, body)
        yield case(path.replace("e", "%65", 1), body)
    for target in (
        "/v1/models?x=y",
        "/v1/models#a",
        "/v1/models/",
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/%6dodels",
    ):
        yield case(target, None, "GET")
    for target in ("/nothing", "/v1", "/v1/", "/v1/nothing", "/health/", "/docs/", "/v1/models/m/"):
        yield case(target, None, "GET")
        yield case(target, {})


def header_cases() -> Iterator[Case]:
    """Headers and ways to write a body."""
    body = BASE[COMPLETIONS]
    for kind in (
        "application/json; charset=utf-8",
        "Application/JSON",
        "text/plain",
        "application/x-www-form-urlencoded",
        "",
    ):
        yield case(COMPLETIONS, body, content_type=kind)
        yield case(GENERATE, BASE[GENERATE], content_type=kind)
        yield case("/tokenize", {"prompt": "a"}, content_type=kind)
    for name, value in (
        *(
            ("accept", "text/event-stream"),
            ("accept-encoding", "gzip"),
            ("x-request-id", "mine"),
            ("expect", "100-continue"),
        ),
        *(("authorization", "Bearer x"), ("authorization", "bearer"), ("x-api-key", "x"), ("cookie", "a=b")),
        *(("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("origin", "http://a.example")),
        *(("x-sglext-return-input-ids", "true"), ("x-sglext-return-output-ids", "true"), ("user-agent", "")),
        *(("x-data-parallel-rank", "0"), ("x-data-parallel-rank", "9"), ("x-sgl-ttft-slo-ms", "x")),
        *(("x-sgl-priority", "x"), ("x-sgl-tps-slo", "x"), ("x-correlation-id", ""), ("baggage", "a=b")),
        *(("content-encoding", "identity"), ("connection", "close"), ("te", "trailers"), ("prefer", "wait=5")),
        *(("content-type", "application/jsonl"), ("x-caller", "not json")),
        *(("if-none-match", "x"), ("range", "bytes=0-1"), ("accept", "image/png")),
    ):
        yield case(COMPLETIONS, body, **{name.replace("-", "_"): value})
        yield case(CHAT, BASE[CHAT], **{name.replace("-", "_"): value})
    raw_bodies: tuple[bytes, ...] = (
        *(b"", b" ", b"{", b"[]", b"null", b"5", b'"x"', b"{}", b'{"prompt": "a",}', b'{"prompt": NaN}', b"\xff\xfe{}"),
        *(
            b'\xef\xbb\xbf{"prompt": "a"}',
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "a", "prompt": "b", "max_tokens": 1, "top_k": 1}',
        ),
        *(
            b'{"prompt": "a\nb"}',
            b'{"prompt": "a", "seed": 1e2, "max_tokens": 1, "top_k": 1}',
            b'{"prompt": "\xff"}',
            b"{'prompt': 'a'}",
        ),
        *(
            b'{"prompt": "a", "max_tokens": 1, "top_k": 1} x',
            b' {"prompt": "a", "max_tokens": 1, "top_k": 1}\n',
            '{"prompt": "a"}'.encode("utf-16"),
        ),
        *(
            b'{"prompt": "a", "temperature": Infinity}',
            b'{"prompt": "a", "top_k": 1, "x": ' + b"[" * 500 + b"]" * 500 + b"}",
        ),
        *(b'{"prompt": "a", "max_tokens": 01}', b'{"prompt": "a", "max_tokens": 1, "temperature": 0.0}'),
    )
    for raw in raw_bodies:
        yield case(COMPLETIONS, raw)
    for raw in (b"", b"[]", b"{", b"{}"):
        for path in (
            CHAT,
            GENERATE,
            RESPONSES,
            MESSAGES,
            "/tokenize",
            "/v1/messages/count_tokens",
            "/parse_function_call",
        ):
            yield case(path, raw)


EMBEDDINGS, CLASSIFY, RERANK, SCORE = "/v1/embeddings", "/v1/classify", "/v1/rerank", "/v1/score"
EMBEDDING_BASE: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"model": MODEL, "input": "def parse("},
    CLASSIFY: {"model": MODEL, "input": "def parse("},
    RERANK: {"model": MODEL, "query": "def parse(", "documents": ["class A", "import re"]},
}
SCORE_BASE: dict[str, dict[str, Any]] = {
    SCORE: {"model": MODEL, "query": "def ", "items": ["parse", "find"], "label_token_ids": [9, 10]},
}


def embedding_cases() -> Iterator[Case]:
    """What a server that embeds is asked."""
    yield from _undivided_cases(EMBEDDING_BASE)
    inputs: tuple[Any, ...] = (
        *("a", " ", "", ["a"], ["a", "b"], ["a", ""], [], [[]], [5], [5, 6], [[5], [6, 7]], [5.0], [True], ["5"], [-1]),
        *([2048], [[2048]], ["a", 5], [[5], 6], 5, None, {}, [{"text": "a"}], [{"text": "a"}, {"text": "b"}], [{}]),
        *([None], "word " * 3000, ["a"] * 300),
    )
    for value in inputs:
        for path in (EMBEDDINGS, CLASSIFY):
            yield case(path, {"model": MODEL, "input": value})
    further: tuple[dict[str, Any], ...] = (
        *(
            {"encoding_format": "base64"},
            {"encoding_format": "x"},
            {"dimensions": 8},
            {"lora_path": "x"},
            {"user": "u"},
        ),
        *({"embed_overrides": [[[1.0]]]}, {"embed_override_token_id": 5}, {"rid": "x"}, {"model": "x"}),
        *({"stream": True}, {"n": 2}, {"max_tokens": "x"}, {"bootstrap_room": 5}),
    )
    for fields in further:
        yield case(EMBEDDINGS, {**EMBEDDING_BASE[EMBEDDINGS], **fields})
    rankings: tuple[dict[str, Any], ...] = (
        *({"documents": "a"}, {"documents": []}, {"documents": [""]}, {"documents": [5]}, {"query": ""}, {"query": 5}),
        *({"query": None}, {"top_n": 1}, {"top_n": 9}, {"return_documents": False}, {"instruct": "x"}),
        *({"documents": [[{"type": "text", "text": "a"}], "b"]}, {"query": [{"type": "text", "text": "a"}]}),
    )
    for fields in rankings:
        yield case(RERANK, {**EMBEDDING_BASE[RERANK], **fields})
    yield case(RERANK, EMBEDDING_BASE[RERANK], "PUT")


def score_cases() -> Iterator[Case]:
    """What a server that generates is asked for labels; it refuses to embed."""
    yield from _undivided_cases(SCORE_BASE)
    fields: tuple[dict[str, Any], ...] = (
        *(
            {"items": "parse"},
            {"items": []},
            {"items": None},
            {"items": [5]},
            {"items": [[5]], "query": [6]},
            {"query": 5},
        ),
        *(
            {"query": None},
            {"query": [6]},
            {"query": ""},
            {"query": [2048], "items": [[5]]},
            {"query": [], "items": [[]]},
        ),
        *({"label_token_ids": []}, {"label_token_ids": None}, {"label_token_ids": [2048]}, {"label_token_ids": [-1]}),
        *(
            {"label_token_ids": [[9], [10]]},
            {"label_token_ids": [[9]]},
            {"label_token_ids": ["9"]},
            {"item_first": True},
        ),
        *({"apply_softmax": True}, {"apply_softmax": True, "temperature": 0.5}, {"return_token_logprobs": True}),
        *({"return_pooled_hidden_states": True}, {"score_extraction_token": "a"}, {"item_embed_overrides": [None]}),
        *({"query": "word " * 3000}, {"items": ["a"] * 300}, {"stream": True}, {"rid": 5}),
    )
    for changed_fields in fields:
        yield case(SCORE, {**SCORE_BASE[SCORE], **changed_fields})
    for path, body in EMBEDDING_BASE.items():
        yield case(path, body)


def _undivided_cases(bases: dict[str, dict[str, Any]]) -> Iterator[Case]:
    for path, body in bases.items():
        for field, schema in BODIES[path]["properties"].items():
            if field != "model" and "type" in schema:
                for value in FIELD_VALUES:
                    yield case(path, {**body, field: value})
        for raw in (b"", b"[]", b"{", b"{}", b"null"):
            yield case(path, raw)
        for method in ("GET", "DELETE"):
            yield case(path, None, method)
        for target in (f"{path}/", f"{path}?a=b", f"{path}/x"):
            yield case(target, body)


def all_cases() -> dict[str, list[Case]]:
    """Cases by the name of their group; each once."""
    groups = (field_cases, range_cases, chat_cases, completion_cases, generate_cases, anthropic_cases)
    groups += (response_cases, other_cases, target_cases, header_cases)  # type: ignore[assignment]
    seen: set[str] = set()
    found: dict[str, list[Case]] = {}
    for group in groups:
        listed = found[group.__name__.removesuffix("_cases")] = []
        for one in group():
            if one.name not in seen:
                seen.add(one.name)
                listed.append(one)
    return found
