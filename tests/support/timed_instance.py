"""A scripted SGLang instance with a prefix cache and a clock of its own, for tests of the profiler.

    with timed_instance(cost) as instance:
        main(["profile", "--url", instance.url, ...])

It computes nothing and waits for nothing: what an iteration took is what `cost` says of its (new, cached) lengths.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Cost = Callable[[Sequence[tuple[int, int]]], float]

STAND_IN = "2.2.2.2"
SERVER_INFO: dict[str, Any] = {
    "version": "0.5.23",
    "enable_metrics": True,
    "disable_radix_cache": False,
    "disaggregation_mode": "null",
    "device": "cuda",
    "dtype": "bfloat16",
    "tp_size": 1,
    "dp_size": 1,
    "chunked_prefill_size": 512,
    "max_req_input_len": 4091,
    "max_total_num_tokens": 20_000,
    "max_running_requests": 16,
    "page_size": 1,
    "disaggregation_bootstrap_port": 8998,
}
MODEL_INFO: dict[str, Any] = {
    "model_path": "models/tiny-llama",
    "architectures": ["LlamaForCausalLM"],
    "is_generation": True,
}


class TimedInstance:
    """What it answers; a test may change any of this while it runs."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.url = ""
        self.server_info = dict(SERVER_INFO)
        self.model_info = dict(MODEL_INFO)
        self.running_requests = 0
        self.laps_cut_tokens: int | None = None  # with LAPS: longer prompts take several iterations
        self.has_laps = False
        self.batch_limit: int | None = None  # more requests of one call run in another batch
        self.keeps_prefixes = True
        self.calls_left: int | None = None  # then it breaks connections off
        self.headers: dict[str, str] = {}  # of the last call
        self.measured: list[tuple[tuple[int, int], ...]] = []  # lengths of every batch, in order
        self.bodies: list[dict[str, Any]] = []
        self.stages = 1  # `cost` is that of one of them
        self.hop_s = 0.0
        self.faster = 1.0  # time of every stage but the last over that of the last
        self.refused_flushes = 0
        self._cached: list[list[int]] = []
        self._iterations = 0
        self._now_s = self._ended_s = 1000.0
        self._lock = threading.Lock()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            match path.partition("?")[0]:
                case "/server_info":
                    return 200, self.server_info
                case "/model_info":
                    return 200, self.model_info
                case "/v1/loads":
                    return 200, {"loads": [{"num_running_reqs": self.running_requests, "num_waiting_reqs": 0}]}
                case "/laps":
                    return (200, {"fit": {"samples": self._iterations}}) if self.has_laps else (404, {})
                case "/flush_cache":
                    if self.refused_flushes:
                        self.refused_flushes -= 1
                        return 400, "Flush cache failed.\n"
                    self._cached.clear()
                    return 200, "Cache flushed.\n"
                case "/generate":
                    return self._generate(body)
        return 404, {"error": {"message": f"no {path}"}}

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise ConnectionAbortedError
        self.bodies.append(body)
        if body.get("stream"):
            return 200, 'data: {"text": "x"}\n\ndata: [DONE]\n\n'
        is_list = isinstance(body["input_ids"][0], list)
        prompts: list[list[int]] = list(body["input_ids"]) if is_list else [body["input_ids"]]
        longest = self.server_info["max_req_input_len"]
        if any(len(prompt) >= longest for prompt in prompts):
            return 400, {"error": {"message": "the prompt is longer than the model's context"}}
        results = []
        while prompts:
            batch = [prompts.pop(0)]
            while prompts and self._joins(batch, prompts[0]):
                batch.append(prompts.pop(0))
            # As in SGLang, what ran against the stand-in for decode is not cached.
            results += self._run(batch, is_kept=body.get("bootstrap_host", [""])[0] != STAND_IN)
        self._now_s = self._ended_s
        return 200, results if is_list else results[0]

    def _joins(self, batch: list[list[int]], prompt: list[int]) -> bool:
        if self.batch_limit is not None and len(batch) >= self.batch_limit:
            return False
        tokens = sum(len(one) for one in batch) + len(prompt)
        return bool(tokens <= self.server_info["chunked_prefill_size"])

    def _run(self, prompts: list[list[int]], *, is_kept: bool) -> list[dict[str, Any]]:
        cached = [self._match(prompt) for prompt in prompts]
        lengths = tuple((len(prompt) - hit, hit) for prompt, hit in zip(prompts, cached, strict=True))
        self.measured.append(lengths)
        new_tokens = sum(new for new, _ in lengths)
        cut = self.laps_cut_tokens or self.server_info["chunked_prefill_size"]
        self._iterations += max(1, -(-new_tokens // cut))
        entry_s = self._now_s + 0.002
        stage_s, others = self.cost(lengths), self.stages - 1
        self._ended_s = max(
            entry_s + stage_s * (1 + others * self.faster) + others * self.hop_s + 0.001, self._ended_s + stage_s
        )
        # The next one of the same call enters when the first stage is free.
        self._now_s = self._ended_s if self.stages == 1 else entry_s + stage_s * self.faster - 0.002
        if self.keeps_prefixes and is_kept:
            self._cached += prompts
        return [
            {
                "text": "x",
                "meta_info": {
                    "cached_tokens": hit,
                    "request_received_ts": entry_s - 0.002,
                    "forward_entry_time": entry_s,
                    "prefill_finished_time": self._ended_s - 0.001,
                },
            }
            for hit in cached
        ]

    def _match(self, prompt: list[int]) -> int:
        best = 0
        for known in self._cached:
            low, high = 0, min(len(prompt), len(known))
            while low < high:  # slices compare faster than a loop over tokens
                middle = (low + high + 1) // 2
                low, high = (middle, high) if prompt[:middle] == known[:middle] else (low, middle - 1)
            best = max(best, low)
        page = self.server_info["page_size"]
        return int(min(best, len(prompt) - 1) // page * page)


@contextmanager
def timed_instance(cost: Cost) -> Iterator[TimedInstance]:
    """An instance that listens until the block ends."""
    instance = TimedInstance(cost)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            instance.headers = dict(self.headers)
            try:
                status, content = instance.answer(self.path, body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    instance.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield instance
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
