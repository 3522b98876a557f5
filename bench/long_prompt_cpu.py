"""One long prompt in chunks on one core: SGLang's attention for CPUs, and at the cost of the new tokens.

    python bench/long_prompt_cpu.py [--rounds 3] [--full] [--out FOLDER]

SmolLM2-135M in float32 on real SGLang with its own scheduler (`--laps-mode off`), prompts of 1,024 to 7,168 random
tokens in chunks of 512, one thread pinned to the first core, SGLang's stand-in for decode. Three instances, side by
side, one at work at a time, medians of the rounds:

- before: SGLang computes attention itself (`SGLANG_EXT_STOCK_CPU_ATTENTION=1`), as if a chunk's whole prefix were new;
- after: what every engine on a CPU does, attention of the new tokens;
- unchunked: as after, a prompt of 4,096 tokens in one chunk, which has no prefix that could be computed again.

`--full` also takes the longest prompts before (minutes each), which are left out otherwise.

The last line is `RESULT {json}`: `s_4096` and `s_7168` = seconds after; `ratio_to_unchunked_4096` = 4,096 tokens in
chunks of 512 over one chunk of 4,096; `growth_exponent` = e in time ~ tokens^e from 1,024 to 7,168 tokens, after;
`before_s` and `after_s` = seconds by length; `speedup_4096` = before over after. Each with `_cpu` is the same in
seconds of processor time of the instance, which other load on the machine lengthens less.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sglang_ext.cpu.models.smollm2 import ModelError, ensure_smollm2
from sglang_ext.cpu.prefix_attention import STOCK_ATTENTION_VARIABLE
from support.cdsp_pool import Sent
from support.engines import BenchEngine, EngineStartError
from support.processor_time import processor_time_s
from support.result import BenchmarkRun, benchmark_parser, give_up, progress

VOCABULARY = 49152
CHUNK_TOKENS = 512
LENGTHS_TOKENS = (1024, 2048, 3072, 4096, 5120, 7168)
UNCHUNKED_TOKENS = 4096
SLOW_FROM_TOKENS = 5000  # such prompts take minutes before
WARM_UP_TOKENS = 600
BEFORE, AFTER, UNCHUNKED = "before", "after", "unchunked"


class Prefill(NamedTuple):
    """Until the instance has answered, and its processor time."""

    wall_s: float
    cpu_s: float


Prefills = dict[tuple[str, int], list[Prefill]]  # of each round, by instance and tokens


def main() -> None:
    """Run the benchmark and print the result line."""
    arguments = _arguments()
    core = min(os.sched_getaffinity(0))
    benchmark = BenchmarkRun("sglang", "torch")
    try:
        model = ensure_smollm2()
        with tempfile.TemporaryDirectory(prefix="long-prompt-cpu-") as scratch, ExitStack() as stack:
            engines = _start(model, Path(scratch), core, stack)
            prefills = _measure(engines, arguments.rounds, is_full=arguments.full)
    except (EngineStartError, ModelError) as error:
        give_up(str(error))
    result = {
        **_summary({key: median(one.wall_s for one in ones) for key, ones in prefills.items()}),
        **_cpu_summary({key: median(one.cpu_s for one in ones) for key, ones in prefills.items()}),
        "chunk_tokens": CHUNK_TOKENS,
        "rounds": arguments.rounds,
        "measured": {
            f"{name} {tokens}": [[round(value, 2) for value in one] for one in ones]
            for (name, tokens), ones in prefills.items()
        },
    }
    benchmark.end(result, arguments.out / "long-prompt-cpu.json")


def _start(model: Path, scratch: Path, core: int, stack: ExitStack) -> dict[str, BenchEngine]:
    def engine(chunk_tokens: int, environment: Mapping[str, str]) -> BenchEngine:
        return BenchEngine.start(
            "long",
            model,
            scratch,
            worker_options=("--laps-mode", "off"),
            engine_arguments=("--chunked-prefill-size", str(chunk_tokens)),
            environment=environment,
        )

    engines = {
        BEFORE: engine(CHUNK_TOKENS, {STOCK_ATTENTION_VARIABLE: "1"}),
        AFTER: engine(CHUNK_TOKENS, {STOCK_ATTENTION_VARIABLE: "0"}),
        UNCHUNKED: engine(2 * UNCHUNKED_TOKENS, {STOCK_ATTENTION_VARIABLE: "0"}),
    }
    for one in engines.values():
        stack.callback(one.stop)
    stack.callback(lambda: [one.terminate() for one in engines.values()])
    for one in engines.values():
        one.wait_ready()
        one.pin({core})
    progress(f"three instances are up, pinned to core {core}")
    return engines


def _measure(engines: Mapping[str, BenchEngine], rounds: int, *, is_full: bool) -> Prefills:
    for engine in engines.values():
        _prefill(engine, WARM_UP_TOKENS)
    prefills: Prefills = defaultdict(list)
    for number in range(1, rounds + 1):
        for tokens in LENGTHS_TOKENS:
            names = [AFTER]
            if is_full or tokens < SLOW_FROM_TOKENS:
                names.insert(0, BEFORE)
            if tokens == UNCHUNKED_TOKENS:
                names.append(UNCHUNKED)
            for name in names:
                prefills[name, tokens].append(_prefill(engines[name], tokens))
            measured = ", ".join(f"{name} {prefills[name, tokens][-1].wall_s:.2f} s" for name in names)
            progress(f"round {number} of {rounds}, {tokens} tokens: {measured}")
    return prefills


def _prefill(engine: BenchEngine, tokens: int) -> Prefill:
    cpu_s = processor_time_s(engine.process.pid)
    wall_s = Sent(engine, None, tokens, VOCABULARY).wait().prefill_s
    return Prefill(wall_s, processor_time_s(engine.process.pid) - cpu_s)


def _summary(medians_s: Mapping[tuple[str, int], float]) -> dict[str, object]:
    after, before = _by_tokens(medians_s, AFTER), _by_tokens(medians_s, BEFORE)
    unchunked_s = medians_s[UNCHUNKED, UNCHUNKED_TOKENS]
    return {
        "s_4096": round(after[4096], 3),
        "s_7168": round(after[7168], 3),
        "ratio_to_unchunked_4096": round(after[UNCHUNKED_TOKENS] / unchunked_s, 3),
        "growth_exponent": round(_exponent(after, LENGTHS_TOKENS[0], LENGTHS_TOKENS[-1]), 3),
        "growth_exponent_before": round(_exponent(before, min(before), max(before)), 3),
        "speedup_4096": round(before[4096] / after[4096], 3),
        "unchunked_s_4096": round(unchunked_s, 3),
        "before_s": {str(tokens): round(value, 3) for tokens, value in before.items()},
        "after_s": {str(tokens): round(value, 3) for tokens, value in after.items()},
    }


def _cpu_summary(medians_s: Mapping[tuple[str, int], float]) -> dict[str, object]:
    return {f"{name}_cpu": value for name, value in _summary(medians_s).items()}


def _by_tokens(medians_s: Mapping[tuple[str, int], float], wanted: str) -> dict[int, float]:
    return {tokens: value for (name, tokens), value in medians_s.items() if name == wanted}


def _exponent(seconds: Mapping[int, float], low: int, high: int) -> float:
    return math.log(seconds[high] / seconds[low]) / math.log(high / low)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--full", action="store_true", help="the longest prompts with SGLang's attention, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
