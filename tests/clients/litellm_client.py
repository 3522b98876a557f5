"""LiteLLM as a library, by three of its providers: `openai/`, `hosted_vllm/` and `anthropic/`."""

from __future__ import annotations

import functools

import litellm
import steps

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": steps.QUESTION}]
ASKED = {"api_base": f"{steps.url()}/v1", "api_key": "any", "messages": MESSAGES, "temperature": 0, "num_retries": 0}
OPENAI = {**ASKED, "model": f"openai/{steps.model()}"}
VLLM = {**ASKED, "model": f"hosted_vllm/{steps.model()}"}
ANTHROPIC = {**ASKED, "api_base": steps.url(), "model": f"anthropic/{steps.model()}"}
PROVIDERS = (OPENAI, VLLM, ANTHROPIC)


def answer() -> None:
    texts = set()
    for asked in PROVIDERS:
        whole = litellm.completion(**asked, max_tokens=steps.MAX_TOKENS)
        assert whole.choices[0].finish_reason == "length"
        texts.add(whole.choices[0].message.content)
    (text,) = texts
    assert text


def stream() -> None:
    text = litellm.completion(**OPENAI, max_tokens=steps.MAX_TOKENS).choices[0].message.content
    for asked in PROVIDERS:
        chunks = list(litellm.completion(**asked, max_tokens=steps.MAX_TOKENS, stream=True))
        assert len(chunks) > 1
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert chunks[-1].choices[0].finish_reason == "length"


def usage() -> None:
    for asked in PROVIDERS:
        whole = litellm.completion(**asked, max_tokens=steps.MAX_TOKENS).usage
        assert whole.completion_tokens == steps.MAX_TOKENS
        assert whole.prompt_tokens > 0
        chunks = list(
            litellm.completion(
                **asked, max_tokens=steps.MAX_TOKENS, stream=True, stream_options={"include_usage": True}
            )
        )
        last = chunks[-1].usage
        assert (last.prompt_tokens, last.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)


async def asynchronous() -> None:
    text = litellm.completion(**OPENAI, max_tokens=steps.MAX_TOKENS).choices[0].message.content
    whole = await litellm.acompletion(**OPENAI, max_tokens=steps.MAX_TOKENS)
    assert whole.choices[0].message.content == text
    chunks = await litellm.acompletion(**OPENAI, max_tokens=steps.MAX_TOKENS, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == text


def context_overflow() -> None:
    too_long = [{"role": "user", "content": steps.TOO_LONG}]
    for asked in PROVIDERS:
        for beside in ({"messages": too_long}, {"messages": [{"role": "user", "content": steps.QUESTION * 100}]}):
            changed = {**asked, **beside, "max_tokens": 1800}
            steps.error_of(litellm.ContextWindowExceededError, functools.partial(litellm.completion, **changed))


def bad_field() -> None:
    for asked in PROVIDERS:
        changed = {**asked, "temperature": "hot"}
        error = steps.error_of(litellm.BadRequestError, functools.partial(litellm.completion, **changed))
        assert not isinstance(error, litellm.ContextWindowExceededError)
        assert "temperature" in str(error)


def unknown_model() -> None:
    asked = {**OPENAI, "model": "openai/another"}
    error = steps.error_of(litellm.NotFoundError, lambda: litellm.completion(**asked))
    assert "another" in str(error)


def models() -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=steps.url(), api_key="any"
    )
    assert steps.model() in found


def structured_output() -> None:
    schema = {"name": "city", "schema": steps.CITY_SCHEMA, "strict": True}
    whole = litellm.completion(**OPENAI, max_tokens=100, response_format={"type": "json_schema", "json_schema": schema})
    assert '"city"' in whole.choices[0].message.content


def abort() -> None:
    before = steps.aborted_count()
    chunks = litellm.completion(**OPENAI, max_tokens=steps.ABORTED_TOKENS, stream=True, extra_body={"ignore_eos": True})
    steps.read_some(chunks)
    chunks.completion_stream.response.close()
    steps.wait_aborted(before)


steps.run(
    answer,
    stream,
    usage,
    asynchronous,
    context_overflow,
    bad_field,
    unknown_model,
    models,
    structured_output,
    abort,
)
