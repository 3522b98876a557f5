"""Runs chosen iterations on a running instance and reads what it says about their time.

With --enable-metrics SGLang stamps every request: when it joined its first batch and when its prefill ended. A lone
prompt that fits one chunk is one iteration, and so are prompts of one call whose stamps are equal. A prefill instance
runs them against SGLang's stand-in for decode. Cached tokens are real: the prefix is computed first, and the instance
has to say that it found exactly that much in its cache. What ran against the stand-in does not enter the cache, so that
a prefix on a prefill instance takes a decode instance.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

from sglang_ext.planner.profiling.facts import InstanceFacts, InstanceMode, read_facts
from sglang_ext.planner.profiling.http_client import HttpClient, InstanceError
from sglang_ext.planner.profiling.measured_points import BusyRun, MeasuredPace
from sglang_ext.planner.profiling.points import Point

_STAND_IN_DECODE = "2.2.2.2"  # SGLang's name for a decode instance that takes all and needs nothing
_FIRST_TOKEN = 8  # below are special tokens
_SAME_BATCH_S = 5e-4
_QUEUED_CHUNKS = 4
_FIRST_TOKENS_OF = 2
_CHUNKS_BEYOND_STAGES = 2
_FLUSH_S, _FLUSH_AGAIN_S = 10.0, 0.02
_BUSY_PROMPTS, _BUSY_TOKENS = 64, 16


class RunTimes(NamedTuple):
    """One run of a point, by the instance's own clock, and what the client saw around it."""

    duration_s: float  # of the iteration
    before_s: float  # from the instance's receiving of the request to its first iteration
    after_s: float  # from the end of its last iteration to the answer at the client, and the way to the instance


class CutError(InstanceError):
    """The instance did not run the point in one iteration."""


class _Stamps(NamedTuple):
    received_s: float
    entry_s: float  # it joined its first batch
    finished_s: float  # its last prefill iteration ended
    cached_tokens: int


