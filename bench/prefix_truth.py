"""Describes how much of what instances have cached the routers find: by the instances' KV events, and by what was sent.

    python bench/prefix_truth.py [--requests 240]

Three prefill instances of real SGLang with little KV and one decode instance, two routers that know nothing of each
other, and conversations whose turns come to either of them. A third router, which the two do not see, sends other
prompts to instances drawn at random, so that prefixes are evicted. The same conversations run with events, without,
without and with, over empty caches. This program follows the events, too, and so knows what each instance holds.

- `hit_share_events`, `hit_share_estimated`: tokens of the prompts that the chosen instance held, over those that some
  instance held
- `ttft_p50_ratio`: the median time to the first token with events, over that without

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.decide.block_index import BlockIndex, TokenBlocks
from sglang_ext_router.instances.kv_events import KvEvents
from sglang_ext_router.instances.probe import read_kv_events
from sglang_ext_router.instances.workers import Worker
from support.engines import BenchEngine, running_router
from support.random_model import RandomLlama, build_random_llama
from support.result import BenchmarkRun, benchmark_parser, progress

MODEL = RandomLlama(layers=4, hidden=256, heads=4, kv_heads=2)
PAGE_TOKENS = 16
KV_TOKENS = 6144  # of each prefill instance
PREFILL_INSTANCES = 3
CONVERSATIONS = 16
CONVERSATIONS_PER_SYSTEM = 4
SYSTEM_TOKENS = 256
TURN_TOKENS = (40, 160)
LONGEST_TOKENS = 1600  # then a conversation begins again
FOREIGN_TOKENS = (200, 800)
FOREIGN_SHARE = 0.5  # foreign requests for each turn
AT_ONCE = 3
WARM_UP_SHARE = 0.25  # of the turns, which are not counted
SETTLED_S = 3.0


class Truth:
    """What each instance holds."""

    def __init__(self, engines: Sequence[BenchEngine]) -> None:
        self._index = BlockIndex(1_000_000)
        self.events = KvEvents(asyncio.get_running_loop(), self._index)
        self._workers = []
        for number, engine in enumerate(engines):
            worker = Worker(number, WorkerAddress(engine.url, Role.BOTH, None), RouterConfig())
            worker.kv_events = read_kv_events(worker.host, engine.get("/server_info"))
            assert worker.kv_events is not None, "the instance publishes no events"
            self.events.follow(worker)
            self._workers.append(worker)

    def held_tokens(self, prompt: list[int]) -> dict[str, int]:
        """Return how many of the prompt's tokens an instance would find, by its URL."""
        matched = self._index.matched(TokenBlocks(array("q", prompt).tobytes()).of(PAGE_TOKENS))
        most_tokens = (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        return {
            worker.url: min(most_tokens, PAGE_TOKENS * matched.get(self.events.ranks(worker)[0].source, 0))
            for worker in self._workers
        }


class Conversations:
    """Turns of several conversations, each drawn from its own numbers."""

    def __init__(self) -> None:
        self._draws = [random.Random(number) for number in range(CONVERSATIONS)]
        self._prompts = [self._begin(number) for number in range(CONVERSATIONS)]
        self.idle = list(range(CONVERSATIONS))

    def _begin(self, number: int) -> list[int]:
        system = random.Random(1000 + number // CONVERSATIONS_PER_SYSTEM)
        return [system.randrange(10, MODEL.vocabulary) for _ in range(SYSTEM_TOKENS)]

    def turn(self, number: int) -> list[int]:
        """Return the next prompt: all before it, a reply, and what the client says to it."""
        draws = self._draws[number]
        if len(self._prompts[number]) > LONGEST_TOKENS:
            self._prompts[number] = self._begin(number)
        self._prompts[number] += [draws.randrange(10, MODEL.vocabulary) for _ in range(draws.randint(*TURN_TOKENS))]
        return list(self._prompts[number])


@dataclass
class Found:
    """What came of the turns with events, or without."""

    found_tokens: int = 0
    held_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.found_tokens / self.held_tokens

    @property
    def ttft_p50_ms(self) -> float:
        return 1000 * statistics.median(self.ttfts_s)


async def serve(
    session: aiohttp.ClientSession, truth: Truth, routers: Sequence[str], foreign: str, turns: int, found: Found
) -> None:
    """Play the conversations once."""
    conversations, draws = Conversations(), random.Random(7)
    started = 0

    async def ask(url: str, prompt: list[int]) -> str:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        async with session.post(url + "/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
            return reply.headers["x-sglang-ext-prefill"]

    async def play() -> None:
        nonlocal started
        while started < turns:
            started += 1
            is_counted = started > WARM_UP_SHARE * turns
            number = conversations.idle.pop(draws.randrange(len(conversations.idle)))
            prompt = conversations.turn(number)
            held = truth.held_tokens(prompt)
            began_s = time.monotonic()
            chosen = await ask(draws.choice(routers), prompt)
            if is_counted:
                found.ttfts_s.append(time.monotonic() - began_s)
                found.found_tokens += held[chosen]
                found.held_tokens += max(held.values())
            conversations.idle.append(number)
            if draws.random() < FOREIGN_SHARE:
                await ask(foreign, [draws.randrange(10, 4000) for _ in range(draws.randint(*FOREIGN_TOKENS))])

    await asyncio.gather(*(play() for _ in range(AT_ONCE)))


async def compare(prefills: Sequence[BenchEngine], decode: BenchEngine, turns: int) -> dict[str, object]:
    """Play the same conversations with events and without."""
    truth = Truth(prefills)
    words = [word for engine in prefills for word in ("--prefill", engine.url, str(engine.bootstrap_port))]
    words += ["--decode", decode.url, "--accept-any-model"]
    instances = len(prefills) + 1
    events, estimated = Found(), Found()
    without = ("--set", "placement.kv_events=false")
    rounds: tuple[tuple[Found, tuple[str, ...]], ...] = (
        (events, ()),
        (estimated, without),
        (estimated, without),
        (events, ()),
    )
    async with aiohttp.ClientSession() as session:
        for found, options in rounds:
            for engine in (*prefills, decode):
                await asyncio.to_thread(engine.post, "/flush_cache", {})
            with ExitStack() as stack:
                running = [
                    await asyncio.to_thread(stack.enter_context, running_router([*words, *router_options], instances))
                    for router_options in (options, options, ("--prefill-policy", "random"))
                ]
                await asyncio.sleep(SETTLED_S)
                await serve(session, truth, running[:2], running[2], turns, found)
            progress(f"{' '.join(options) or 'events'}: {found.share:.3f}, {found.ttft_p50_ms:.0f} ms")
    await truth.events.stop()
    return {
        "hit_share_events": round(events.share, 3),
        "hit_share_estimated": round(estimated.share, 3),
        "ttft_p50_ratio": round(events.ttft_p50_ms / estimated.ttft_p50_ms, 3),
        "ttft_p50_ms": {"events": round(events.ttft_p50_ms, 1), "estimated": round(estimated.ttft_p50_ms, 1)},
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=240, help="turns of all conversations (default %(default)s)")
    options = parser.parse_args()
    run = BenchmarkRun("sglang", "torch")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefix-truth-")))
        model = build_random_llama(MODEL, scratch / "model")
        pages = ("--page-size", str(PAGE_TOKENS))
        little = (*pages, "--max-total-tokens", str(KV_TOKENS))
        engines = []
        for role in (*("both",) * PREFILL_INSTANCES, "decode"):
            arguments = pages if role == "decode" else little
            engine = BenchEngine.start(role, model, scratch, engine_arguments=arguments)
            stack.callback(engine.stop)
            engines.append(engine)
        stack.callback(lambda: [engine.terminate() for engine in engines])
        for engine in engines:
            engine.wait_ready()
        figures = uvloop.run(compare(engines[:-1], engines[-1], options.requests))
    run.end({**figures, "requests": options.requests}, options.out / "prefix-truth.json")


if __name__ == "__main__":
    main()
