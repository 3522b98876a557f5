"""Every path of a plain SGLang server, and what the router does with a request for it.

The table is held equal to SGLang's own routes by a test: a path that a new version adds has to be decided on here.
Only its first kind has code of its own; the other two are served from the table.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Handling(StrEnum):
    """Names what the router does with a request for a path of SGLang."""

    SERVED = "served"  # by the router's own code, from both legs or from all instances
    PASSED_ON = "passed on"  # to one instance of the model that the body names
    NOT_SERVED = "not served"  # 404, with the reason


class InstancePath(NamedTuple):
    """One path of SGLang, with its methods separated by spaces, and the reason why it is not served."""

    methods: str
    path: str  # as in SGLang's source, with `{parameter}`
    handling: Handling
    reason: str = ""


_AUDIO = "it takes no JSON, and the instances behind this router work on text; ask an instance that transcribes"
_SCORES = "ask /v1/score, or /v1/completions with prompt_logprobs and prompt_logprob_token_ids"
_ONE_INSTANCE = "it reads or changes one instance; ask the instances, whose addresses GET /workers lists"
_WEIGHTS = "weights are changed at every instance by itself; ask the instances, whose addresses GET /workers lists"
_SESSIONS = "a session lives in one instance, and requests go to two; send the conversation with every request"

_SERVED = (
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST PUT /generate"),
    *("POST /v1/messages", "POST /invocations", "POST /abort_request", "GET POST /flush_cache"),
    *("POST /v1/embeddings", "POST PUT /v1/rerank", "POST /v1/score", "POST /v1/classify"),  # where undivided
    *("GET HEAD /", "GET /health", "GET /health_generate", "GET /ready", "GET /ping", "GET /metrics"),
    *("GET /v1/models", "GET /v1/models/{model:path}", "GET /v1/loads", "GET /api/tags"),
    *("GET /model_info", "GET /get_model_info", "GET /server_info", "GET /get_server_info"),
    *("GET /v1/responses/{response_id}", "POST /v1/responses/{response_id}/cancel"),  # 404: replies are not kept
)
_PASSED_ON = (
    *("/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize", "/v1/messages/count_tokens"),
    *("/parse_function_call", "/separate_reasoning", "/api/show"),
)
_NOT_SERVED: dict[str, tuple[str, ...]] = {
    _AUDIO: ("POST /v1/audio/transcriptions", "WEBSOCKET /v1/realtime"),
    "send the input to /v1/classify": ("POST PUT /classify",),
    "send the input to /v1/embeddings": ("POST PUT /encode",),
    _SCORES: ("POST /v1/decisions", "POST /v1/systemone"),
    "send every member of its instances to /generate": ("POST /vertex_generate",),
    "send the messages to /v1/chat/completions": ("POST /api/chat",),
    "send the prompt to /v1/completions or /generate": ("POST /api/generate",),
    _SESSIONS: ("GET POST /open_session", "GET POST /close_session"),
    _WEIGHTS: (
        *("POST /update_weights_from_disk", "POST /update_weights_from_tensor", "POST /update_weights_from_ipc"),
        *("POST /update_weights_from_distributed", "POST /begin_weight_update", "POST /end_weight_update"),
        *("POST /init_weights_update_group", "POST /destroy_weights_update_group", "POST /update_weight_version"),
        *("POST /init_weights_send_group_for_remote_instance", "POST /send_weights_to_remote_instance"),
        *("GET POST /get_weights_by_name", "GET POST /weights_checker"),
        *("GET /get_remote_instance_transfer_engine_info", "GET /remote_instance_transfer_engine_info"),
        *("GET POST /release_memory_occupation", "GET POST /resume_memory_occupation"),
        *("POST /load_lora_adapter", "POST /load_lora_adapter_from_tensors", "POST /unload_lora_adapter"),
        *("POST /scale_elastic_ep", "GET /is_scaling_elastic_ep"),
    ),
    _ONE_INSTANCE: (
        *("POST PUT /set_internal_state", "POST /dumper/{method}", "GET POST /slow_down", "POST /pd_role_switch"),
        *("POST /pause_generation", "POST /continue_generation", "GET POST /configure_logging"),
        *("GET POST /start_profile", "GET POST /stop_profile", "GET POST /set_trace_level", "GET POST /freeze_gc"),
        *("GET POST /start_expert_distribution_record", "GET POST /stop_expert_distribution_record"),
        *("GET POST /dump_expert_distribution_record", "GET /get_hicache_l3_cache_layout"),
        *("POST /hicache/storage-backend/clear", "GET PUT DELETE /hicache/storage-backend"),
        *("POST /add_external_corpus", "POST /remove_external_corpus", "GET /list_external_corpora"),
    ),
}


def _listed(line: str, handling: Handling, reason: str = "") -> InstancePath:
    methods, _, path = line.rpartition(" ")
    return InstancePath(methods, path, handling, reason)


INSTANCE_PATHS: tuple[InstancePath, ...] = (
    *(_listed(line, Handling.SERVED) for line in _SERVED),
    *(_listed(f"POST {path}", Handling.PASSED_ON) for path in _PASSED_ON),
    *(_listed(line, Handling.NOT_SERVED, reason) for reason, lines in _NOT_SERVED.items() for line in lines),
)
PASSED_ON_PATHS = frozenset(path.encode() for path in _PASSED_ON)
# What is made of a prompt without generating anything: an undivided instance does all of it.
UNDIVIDED_PATHS = frozenset({b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/v1/classify"})
PUT_PATHS = frozenset({b"/generate", b"/v1/rerank"})  # which take PUT as they take POST
# Other names of the paths that generate: requests for them are served, and recorded, as requests for these.
OTHER_NAMES = {b"/invocations": b"/v1/chat/completions"}