class HttpInstance:
    """A running instance that serves no other client meanwhile."""

    def __init__(self, client: HttpClient, facts: InstanceFacts, decode: HttpClient | None, seed: int) -> None:
        self.facts = facts
        self._client = client
        self._decode = decode
        self._draw = random.Random(seed)
        self._rooms = random.SystemRandom()
        self._prefix = self._tokens(facts.limits.prompt_tokens)
        self._cached_tokens = 0
        self._unused: list[int] = []  # first tokens that no cached prompt goes on with

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        decode_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        seed: int = 0,
    ) -> HttpInstance:
        """InstanceError for an instance that cannot be reached, profiled, or is busy."""
        with ExitStack() as opened:
            client = HttpClient(url, api_key, timeout_s)
            opened.callback(client.close)
            facts = read_facts(client.get("/server_info"), client.get("/model_info"), model)
            decode = None
            if decode_url is not None:
                if facts.mode is not InstanceMode.PREFILL:
                    raise InstanceError(f"--decode needs a prefill instance, {url} is one without disaggregation")
                decode = HttpClient(decode_url, api_key, timeout_s)
                opened.callback(decode.close)
                info = decode.get("/server_info")
                if not isinstance(info, Mapping) or info.get("disaggregation_mode") != "decode":
                    raise InstanceError(f"--decode {decode_url} is no decode instance")
            instance = cls(client, facts, decode, seed)
            instance._require_idle()
            opened.pop_all()
        return instance

    def close(self) -> None:
        """Leave the instance with an empty cache, if it was used. Errors do not matter any more."""
        try:
            if self._unused:
                self._flush()
        except InstanceError:
            pass
        self._client.close()
        if self._decode is not None:
            self._decode.close()

    @property
    def can_cache(self) -> bool:
        """Return whether prefixes can be brought into its cache."""
        return self.facts.mode is InstanceMode.PLAIN or self._decode is not None

    # ---- what is run ----

    def prepare(self, cached_tokens: int) -> None:
        """Empty the cache and compute a prefix of `cached_tokens`, which `run` then finds there."""
        self._flush()
        self._cached_tokens = cached_tokens
        if not cached_tokens:
            return
        prefix = self._prefix[:cached_tokens]
        if not self.can_cache:
            raise InstanceError("a prefill instance caches only what it sends to a decode instance: give --decode")
        if self._decode is None:
            self._generate([prefix])
        else:
            self._hand_over(prefix)

    def run(self, point: Point) -> RunTimes:
        """Run a point; the prefix of its cached tokens has been prepared.

        CutError if it took several iterations, InstanceError where the cache does not hold the prefix.
        """
        if len(self._unused) < point.requests:
            self.prepare(self._cached_tokens)
        prompts = [self._prompt(point.cached_tokens, point.new_tokens) for _ in range(point.requests)]
        sent_s = time.perf_counter()
        stamps = self._generate(prompts)
        wall_s = time.perf_counter() - sent_s
        for stamp in stamps:
            if stamp.cached_tokens != point.cached_tokens:
                raise InstanceError(
                    f"the instance found {stamp.cached_tokens} tokens in its cache instead of {point.cached_tokens}: "
                    "it serves others meanwhile, or its KV cache is too small"
                )
        entry_s = stamps[0].entry_s
        if any(abs(stamp.entry_s - entry_s) > _SAME_BATCH_S for stamp in stamps):
            raise CutError(f"{point} do not run in one batch on this instance")
        duration_s = max(stamp.finished_s for stamp in stamps) - entry_s
        before_s = entry_s - stamps[0].received_s
        if not duration_s > 0:
            raise InstanceError(f"the instance says that {point} took {duration_s:g} s")
        return RunTimes(duration_s, before_s, max(0.0, wall_s - before_s - duration_s))

    def run_counted(self, point: Point) -> RunTimes:
        """`run`, and CutError where the instance counts more than one iteration (it does with LAPS)."""
        before = self._iterations()
        times = self.run(point)
        after = self._iterations()
        if before is not None and after is not None and after - before > 1:
            raise CutError(
                f"the instance runs {point} in {after - before} iterations: LAPS cuts long prompts by time "
                "(--laps-mode off leaves them whole)"
            )
        return times

    def run_queued_chunks(self) -> list[float]:
        """Seconds between the end of an iteration and the start of the next waiting one; empty where unknown."""
        limits = self.facts.limits
        if limits.chunk_tokens is None or _QUEUED_CHUNKS * limits.chunk_tokens > limits.kv_tokens:
            return []
        if limits.chunk_tokens > limits.prompt_tokens or limits.requests < _QUEUED_CHUNKS:
            return []
        self.prepare(0)
        prompts = [self._prompt(0, limits.chunk_tokens) for _ in range(_QUEUED_CHUNKS)]
        stamps = sorted(self._generate(prompts), key=lambda stamp: stamp.entry_s)
        gaps_s = [later.entry_s - earlier.finished_s for earlier, later in pairwise(stamps)]
        return [gap_s for gap_s in gaps_s if gap_s >= 0]

    def run_with_decode(self, prompt_tokens: int) -> RunTimes:
        """A request over both instances: `before_s` has what they agree on, `after_s` lasts until the first token."""
        if not self._unused:
            self.prepare(0)
        stamps, wall_s = self._hand_over(self._prompt(0, prompt_tokens))
        before_s, duration_s = stamps.entry_s - stamps.received_s, stamps.finished_s - stamps.entry_s
        return RunTimes(duration_s, before_s, max(0.0, wall_s - before_s - duration_s))

    def run_busy(self) -> BusyRun:
        """Short prompts over both instances, all at once: what a request costs in addition to its share of
        iterations."""
        prompts = [self._prompt(0, _BUSY_TOKENS) for _ in range(min(_BUSY_PROMPTS, self.facts.limits.requests))]
        with ThreadPoolExecutor(len(prompts)) as legs:
            stamps = list(legs.map(self._hand_over_beside, prompts))
        return _busy_run(stamps)

    def run_pace(self, repeats: int) -> MeasuredPace:
        """Chunks of the longest length through the stages: `repeats` by themselves, and as often several behind each
        other.

        InstanceError where the instance cannot have two more of them under way than it has stages.
        """
        limits, count = self.facts.limits, self.facts.stages + _CHUNKS_BEYOND_STAGES
        tokens = limits.chunk_tokens
        if tokens is None or tokens > limits.prompt_tokens or count * tokens > limits.kv_tokens:
            raise InstanceError(
                f"the time of a stage is measured with {count} prompts of a chunk each: --chunked-prefill-size of the "
                f"instance is {tokens or 'not set'}, its KV cache holds {limits.kv_tokens} tokens"
            )
        passages_s, intervals_s = [], []
        for number in range(repeats + 1):
            self.prepare(0)
            passage_s = self.run(Point(0, tokens)).duration_s
            self.prepare(0)
            stamps = self._generate([self._prompt(0, tokens) for _ in range(count)])
            finished_s = sorted(stamp.finished_s for stamp in stamps)
            if number:  # the first one warms up
                passages_s.append(passage_s)
                intervals_s += [later - earlier for earlier, later in pairwise(finished_s)]
        if not min(intervals_s) > 0:
            raise InstanceError(f"prompts of {tokens} tokens do not run in a chunk each on this instance")
        return MeasuredPace(tokens, tuple(passages_s), tuple(intervals_s))

    # ---- how ----

    def _require_idle(self) -> None:
        loads = self._client.find("/v1/loads")
        entries = loads.get("loads") if isinstance(loads, Mapping) else None
        for entry in entries if isinstance(entries, list) else []:
            busy = sum(int(entry.get(name) or 0) for name in ("num_running_reqs", "num_waiting_reqs"))
            if busy:
                raise InstanceError(f"{self._client.url} serves {busy} requests: profile an instance without traffic")

    def _flush(self) -> None:
        if self.facts.stages == 1:
            self._client.post(f"/flush_cache?timeout={_FLUSH_S:g}", {})
        else:
            self._flush_stages()
        self._cached_tokens = 0
        self._unused = list(range(_FIRST_TOKEN, self.facts.vocabulary))
        self._draw.shuffle(self._unused)
        self._unused.remove(self._prefix[0])

    def _flush_stages(self) -> None:
        """A pipeline's micro-batch forgets its last batch with its next round only, and SGLang refuses until then."""
        deadline_s = time.monotonic() + _FLUSH_S
        while True:
            try:
                self._client.post("/flush_cache", {})
                return
            except InstanceError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(_FLUSH_AGAIN_S)

    def _tokens(self, count: int) -> list[int]:
        return self._draw.choices(range(_FIRST_TOKEN, self.facts.vocabulary), k=count)

    def _prompt(self, cached_tokens: int, new_tokens: int) -> list[int]:
        return [*self._prefix[:cached_tokens], self._unused.pop(), *self._tokens(new_tokens - 1)]

    def _room(self) -> int:
        return self._rooms.getrandbits(62)

    def _iterations(self) -> int | None:
        status = self._client.find("/laps")
        fit = status.get("fit") if isinstance(status, Mapping) else None
        samples = fit.get("samples") if isinstance(fit, Mapping) else None
        return samples if isinstance(samples, int) else None

    def _body(self, input_ids: object, output_tokens: int) -> dict[str, object]:
        return {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
        }

    def _paired_body(self, prompt: Sequence[int], output_tokens: int) -> dict[str, object]:
        """The same for both instances."""
        return {
            **self._body(prompt, output_tokens),
            "bootstrap_host": self._client.host,
            "bootstrap_port": self.facts.bootstrap_port,
            "bootstrap_room": self._room(),
        }

    def _hand_over_beside(self, prompt: Sequence[int]) -> _Stamps:
        """A request over both instances while others are under way."""
        decode = self._decode
        if decode is None:
            raise AssertionError("a hand-over needs a decode instance")
        body = self._paired_body(prompt, 1)
        with ExitStack() as opened, ThreadPoolExecutor(1) as leg:
            prefill_client, decode_client = self._client.another(), decode.another()
            opened.callback(prefill_client.close)
            opened.callback(decode_client.close)
            prefill_leg = leg.submit(prefill_client.post, "/generate", body)
            decode_client.post("/generate", body)
            (stamps,) = _all_stamps([prefill_leg.result()])
        return stamps

    def _hand_over(self, prompt: Sequence[int]) -> tuple[_Stamps, float]:
        """Send a prompt to prefill and decode; the stamps of prefill, and the seconds until decode's first token."""
        decode = self._decode
        if decode is None:
            raise AssertionError("a hand-over needs a decode instance")
        body = self._paired_body(prompt, _FIRST_TOKENS_OF)
        wall_s = None
        with ThreadPoolExecutor(1) as leg:
            sent_s = time.perf_counter()
            prefill_leg = leg.submit(self._client.post, "/generate", body)
            for line in decode.stream("/generate", {**body, "stream": True}):
                if line.startswith(b"data: {") and wall_s is None:
                    wall_s = time.perf_counter() - sent_s
            (stamps,) = _all_stamps([prefill_leg.result()])
        if wall_s is None:
            raise InstanceError(f"{decode.url} answered without a token")
        return stamps, wall_s

    def _generate(self, prompts: Sequence[Sequence[int]]) -> list[_Stamps]:
        """Prefill all prompts, sent in one call."""
        body = self._body(prompts, 1)
        if self.facts.mode is InstanceMode.PREFILL:
            body["bootstrap_host"] = [_STAND_IN_DECODE] * len(prompts)
            body["bootstrap_room"] = [self._room() for _ in prompts]
        return _all_stamps(self._client.post("/generate", body))


