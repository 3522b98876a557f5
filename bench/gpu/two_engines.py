"""Two engines on one device: answers of prefill and decode, and of a long pool of two, are those of one instance.

    python -m gpu.two_engines --arrangement {handshake,default,pool} --out FILE

`handshake`: a prefill instance and a decode instance, KV by the handshake backend. `default`: the same by what a worker
takes by itself (NIXL or mooncake on a GPU). `pool`: two members that share long prompts, and a decode instance. What a
worker refuses on this device is recorded with its words, as `not_possible`.

A random model in float32 whose logits lie apart answers greedily, first new prompts, then each prompt with its answer
and more behind it, which is cached at both sides. Prefills have both queues and, on a GPU, graphs. Another order of
additions may turn a choice where two tokens are nearly as good: that is a tie, and counted. Whether the comparison can
see wrong KV is measured, too: `control_equal` is the share of answers that stay the same when all of a prompt but its
last token is another one.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gpu.figure6 import entry_point_folder, last_error
from gpu.stage_plan import ARRANGEMENTS
from sglang_ext.types import Role
from support.engines import PLAIN_SERVER, Engine, EngineSpec
from support.long_pool import Coordinator
from support.pd import greedy
from support.reference import random_prompt
from support.result import progress, write_json
from support.tiny_model import TinyModelShape

# Heads of 64, four and two of them: for these the engine's kernels are compiled beforehand.
SHAPE = TinyModelShape(layers=4, hidden=256, context_tokens=4096)
LENGTHS_TOKENS = (3, 9, 24, 60, 130, 300, 700, 1500)
POOL_FROM_TOKENS = 200
NEW_TOKENS = 16
ADDED_TOKENS = 20
# Natural logarithm between the best two tokens: errors in float32 are far below. In tf32 they would not be, hence
# another way for Triton to multiply (`h200.py`).
TIE = 0.02
START_TIMEOUT_S = 180.0
REFUSED = 2  # exit status of a worker that does not start
CUDA_ARGUMENTS = (
    *("--dtype", "float32", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--mem-fraction-static", "0.2", "--max-total-tokens", "65536"),
    *("--cuda-graph-max-bs-decode", "16"),
)
GRAPHS = ("--laps-graphs", "start", "--set", "graphs.lengths_tokens=8,32,64", "--set", "graphs.batch_sizes=1,4")


class NotPossibleError(RuntimeError):
    """A worker refuses what was asked of it; the message is its own line."""


class Answer(NamedTuple):
    """Greedy tokens, and by how much each was better than the next best."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Deviation(NamedTuple):
    """The first token that is not the same."""

    prompt_tokens: int
    at: int
    gap: float


