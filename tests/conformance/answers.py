"""Send a case, and bring its answer into a form in which two servers can be compared."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple

from conformance.cases import Case

TIMEOUT_S = 30.0
# What differs from request to request, or from run to run, at one and the same server.
DROPPED = frozenset(
    {
        *(
            "id",
            "created",
            "created_at",
            "modified_at",
            "completed_at",
            "timestamp",
            "item_id",
            "response_id",
            "call_id",
        ),
        *("e2e_latency", "prompt_tokens_details", "input_tokens_details", "cached_tokens", "cached_tokens_details"),
        *("storage_prefetch_wait", "storage_staging_wait", "bootstrap_room", "decode_throughput"),
        *("cache_read_input_tokens", "cache_creation_input_tokens", "request_id", "sequence_number"),
    }
)
ROUNDED = 3  # digits of log-probabilities that are the same in a batch of another size


class Answer(NamedTuple):
    """An answer in comparable form: `content` is JSON, a stream that was put together, or text."""

    status: int
    content: Any
    content_type: str
    raw: bytes

    @property
    def message(self) -> str:
        """The message of an error, in any of SGLang's shapes or OpenAI's."""
        found = self.content
        if isinstance(found, dict):
            found = found.get("error", found)
        if isinstance(found, dict):
            found = found.get("message", found.get("detail", found))
        return found if isinstance(found, str) else json.dumps(found)


def send(address: str, case: Case) -> Answer:
    """Send a case to `host:port`; status 0 stands for no answer."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.putrequest(case.method, case.target)
        headers = {"content-type": "application/json"} if case.data is not None else {}
        for name, value in {**headers, **dict(case.headers)}.items():
            if value or name != "content-type":
                connection.putheader(name, value)
        if case.data is not None:
            connection.putheader("content-length", str(len(case.data)))
        connection.endheaders(case.data)
        reply = connection.getresponse()
        raw = reply.read()
        kind = (reply.getheader("content-type") or "").partition(";")[0]
        return Answer(reply.status, comparable(case, kind, raw), kind, raw)
    except (http.client.HTTPException, OSError) as error:
        return Answer(0, type(error).__name__, "", b"")
    finally:
        connection.close()


def comparable(case: Case, kind: str, raw: bytes) -> Any:
    """Return an answer's body without what differs from request to request."""
    if kind == "text/event-stream":
        return joined_stream(raw)
    try:
        return cleaned(json.loads(raw))
    except ValueError:
        return raw.decode("utf-8", "replace")


def cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: cleaned(item) for name, item in value.items() if name not in DROPPED and not is_time(name)}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return round(value, ROUNDED) if isinstance(value, float) else value


def is_time(name: str) -> bool:
    return name.endswith(("_time", "_latency", "_duration", "_ts", "_s"))


def joined_stream(raw: bytes) -> dict[str, Any]:
    """Put a stream together: the texts of its choices, their ends, its usage, and the kinds of its events in order.

    Where one event ends and the next begins is the instance's affair, so texts are joined.
    """
    kinds: list[str] = []
    texts: dict[str, str] = {}
    whole: dict[str, Any] = {}
    logprobs: dict[str, list[Any]] = {}
    further: list[Any] = []
    for block in raw.decode("utf-8", "replace").split("\n\n"):
        lines = [line for line in block.split("\n") if line]
        if not lines:
            continue
        data = "\n".join(line.removeprefix("data:").strip() for line in lines if line.startswith("data:"))
        kind = next((line.removeprefix("event:").strip() for line in lines if line.startswith("event:")), "")
        if data == "[DONE]":
            kinds.append("[DONE]")
            continue
        event = json.loads(data)
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        if "output_ids" in event or "meta_info" in event:  # of /generate; each event has all that was before
            whole[str(event.get("index", 0))] = cleaned(event)
        elif "choices" in event:
            for choice in event["choices"]:
                key = str(choice["index"])
                delta = choice.get("delta", choice)
                for name in ("content", "text", "reasoning_content"):
                    if isinstance(delta.get(name), str):
                        texts[f"{key}.{name}"] = texts.get(f"{key}.{name}", "") + delta[name]
                if choice.get("finish_reason"):
                    whole[key] = cleaned({"finish_reason": choice["finish_reason"], "stop": choice.get("matched_stop")})
                for name, values in (choice.get("logprobs") or {}).items():
                    logprobs.setdefault(f"{key}.{name}", []).extend(cleaned(values) or [])
            if event.get("usage") and not event["choices"]:
                whole["usage"] = cleaned(event["usage"])
        elif isinstance(event.get("delta"), dict) and "text" in event["delta"]:
            texts["text"] = texts.get("text", "") + event["delta"]["text"]
        elif isinstance(event.get("delta"), str):
            texts[kind] = texts.get(kind, "") + event["delta"]
        else:
            further.append(cleaned(event))
    return {"kinds": kinds, "texts": texts, "ends": whole, "logprobs": logprobs, "further": further}
