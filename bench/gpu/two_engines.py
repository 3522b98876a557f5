"""Engines that share one device: answers through prefill and decode, and a long pool of two, are those of one instance.

    python bench/gpu/two_engines.py [--out FILE] [--arrangements handshake,default,pool] [--within 150]

`handshake`: a prefill and a decode instance, KV by the handshake backend. `default`: the same by the backend that a
worker takes by itself (NIXL or mooncake on a GPU). `pool`: two members that share long prompts, and a decode instance.

A random model in float32 whose logits lie apart answers greedily, first new prompts, then each prompt with its answer
and more behind it, which is cached at both sides. Prefills have both queues and, on a GPU, graphs. Another order of
additions may turn a choice where two tokens are nearly as good: that is a tie, and counted. Each run shows that the
comparison can see wrong KV: `control_equal` is the share of answers that stay the same when all of a prompt but its
last token is another.

On a GPU all engines start at once; each arrangement's result is written as it comes. Where a worker refuses what is
asked of it, its words are the failure.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gpu.checkout  # noqa: F401
from gpu.measure import HAS_GPU, Report, parser
from gpu.serve import entry_point_folder
from gpu.sglang_runner import FLOAT32_ENVIRONMENT

if HAS_GPU:
    os.environ |= FLOAT32_ENVIRONMENT  # before engines take their environment from it

from sglang_ext.types import Role
from support.engines import PLAIN_SERVER, Engine, EngineSpec
from support.long_pool import Coordinator
from support.pd import greedy
from support.reference import random_prompt
from support.tiny_model import TinyModelShape

SHAPE = TinyModelShape(layers=4, hidden=256, context_tokens=4096)
LENGTHS_TOKENS = (3, 9, 24, 60, 130, 300, 700, 1500)
POOL_FROM_TOKENS = 200
NEW_TOKENS, ADDED_TOKENS = 16, 20
# Natural logarithm between the best two tokens: errors in float32 are far below.
TIE = 0.02
MAX_TIES, MAX_CONTROL_EQUAL = 0.25, 0.25
REFUSED = 2  # exit status of a worker that does not start
CUDA_ARGUMENTS = (
    *("--dtype", "float32", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    # The number of tokens is the limit; the fraction is of what engines leave each other.
    *("--grammar-backend", "none", "--mem-fraction-static", "0.6", "--max-total-tokens", "65536"),
    *("--cuda-graph-max-bs-decode", "16"),
)
GRAPHS = ("--laps-graphs", "start", "--set", "graphs.lengths_tokens=8,32,64", "--set", "graphs.batch_sizes=1,4")


class Answer(NamedTuple):
    """Greedy tokens, and by how much each was better than the next best."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Deviation(NamedTuple):
    """The first token that is not the same."""

    prompt_tokens: int
    at: int
    gap: float


class Arrangement(NamedTuple):
    """Engines that were started; `ask` gets the number of a prompt and the prompt, and returns greedy tokens."""

    engines: list[Engine]
    ask: Callable[[int, Sequence[int]], list[int]]
    facts: Callable[[], dict[str, Any]]  # at the end


def deviation(prompt_tokens: int, expected: Answer, tokens: Sequence[int]) -> Deviation | None:
    """Return where `tokens` leave what was expected; None where they do not."""
    both = zip(expected.tokens, tokens, strict=False)
    at = next((at for at, (wanted, got) in enumerate(both) if wanted != got), None)
    if at is None:
        at = min(len(expected.tokens), len(tokens))
        if at == max(len(expected.tokens), len(tokens)):
            return None
    return Deviation(prompt_tokens, at, expected.gaps[at] if at < len(expected.gaps) else float("inf"))


