"""Long and short prefills on one instance at the same time, and what its LAPS says of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_ext.types import Role
from support.engines import Engine, EngineSpec, Reply
from support.memory import check_whole
from support.pd import send_both
from support.reference import greedy_reference, random_prompt
from support.tiny_model import STANDARD_SHAPE, TinyModelShape

NEW_TOKENS = 6
# The weights of the standard model, and room for prompts that a test can watch being computed.
SHAPE = TinyModelShape(context_tokens=8192)
DECODE = EngineSpec(Role.DECODE, shape=SHAPE)
LONG_TOKENS = 4800  # 150 chunks of 32 tokens: most of a second on an idle machine


@dataclass(frozen=True)
class Prefill:
    """One request through a pair: its prompt, and the future of both legs' replies."""

    prompt: tuple[int, ...]
    replies: Future[tuple[Reply, Reply]]
    shape: TinyModelShape = STANDARD_SHAPE

    def tokens(self) -> list[int]:
        """Its greedy tokens. Raises AssertionError when it was not answered."""
        prefill_reply, decode_reply = self.replies.result(timeout=120)
        assert decode_reply.status == 200, (prefill_reply.body, decode_reply.body)
        assert prefill_reply.status == 200, prefill_reply.body
        tokens: list[int] = decode_reply.body["output_ids"]
        return tokens

    def is_exact(self) -> bool:
        """Whether its tokens are those of Hugging Face."""
        return self.tokens() == greedy_reference(self.prompt, NEW_TOKENS, self.shape)


class Pair:
    """A prefill and a decode engine, and requests to both at once. `shape` has the weights of their model."""

    def __init__(
        self, prefill: Engine, decode: Engine, threads: ThreadPoolExecutor, shape: TinyModelShape = STANDARD_SHAPE
    ) -> None:
        self.prefill, self.decode, self.shape = prefill, decode, shape
        self._threads = threads

    def send(
        self,
        length_tokens: int,
        seed: int,
        *,
        rid: str | None = None,
        priority: str | None = None,
        slo_ms: float | None = None,
        prefix: Sequence[int] = (),
        new_tokens: int = NEW_TOKENS,
        **sampling: Any,
    ) -> Prefill:
        """Start a greedy request of `length_tokens` random tokens after `prefix`."""
        prompt = (*prefix, *random_prompt(length_tokens - len(prefix), seed))
        custom: dict[str, Any] = {}
        if priority is not None:
            custom["sglang_ext_priority"] = priority
        if slo_ms is not None:
            custom["sglang_ext_ttft_slo_ms"] = slo_ms
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling},
        }
        if custom:
            body["sampling_params"]["custom_params"] = custom
        if rid is not None:
            body["rid"] = rid
        replies = self._threads.submit(send_both, self.prefill, self.decode, body)
        return Prefill(prompt, replies, self.shape)

    def fill(self, prompts: int, length_tokens: int, first_seed: int) -> list[Prefill]:
        """Send prompts one after the other, each of which must be exact."""
        sent = []
        for number in range(prompts):
            prefill = self.send(length_tokens, seed=first_seed + number)
            assert prefill.is_exact()
            sent.append(prefill)
        return sent

    def status(self) -> dict[str, Any]:
        """The prefill engine's `GET /laps`."""
        reply = self.prefill.get("/laps")
        assert reply.status == 200, reply.body
        status: dict[str, Any] = reply.body
        return status

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 20.0) -> dict[str, Any]:
        """The first status that meets `condition`. Raises AssertionError when the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.01)

    def wait_for_running(self, *, parked: int) -> None:
        """Wait until one long prefill has its turn and `parked` others are parked, so that the next cannot overtake."""
        self.wait_for(lambda status: status["parked"] == parked and status["long"]["requests"] == parked + 1)

    def is_running(self, prefills: Sequence[Prefill], *, parked: int) -> bool:
        """Return whether one long prefill had its turn while `parked` others were parked, before any of `prefills`
        was answered. A machine that stalls may have answered them all by the time that it is asked."""
        while not any(prefill.replies.done() for prefill in prefills):
            status = self.status()
            if status["parked"] == parked and status["long"]["requests"] == parked + 1:
                return True
            time.sleep(0.01)
        return False

    def abort(self, rid: str, *engines: Engine) -> None:
        """Abort it on these instances, on both without any."""
        for engine in engines or (self.prefill, self.decode):
            assert engine.post("/abort_request", {"rid": rid}).status == 200

    def flush(self, timeout_s: float = 30.0) -> None:
        """Empty both prefix caches. Raises AssertionError when an engine that should be idle believes that it is not.

        A pipeline that has just become idle refuses once: a micro-batch forgets its last batch with its next one.
        """
        for engine in (self.prefill, self.decode):
            deadline = time.monotonic() + timeout_s
            while engine.post("/flush_cache", {}).status != 200:
                assert time.monotonic() < deadline, engine.load()
                time.sleep(0.05)

    def check_clean(self, free_tokens: int) -> None:
        """Nothing is left: queues, the slots of all memory pools, and locks are as at the start."""
        self.prefill.wait_idle()
        self.decode.wait_idle()
        status = self.wait_for(lambda status: status["kv"]["locked_tokens"] == 0)
        assert status["kv"] == {"free_tokens": free_tokens, "locked_tokens": 0}
        assert (status["parked"], status["short"]["requests"], status["long"]["requests"]) == (0, 0, 0)
        for engine in (self.prefill, self.decode):
            check_whole(engine)
        # SGLang refuses to flush while it believes that anything runs, and checks its pools when idle.
        self.flush()
