"""Describes what the stages of `bench/h200.py` consist of, how long each step should take, and in which commands they
fit.

A stage is a list of steps, each a process of its own with a result and a log of its own. Pure: the same plan is
checked by a test against the limit of a command, printed beforehand, and run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu.card import Card, largest_model, needed_bytes
from gpu.floor import Ceilings, floor_s
from gpu.model_shapes import SHAPES

LENGTHS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MODES = ("grid", "breakable", "full")
SYSTEMS = ("stock", "all", "stock-flashinfer", "graphs", "two-queues")
CONCURRENCIES = (64, 8, 1)
WINDOWS = ("adaptive", "0", "30", "5", "15")
ARRANGEMENTS = ("default", "handshake", "pool")
RATES_PER_S = (360.0, 180.0, 60.0)
STAGES = (
    *("preflight", "tokens", "kernels-check", "buckets-7b", "figure6", "kernels", "two-engines"),
    *("figure5", "buckets-14b", "buckets-32b"),
)
# A command is ended after 600 s, whatever it has done by then.
COMMAND_S = 600.0
DEADLINE_S = 570.0
# Kept free at the end of a command, for stopping what runs and writing.
RESERVE_S = 15.0
LEAST_LIMIT_S = 120.0
# A command's files come back, as many as these.
MOST_FILES = 8

# Importing SGLang, its process groups, weights of random numbers, the device's ceilings.
_IMPORT_S = 40.0
_WEIGHTS_BYTES_PER_S = 5e9
_GRAPH_S = 0.5
# A server captures SGLang's own prefill graphs for 50 or so numbers of tokens, whatever else it does.
_STOCK_CAPTURE_S = 25.0
_JIT_S = 60.0
# A run on the host in addition to the device's time: the batch and its requests are built again.
_HOST_S = 0.02
_SLOWER_THAN_FLOOR = 1.6
# Of a tiny model: its imports, and the capture of a few shapes.
_ENGINE_START_S = 35.0


class Selection(NamedTuple):
    """Describes what is wanted of each stage; the default is all of it."""

    modes: tuple[str, ...] = MODES
    systems: tuple[str, ...] = SYSTEMS
    concurrencies: tuple[int, ...] = CONCURRENCIES
    windows: tuple[str, ...] = WINDOWS
    seconds: float = 12.0  # of each level of load
    attention: str | None = None  # of servers; None: SGLang's default where its kernels are there


class Step(NamedTuple):
    """One process: its place in the record, what it runs, the seconds it should take, and those before a result."""

    stage: str
    name: str
    model: str
    arguments: tuple[str, ...]
    estimate_s: float
    start_s: float

    @property
    def max_s(self) -> float:
        """Seconds after which it is stopped, so that what hangs leaves something to the steps behind it."""
        return max(LEAST_LIMIT_S, 2.5 * self.estimate_s)

    @property
    def is_float32(self) -> bool:
        """Return whether its model is one whose results are compared exactly."""
        return self.stage in ("tokens", "two-engines")

    @property
    def log_name(self) -> str:
        return f"{self.stage}-{self.name}.log"


def plan(stage: str, card: Card, selection: Selection, is_dry: bool = False) -> list[Step]:
    """The steps of a stage on this card, in order. Raises ValueError with a line where the card is too small."""
    builder = _BUILDERS[stage.split("-")[0] if stage.startswith("buckets") else stage]
    return builder(stage, card, selection, is_dry)


def repeats_within(first_s: float, repeats: int, within_s: float, least: int = 5) -> int:
    """Return how often to repeat what took `first_s`: `repeats`, or fewer so that it takes `within_s`, but `least`."""
    return max(min(repeats, least), min(repeats, int(within_s / max(first_s, 1e-6))))


def _preflight(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    return [Step(stage, "checks", "", ("-m", "gpu.preflight"), _IMPORT_S + 2 * _JIT_S, _IMPORT_S)]


def _kernels_check(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    # A warning of a library is no reason to lose a command on the device.
    options = ("-v", "-rs", "-p", "no:cacheprovider", "-W", "default")
    # What waits for the device for ever, in C, is ended by a thread or not at all.
    options += ("--timeout", "90", "--timeout-method", "thread")
    return [Step(stage, "tests", "", ("-m", "pytest", *options, "tests/kernels", "tests/gpu"), 150.0, 30.0)]


def _tokens(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    grid = ("--lengths", "8,32", "--batches", "1,4", "--reprefills", "8x4+40,20x1+33", "--repeats", "2")
    return [
        Step(
            stage,
            "grid",
            "tiny",
            ("-m", "gpu.buckets", "--model", "tiny", "--mode", "grid", "--dtype", "float32", *grid),
            _IMPORT_S + _JIT_S,
            _IMPORT_S,
        )
    ]


def _buckets(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    model = "tiny" if is_dry else f"qwen2.5-{stage.removeprefix('buckets-')}"
    if not is_dry and needed_bytes(model) > card.memory_bytes:
        raise ValueError(
            f"{stage}: needs {needed_bytes(model) / 1e9:.0f} GB of device memory, {card.name} has "
            f"{card.memory_bytes / 1e9:.0f} GB"
        )
    small = ("--lengths", "8,16", "--batches", "1,2", "--reprefills", "8x2+32,16x1+40", "--repeats", "3")
    steps = []
    for mode in selection.modes:
        if is_dry and mode != "grid":
            continue  # upstream's graphs need the device
        start_s = _buckets_start_s(model, mode)
        steps.append(
            Step(
                stage,
                mode,
                model,
                ("-m", "gpu.buckets", "--model", model, "--mode", mode, *(small if is_dry else ())),
                start_s + _buckets_s(model, mode, _ceilings(card)),
                start_s,
            )
        )
    return steps


def _buckets_start_s(model: str, mode: str) -> float:
    start_s = _IMPORT_S + 2 * needed_bytes(model) / _WEIGHTS_BYTES_PER_S
    if mode == "grid":
        return start_s + len(LENGTHS) * len(BATCHES) * _GRAPH_S
    sizes = {length * batch for length in LENGTHS for batch in BATCHES}
    return start_s + len(sizes) * 1.5 + (_JIT_S if mode == "full" else 0.0)


def _buckets_s(model: str, mode: str, ceilings: Ceilings) -> float:
    """Of all buckets, as `gpu.buckets` repeats them."""
    total_s = 0.0
    for length in LENGTHS:
        for batch in BATCHES:
            once_s = _SLOWER_THAN_FLOOR * floor_s(SHAPES[model], ceilings, length, batch) + _HOST_S
            runs = 3 + repeats_within(once_s, 20, 1.0)
            total_s += runs * once_s * (2 if mode == "grid" else 1)
    return total_s * 1.15  # re-prefills


def _figure_6(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    model = "tiny" if is_dry else largest_model(card.memory_bytes)
    steps = []
    for system in selection.systems:
        if is_dry and system == "stock-flashinfer":
            continue
        start_s = _server_start_s(model, has_grid=system in ("all", "graphs"))
        level_s = selection.seconds + 4.0
        load = ("--small",) if is_dry else ("--concurrencies", ",".join(map(str, selection.concurrencies)))
        load += () if is_dry else ("--seconds", f"{selection.seconds:g}", *_attention(selection))
        steps.append(
            Step(
                stage,
                system,
                model,
                ("-m", "gpu.figure6", "--model", model, "--system", system, *load),
                start_s + 2.0 + len(selection.concurrencies) * level_s + 10.0,
                start_s + 10.0,
            )
        )
    return steps


def _server_start_s(model: str, has_grid: bool, graphs: int = len(LENGTHS) * len(BATCHES)) -> float:
    start_s = _IMPORT_S + needed_bytes(model) / _WEIGHTS_BYTES_PER_S + _STOCK_CAPTURE_S
    return start_s + (graphs * _GRAPH_S if has_grid else 0.0)


def _kernels(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    return [Step(stage, "rates", "", ("-m", "gpu.kernels", *(("--small",) if is_dry else ())), 90.0 + _JIT_S, 30.0)]


def _two_engines(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    steps = []
    for arrangement in ARRANGEMENTS:
        engines = 4 if arrangement == "pool" else 3  # one of them answers alone
        start_s = engines * _ENGINE_START_S
        arguments = ("-m", "gpu.two_engines", "--arrangement", arrangement)
        steps.append(Step(stage, arrangement, "tiny", arguments, start_s + 20.0, 30.0))
    return steps


def _figure_5(stage: str, card: Card, selection: Selection, is_dry: bool) -> list[Step]:
    model = "tiny" if is_dry else "qwen2.5-7b"
    start_s = _server_start_s(model, has_grid=True, graphs=28)
    load = ("--small",) if is_dry else _attention(selection)
    return [
        Step(
            stage,
            window,
            model,
            ("-m", "gpu.figure5", "--model", model, "--window", window, *load),
            start_s + len(RATES_PER_S) * (2.0 + 8.0 + 2.0) + 5.0,
            start_s,
        )
        for window in selection.windows
    ]


def _attention(selection: Selection) -> tuple[str, ...]:
    return () if selection.attention is None else ("--attention", selection.attention)


_BUILDERS: dict[str, Callable[[str, Card, Selection, bool], list[Step]]] = {
    "preflight": _preflight,
    "kernels-check": _kernels_check,
    "tokens": _tokens,
    "buckets": _buckets,
    "figure6": _figure_6,
    "kernels": _kernels,
    "two-engines": _two_engines,
    "figure5": _figure_5,
}


def _ceilings(card: Card) -> Ceilings:
    return card.nominal or Ceilings(1.5e12, 3e14)


class Command(NamedTuple):
    """One run of `bench/h200.py` on the device."""

    options: tuple[str, ...]
    stages: tuple[str, ...]
    selection: Selection

    def steps(self, card: Card) -> list[Step]:
        return [step for stage in self.stages for step in plan(stage, card, self.selection)]

    def estimate_s(self, card: Card) -> float:
        return sum(step.estimate_s for step in self.steps(card))


def _command(stages: Sequence[str], **selected: tuple[str, ...] | tuple[int, ...]) -> Command:
    options = ["--stages", ",".join(stages)]
    for name, values in selected.items():
        options += [f"--{name}", ",".join(map(str, values))]
    return Command(tuple(options), tuple(stages), Selection(**selected))  # type: ignore[arg-type]


# The order in which a device should be used: what decides most comes first.
COMMANDS = (
    _command(("preflight", "tokens", "kernels-check")),
    _command(("buckets-7b",), modes=("grid", "breakable")),
    _command(("figure6",), systems=("stock", "all"), concurrencies=(64, 8)),
    _command(("kernels", "buckets-7b"), modes=("full",)),
    _command(("two-engines",)),
    _command(("figure5",), windows=("adaptive", "0", "30")),
    _command(("figure6",), systems=("stock-flashinfer", "graphs", "two-queues"), concurrencies=(64, 8)),
    _command(("figure5",), windows=("5", "15")),
    _command(("buckets-14b",), modes=("grid", "breakable")),
)
