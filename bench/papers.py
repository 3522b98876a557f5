"""The experiments of the papers, in the simulator, with the same policy objects as the router and the engine.

    python bench/papers.py tetris [--traces short medium long] [--engine table1] [--full] [--out FILE.json]
    python bench/papers.py transfer [--traces short medium long] [--out FILE.json]
    python bench/papers.py laps [--requests 20000] [--seeds 0 1 2] [--out FILE.json]
    python bench/papers.py medha [--rates 0.25 0.75] [--seeds 0 1 2 3 4] [--out FILE.json]
    python bench/papers.py authors [--fit] [--out FILE.json]

tetris: 16 prefill instances on 2 nodes, Table 1 fit, 20,000 Poisson arrivals of prompts drawn from the `tetris_like`
lengths (resampled from other traces to the published means: synthetic), the first 10% dropped, seeds 0 to 2 and two by
which nothing was chosen (200, 201). Critical
rate per system: the highest at which the P99 TTFT is at most 25 times the mean light-load time and none is above
three times that, bisected to 1%. Light load is no queue and the best SP size. The improvement rate is chosen per
system, trace and load on other arrivals (a seed of its own). Without --full that choice is among 5 rates on 4,000
arrivals, with it among 15 on 20,000; nothing else is reduced.

`fluid` is one first-come first-served machine that serves min_s s T_s(0, L) / 16 per request; the bound is the rate at
which all 16 instances would compute all the time, each prompt on the size that takes the least of them. Ours is `pool`,
the coordinator that serves, with deadlines at the limit; `pool-noise-5` and `-10` with chunks that take longer or
shorter than predicted (standard deviation 5% and 10%); `pool-round-robin` with prompts that an instance has, each in
turn, before anybody has planned, and offers. The best baseline is the best of the paper's (fixed SP 8 and 16,
LoongServe as the paper describes it); `critical_over_best_of_all` is against the stronger ones too that the paper does
not have (fixed SP 2 and 4, LoongServe on idle instances) and against Tetris. Times are at the critical rate of the best
baseline, and again at that of the best of all others (`…_at_best_of_all`).

transfer: see support/papers_transfer.py. laps: see support/papers_laps.py. medha: see support/papers_medha.py.
authors: see support/papers_authors.py.

The last line is `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from support import papers_authors, papers_laps, papers_medha, papers_tetris_run, papers_transfer
from support.processor_time import own_time_s
from support.result import BenchmarkRun, give_up

_EXPERIMENTS = {
    "tetris": papers_tetris_run,
    "transfer": papers_transfer,
    "laps": papers_laps,
    "medha": papers_medha,
    "authors": papers_authors,
}
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def main() -> int:
    parser = argparse.ArgumentParser(description="The papers' experiments in the simulator.")
    papers = parser.add_subparsers(dest="paper", required=True)
    for name, module in _EXPERIMENTS.items():
        paper = papers.add_parser(name)
        paper.add_argument("--data", type=Path, default=DATA, help="folder with the workload data")
        paper.add_argument("--processes", type=int, default=2)
        paper.add_argument("--out", type=Path, help="write the result into this file too")
        module.add_arguments(paper)
    args = parser.parse_args()
    if not args.data.is_dir():
        give_up(f"--data: {args.data} is not there")
    if args.processes < 1:
        give_up(f"--processes: {args.processes} is less than 1")
    benchmark = BenchmarkRun("sglang-ext")
    command = f"python bench/papers.py {shlex.join(sys.argv[1:])}"
    figures = args.experiment(args)
    benchmark.end(
        {"bench": f"papers {args.paper}", "command": command, **figures, "processor_seconds": round(own_time_s(), 1)},
        args.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