def deviation(prompt_tokens: int, expected: Answer, tokens: Sequence[int]) -> Deviation | None:
    """Return where `tokens` leave what was expected; None where they do not."""
    same = next((at for at, pair in enumerate(zip(expected.tokens, tokens, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        same = min(len(expected.tokens), len(tokens))
        if same == max(len(expected.tokens), len(tokens)):
            return None
    return Deviation(prompt_tokens, same, expected.gaps[same] if same < len(expected.gaps) else float("inf"))


def summary(found: Sequence[Deviation | None], control_equal: float) -> dict[str, Any]:
    """The comparison as plain JSON values."""
    ties = [choice for choice in found if choice is not None and choice.gap < TIE]
    different = [choice for choice in found if choice is not None and choice.gap >= TIE]
    return {
        "answers": len(found),
        "equal": len(found) - len(ties) - len(different),
        "ties": len(ties),
        "different": [one._replace(gap=min(one.gap, 1e9))._asdict() for one in different],
        "control_equal": control_equal,
    }


def engine_arguments(has_gpu: bool) -> tuple[str, ...]:
    """SGLang's own, of every engine."""
    return ("--chunked-prefill-size", "256", *(CUDA_ARGUMENTS if has_gpu else ()))


class Engines:
    """Starts engines one after the other, as each takes a share of the device's free memory; ends them all."""

    def __init__(self, has_gpu: bool, end_s: float) -> None:
        self._has_gpu = has_gpu
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
        """A ready engine. Raises NotPossibleError, or RuntimeError with the last error of its log."""
        engine = Engine.start(
            replace(
                spec,
                shape=SHAPE,
                arguments=(*engine_arguments(self._has_gpu), *spec.arguments),
                environment=self._environment,
                has_own_imports=self._has_gpu,
            )
        )
        self._stack.callback(engine.stop)
        started_s = time.perf_counter()
        try:
            engine.wait_ready(max(1.0, min(START_TIMEOUT_S, self._end_s - started_s)))
        except AssertionError as error:
            cause = last_error(engine.log_path)
            if engine.process.poll() == REFUSED:
                raise NotPossibleError(cause.removeprefix("sglang-ext worker: ")) from error
            progress(str(error))
            raise RuntimeError(f"the {spec.name} engine did not start: {cause}") from error
        progress(f"{spec.name} is ready after {time.perf_counter() - started_s:.0f} s")
        return engine

    def coordinator(self) -> Coordinator:
        """Of a long pool: to be started."""
        return self._stack.enter_context(Coordinator.prepared("--sp-sizes", "1,2", "--min-chunk-tokens", "64"))


Ask = Callable[[int, Sequence[int]], list[int]]  # the number of a prompt, and the prompt


def pair(engines: Engines, backend: str, found: dict[str, Any]) -> Ask:
    """Prefill and decode. Raises NotPossibleError."""
    options = ("--transfer-backend", backend)
    prefill = engines.start(EngineSpec(Role.BOTH, worker_options=(*options, *GRAPHS), name="prefill"))
    decode = engines.start(EngineSpec(Role.DECODE, worker_options=options, name="decode"))
    found["backend"] = prefill.get("/server_info").body["disaggregation_transfer_backend"]

    def ask(number: int, prompt: Sequence[int]) -> list[int]:
        return greedy(prefill, decode, prompt, NEW_TOKENS)

    found["finish"] = lambda: {"graphs": prefill.get("/laps").body.get("graphs")}
    return ask


def pool(engines: Engines, found: dict[str, Any]) -> Ask:
    """Two members of a long pool, and decode. Raises NotPossibleError."""
    coordinator = engines.coordinator()
    backend = ("--transfer-backend", "handshake")
    options = (
        *(*backend, "--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(POOL_FROM_TOKENS)),
        *("--laps-boundary-tokens", str(POOL_FROM_TOKENS)),
    )
    members = [engines.start(EngineSpec(Role.LONG, worker_options=options, name=f"member {n}")) for n in (1, 2)]
    decode = engines.start(EngineSpec(Role.DECODE, worker_options=backend, name="decode"))
    # Not before the members: those that are refused need none, and members wait for it.
    coordinator.start_again()
    coordinator.wait_for(lambda status: len(status["members"]) == 2)

    def ask(number: int, prompt: Sequence[int]) -> list[int]:
        return greedy(members[number % 2], decode, prompt, NEW_TOKENS)

    found["backend"] = "handshake"
    found["finish"] = lambda: {
        "shared": sum(coordinator.status()[name] for name in ("requests_collected", "requests_streamed"))
    }
    return ask


def answer_alone(engine: Engine, prompt: Sequence[int]) -> Answer:
    """Return what one ordinary instance answers."""
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


def compare(ask: Ask, alone: Engine, lengths_tokens: Sequence[int]) -> dict[str, Any]:
    """Both turns of every prompt, all prompts of a turn at once."""
    draw = random.Random(3)
    prompts = [random_prompt(length, seed, SHAPE) for seed, length in enumerate(lengths_tokens)]
    found: list[Deviation | None] = []
    control: list[bool] = []
    with ThreadPoolExecutor(len(prompts)) as threads:
        for turn in range(2):
            got = list(threads.map(ask, range(len(prompts)), prompts))
            expected = [answer_alone(alone, prompt) for prompt in prompts]
            found += [
                deviation(len(prompt), one, tokens) for prompt, one, tokens in zip(prompts, expected, got, strict=True)
            ]
            if turn == 0:
                others = [[*random_prompt(len(one) - 1, 1000 + len(one), SHAPE), one[-1]] for one in prompts]
                control = [
                    answer_alone(alone, other).tokens == one.tokens for other, one in zip(others, expected, strict=True)
                ]
            prompts = [
                [*prompt, *one.tokens, *random_prompt(ADDED_TOKENS, draw.randrange(10**6), SHAPE)]
                for prompt, one in zip(prompts, expected, strict=True)
            ]
    return summary(found, sum(control) / len(control))


def measure(arrangement: str, has_gpu: bool, end_s: float, record: Callable[[dict[str, Any]], None]) -> None:
    """`record` gets what there is, and why there is no more."""
    found: dict[str, Any] = {}
    with Engines(has_gpu, end_s) as engines:
        try:
            if arrangement == "pool":
                ask = pool(engines, found)
            else:
                ask = pair(engines, "auto" if arrangement == "default" else arrangement, found)
            finish = found.pop("finish")
            record(found)
            alone = engines.start(replace(PLAIN_SERVER, name="one instance"))
            record(compare(ask, alone, LENGTHS_TOKENS))
            record(finish())
        except NotPossibleError as error:
            record({"not_possible": str(error)})
        except (RuntimeError, AssertionError, OSError) as error:
            record({"error": (str(error).splitlines() or [type(error).__name__])[0]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrangement", choices=ARRANGEMENTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--within", type=float, default=500.0, help="no engine is waited for longer (s; default: 500)")
    arguments = parser.parse_args()
    end_s = time.perf_counter() + arguments.within
    import torch

    found: dict[str, Any] = {}

    def record(more: dict[str, Any]) -> None:
        found.update(more)
        write_json(arguments.out, found)

    record({})
    measure(arguments.arrangement, torch.cuda.is_available(), end_s, record)
    progress(str(found.get("error", found)))
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