def _busy_run(stamps: Sequence[_Stamps]) -> BusyRun:
    """Count requests that joined at the same time as one batch."""
    entries_s = sorted(stamp.entry_s for stamp in stamps)
    batches = [1]
    for earlier_s, later_s in pairwise(entries_s):
        if later_s - earlier_s > _SAME_BATCH_S:
            batches.append(0)
        batches[-1] += 1
    return BusyRun(_BUSY_TOKENS, tuple(batches), max(stamp.finished_s for stamp in stamps) - entries_s[0])


def _all_stamps(answer: object) -> list[_Stamps]:
    if not isinstance(answer, list) or not answer:
        raise InstanceError("/generate did not answer with a list of results")
    return [_stamps(result) for result in answer]


def _stamps(result: object) -> _Stamps:
    meta = result.get("meta_info") if isinstance(result, Mapping) else None
    if not isinstance(meta, Mapping):
        raise InstanceError("/generate answered without meta_info")
    finish = meta.get("finish_reason")
    if isinstance(finish, Mapping) and finish.get("type") == "abort":
        raise InstanceError(f"the instance refused a request: {finish.get('message', 'no reason given')}")
    values = [meta.get(name) for name in ("request_received_ts", "forward_entry_time", "prefill_finished_time")]
    if not all(isinstance(value, int | float) for value in values):
        raise InstanceError("the answers have no forward_entry_time: this SGLang does not stamp requests")
    received_s, entry_s, finished_s = (float(value) for value in values if isinstance(value, int | float))
    cached_tokens = meta.get("cached_tokens")
    if not isinstance(cached_tokens, int):
        raise InstanceError("the instance does not report cached_tokens: start it with --enable-cache-report")
    return _Stamps(received_s, entry_s, finished_s, cached_tokens)
