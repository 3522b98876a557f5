"""Names of the spans of a request and of their attributes, of which `docs/reference/traces.md` is made."""

from __future__ import annotations

from enum import StrEnum


class SpanName(StrEnum):
    """Describes what a span is the time of."""

    REQUEST = "sglang_ext.request"
    WAIT = "sglang_ext.wait"
    PREFILL = "sglang_ext.prefill"
    FIRST_TOKEN = "sglang_ext.first_token"
    DECODE = "sglang_ext.decode"
    POOL_WAIT = "sglang_ext.pool.wait"
    POOL_CHUNK = "sglang_ext.pool.chunk"
    POOL_COLLECT = "sglang_ext.pool.collect"
    POOL_TRANSFER = "sglang_ext.pool.transfer"
    HANDSHAKE = "sglang_ext.handshake"
    QUEUE = "sglang_ext.queue"
    BATCH = "sglang_ext.batch"
    TRANSFER = "sglang_ext.transfer"
    LAYERS = "sglang_ext.transfer.layers"


class Key(StrEnum):
    """An attribute; those of `gen_ai` are named and measured as SGLang does it, in seconds."""

    REQUEST_ID = "gen_ai.request.id"
    PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
    CACHED_TOKENS = "gen_ai.usage.cached_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.completion_tokens"
    QUEUE_S = "gen_ai.latency.time_in_queue"
    TTFT_S = "gen_ai.latency.time_to_first_token"
    E2E_S = "gen_ai.latency.e2e"
    MODEL_PREFILL_S = "gen_ai.latency.time_in_model_prefill"
    MODEL_DECODE_S = "gen_ai.latency.time_in_model_decode"
    MODEL_INFERENCE_S = "gen_ai.latency.time_in_model_inference"
    LENGTH_CLASS = "sglang_ext.length_class"
    PREFILL = "sglang_ext.prefill.instance"
    DECODE = "sglang_ext.decode.instance"
    ATTEMPTS = "sglang_ext.attempts"
    OUTCOME = "sglang_ext.outcome"
    STEP_TOKENS = "sglang_ext.step.new_tokens"
    STEP_MOVED_TOKENS = "sglang_ext.step.moved_tokens"
    STEP_MEMBERS = "sglang_ext.step.members"
    STEP_FAILED = "sglang_ext.step.has_failed"
    EXPOSED_S = "sglang_ext.transfer.exposed"
    BATCH_REQUESTS = "sglang_ext.batch.requests"
    BATCH_TOKENS = "sglang_ext.batch.new_tokens"
    BATCH_SHAPE = "sglang_ext.batch.graph_shape"
    NEW_TOKENS = "sglang_ext.new_tokens"
    PREFIX_TOKENS = "sglang_ext.prefix_tokens"
    TRANSFER_TOKENS = "sglang_ext.transfer.tokens"
    FIRST_LAYER = "sglang_ext.transfer.first_layer"
    LAYER_COUNT = "sglang_ext.transfer.layer_count"


SPAN_TEXTS = {
    SpanName.REQUEST: "from the arrival of its head to the last byte of its reply; SGLang's own spans are under it",
    SpanName.WAIT: "until it was sent to instances: admission, an offer to the long pool, attempts that failed",
    SpanName.PREFILL: "until prefill answered: its queue, computing and the transfer of KV",
    SpanName.FIRST_TOKEN: "from then until the first byte of a stream",
    SpanName.DECODE: "from the first token to the end",
    SpanName.POOL_WAIT: "a prompt that a long pool shares, until its first step; under prefill, as the next three",
    SpanName.POOL_CHUNK: "a chunk, on all its members",
    SpanName.POOL_COLLECT: "its KV moves to its own instance",
    SpanName.POOL_TRANSFER: "KV on its way to decode, where that is reported",
    SpanName.HANDSHAKE: "reported by a prefill instance, under SGLang's span of its scheduler, as the next four: "
    "from the request's arrival there until decode has its KV slots for it",
    SpanName.QUEUE: "from then until its first batch was launched, or it was offered to the long pool",
    SpanName.BATCH: "one batch, or one chunk, that computed some of the prompt, from its launch to its result",
    SpanName.TRANSFER: "from the first part that could leave until decode had everything",
    SpanName.LAYERS: "a range of layers of some tokens, under the transfer: from when they were computed until written",
}
KEY_TEXTS = {
    Key.REQUEST_ID: "the id in the reply's `x-request-id`",
    Key.PROMPT_TOKENS: "tokens of the prompt, estimated unless the instance reported them",
    Key.CACHED_TOKENS: "of these, believed to be cached where it was sent",
    Key.OUTPUT_TOKENS: "tokens of the reply, where they are known",
    Key.QUEUE_S: "from arrival until it was sent",
    Key.TTFT_S: "from arrival to the first token; of a reply that is not streamed, to the end of prefill",
    Key.E2E_S: "from arrival to the end",
    Key.MODEL_PREFILL_S: "from when it was sent to the first token",
    Key.MODEL_DECODE_S: "from the first token to the end",
    Key.MODEL_INFERENCE_S: "both of these together",
    Key.LENGTH_CLASS: "short or long",
    Key.PREFILL: "HOST:PORT of the last attempt's prefill instance",
    Key.DECODE: "the same of its decode instance",
    Key.ATTEMPTS: "how often it was sent",
    Key.OUTCOME: "as in the access log",
    Key.STEP_TOKENS: "tokens that the chunk computed",
    Key.STEP_MOVED_TOKENS: "tokens whose KV moved between members",
    Key.STEP_MEMBERS: "names of the instances of the step",
    Key.STEP_FAILED: "true where the step came to nothing",
    Key.EXPOSED_S: "the part of the transfer after the last token had been computed",
    Key.BATCH_REQUESTS: "requests in the batch",
    Key.BATCH_TOKENS: "new tokens of all of them",
    Key.BATCH_SHAPE: "LENGTHxREQUESTS of the graph replayed for it, or tokens of SGLang's own; missing without",
    Key.NEW_TOKENS: "of these, the traced request's own",
    Key.PREFIX_TOKENS: "tokens before them whose KV was there",
    Key.TRANSFER_TOKENS: "tokens whose KV was sent",
    Key.FIRST_LAYER: "first layer of the range",
    Key.LAYER_COUNT: "layers in it",
}


def tables() -> str:
    """Both tables in Markdown."""
    spans = "\n".join(f"| `{name}` | {SPAN_TEXTS[name]} |" for name in SpanName)
    keys = "\n".join(f"| `{key}` | {KEY_TEXTS[key]} |" for key in Key)
    return f"| span | |\n|---|---|\n{spans}\n\n| attribute | |\n|---|---|\n{keys}"