def summary(found: Sequence[Deviation | None], control_equal: float) -> dict[str, Any]:
    """Return the comparison as plain JSON values."""
    ties = [choice for choice in found if choice is not None and choice.gap < TIE]
    different = [choice for choice in found if choice is not None and choice.gap >= TIE]
    return {
        "answers": len(found),
        "equal": len(found) - len(ties) - len(different),
        "ties": len(ties),
        "different": [choice._replace(gap=min(choice.gap, 1e9))._asdict() for choice in different],
        "control_equal": control_equal,
    }


def engine_arguments(has_gpu: bool) -> tuple[str, ...]:
    """Return SGLang's own arguments, of every engine."""
    return ("--chunked-prefill-size", "256", *(CUDA_ARGUMENTS if has_gpu else ()))


class Engines:
    """Starts engines and ends them all."""

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self._stack = ExitStack()
        folder = self._stack.enter_context(entry_point_folder())
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        self._environment = (("PYTHONPATH", path),) if folder else ()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self, spec: EngineSpec) -> Engine:
        """Return an engine that is starting."""
        arguments = (*engine_arguments(HAS_GPU), *spec.arguments)
        changed = {"shape": SHAPE, "arguments": arguments, "environment": self._environment, "has_own_imports": HAS_GPU}
        engine = Engine.start(replace(spec, **changed))
        self._stack.callback(engine.stop)
        return engine

    def wait(self, engine: Engine) -> None:
        """Return when the engine serves. Raises RuntimeError with the end of its log, or a refusal's words."""
        try:
            engine.wait_ready(max(1.0, self._end_s - time.perf_counter()))
        except AssertionError as error:
            tail = engine.log_tail()
            is_refusal = engine.process.poll() == REFUSED and bool(tail)
            raise RuntimeError(f"refused: {tail.splitlines()[-1]}" if is_refusal else str(error)) from error

    def pair(self, name: str) -> Arrangement:
        """Start prefill and decode with the backend `name`."""
        options = ("--transfer-backend", "auto" if name == "default" else name)
        prefill = self.start(EngineSpec(Role.BOTH, worker_options=(*options, *GRAPHS), name=f"{name}-prefill"))
        decode = self.start(EngineSpec(Role.DECODE, worker_options=options, name=f"{name}-decode"))

        def facts() -> dict[str, Any]:
            backend = prefill.get("/server_info").body["disaggregation_transfer_backend"]
            return {"backend": backend, "graphs": prefill.get("/laps").body.get("graphs")}

        return Arrangement([prefill, decode], lambda number, prompt: greedy(prefill, decode, prompt, NEW_TOKENS), facts)

    def pool(self) -> Arrangement:
        """Start two members of a long pool, and decode."""
        coordinator = self._stack.enter_context(Coordinator.prepared("--sp-sizes", "1,2", "--min-chunk-tokens", "64"))
        coordinator.start_again()
        backend = ("--transfer-backend", "handshake")
        options = (
            *(*backend, "--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(POOL_FROM_TOKENS)),
            *("--laps-boundary-tokens", str(POOL_FROM_TOKENS)),
        )
        members = [self.start(EngineSpec(Role.LONG, worker_options=options, name=f"member-{n}")) for n in (1, 2)]
        decode = self.start(EngineSpec(Role.DECODE, worker_options=backend, name="pool-decode"))

        def ask(number: int, prompt: Sequence[int]) -> list[int]:
            return greedy(members[number % 2], decode, prompt, NEW_TOKENS)

        def facts() -> dict[str, Any]:
            return {"backend": "handshake", "shared": coordinator.shared}

        return Arrangement([*members, decode], ask, facts)


def answer_of_one(engine: Engine, prompt: Sequence[int]) -> Answer:
    """Return what one ordinary instance answers. Raises RuntimeError."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    reply = engine.post("/generate", body)
    if reply.status != 200:
        raise RuntimeError(f"one instance answers {reply.status}: {str(reply.body)[:200]}")
    best_two = reply.body["meta_info"]["output_top_logprobs"]
    return Answer(tuple(reply.body["output_ids"]), tuple(best[0] - next_best[0] for best, next_best in best_two))


def compare(ask: Callable[[int, Sequence[int]], list[int]], single: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """Compare both turns of every prompt, all prompts of a turn at once; `single` is one ordinary instance."""
    draw = random.Random(3)
    prompts = [random_prompt(length, seed, SHAPE) for seed, length in enumerate(lengths)]
    found: list[Deviation | None] = []
    control: list[bool] = []
    with ThreadPoolExecutor(len(prompts)) as threads:
        for turn in range(2):
            got = list(threads.map(ask, range(len(prompts)), prompts))
            expected = [answer_of_one(single, prompt) for prompt in prompts]
            found += [deviation(len(prompt), *pair) for prompt, *pair in zip(prompts, expected, got, strict=True)]
            if turn == 0:
                others = [
                    [*random_prompt(len(prompt) - 1, 1000 + len(prompt), SHAPE), prompt[-1]] for prompt in prompts
                ]
                both = zip(others, expected, strict=True)
                control = [answer_of_one(single, other).tokens == answer.tokens for other, answer in both]
            prompts = [
                [*prompt, *answer.tokens, *random_prompt(ADDED_TOKENS, draw.randrange(10**6), SHAPE)]
                for prompt, answer in zip(prompts, expected, strict=True)
            ]
    return summary(found, sum(control) / len(control))


def judge(report: Report, name: str, found: dict[str, Any]) -> None:
    """Check an arrangement: the same answers, by a comparison that would have seen others."""
    answers = found["answers"]
    report.check(f"{name}: answers that are one instance's", (found["equal"] + found["ties"]) / answers, at_least=1)
    report.check(f"{name}: ties, of all answers", found["ties"] / answers, at_most=MAX_TIES)
    report.check(f"{name}: answers unchanged by another prompt", found["control_equal"], at_most=MAX_CONTROL_EQUAL)
    if name == "pool":
        report.check(f"{name}: prompts that both members computed", found["shared"], at_least=1)
    elif HAS_GPU:
        replays = sum((found["graphs"] or {}).get("replays", {}).values())
        report.check(f"{name}: prefills on a captured shape", replays, at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--arrangements", default="handshake,default,pool", help="in this order")
    options.add_argument("--within", type=float, default=150.0, help="no engine is waited for longer (s; default: 150)")
    given = options.parse_args(argv)
    names = given.arrangements.split(",")
    if set(names) - {"handshake", "default", "pool"}:
        options.error(f"--arrangements {given.arrangements}: some of handshake,default,pool")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that engines are ended
    lengths = LENGTHS_TOKENS[1::2] if given.dry_run else LENGTHS_TOKENS
    end_s = time.perf_counter() + (600.0 if given.dry_run else given.within)
    report = Report("two-engines", given.out, given.dry_run)
    report.expect(
        "answers", f"all {2 * len(lengths)} are one instance's, none for another prompt; pool: prompts shared"
    )
    arrangements: dict[str, Any] = {}
    with Engines(end_s) as engines:
        single = engines.start(replace(PLAIN_SERVER, name="one-instance"))

        def start(name: str) -> Arrangement:
            return engines.pool() if name == "pool" else engines.pair(name)

        # A GPU's machine has cores for the imports of all.
        started = {name: start(name) for name in names if HAS_GPU}
        for name in names:
            began_s = time.perf_counter()
            try:
                arrangement = started.get(name) or start(name)
                for engine in (*arrangement.engines, single):
                    engines.wait(engine)
                ready_s = time.perf_counter()
                found = {
                    "start_s": ready_s - began_s,
                    **compare(arrangement.ask, single, lengths),
                    **arrangement.facts(),
                }
                found["compare_s"] = time.perf_counter() - ready_s
            except Exception as error:
                traceback.print_exc()
                report.fail(name, error)
                found = {"error": str(error)[-3000:]}
            else:
                judge(report, name, found)
                for engine in arrangement.engines:
                    engine.stop()
            report.record(arrangements=arrangements | {name: found})
            arrangements[name] = found
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
