"""What is reported of graphs: nothing where there are none, else shapes, replays and reasons."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.engine.device import Device
from sglang_ext.engine.options import ExtensionOptions
from sglang_ext.graphs.decide.graph_grid import Fallback, GraphGrid, GraphShape, TokenBuckets
from sglang_ext.graphs.sglang import capture
from sglang_ext.graphs.sglang.runner import GridPrefillRunner, Replay, graph_status, planned_grid, replay_of
from sglang_ext.laps.decide.options import LapsOptions
from sglang_ext.types import Role
from sglang_ext_cuda_graphs.capture_plan import MemoryLedger
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from support.direct_recorder import DirectRecorder


def test_engines_without_graphs_say_nothing() -> None:
    assert graph_status(SimpleNamespace()) is None
    assert graph_status(SimpleNamespace(prefill_cuda_graph_runner=object())) is None
    stock = SimpleNamespace(some_attribute=3)
    runner = GridPrefillRunner(SimpleNamespace(), stock, stock)
    assert graph_status(SimpleNamespace(prefill_cuda_graph_runner=runner)) is None
    assert runner.some_attribute == 3
    assert not runner.grid.shapes


def test_shapes_replays_and_reasons() -> None:
    shapes = [GraphShape(8, 2), GraphShape(8, 1)]
    graphs = PrefillGraphs(
        shapes,
        lambda shape, batch: torch.zeros(batch.ids.numel(), 1),
        DirectRecorder(),
        MemoryLedger(None, 1.0),
        torch.zeros(16, 1),
        1,
        lambda: 0.0,
    )
    graphs.make_ready(shapes[1])
    graphs.replay(shapes[1])
    graphs.replay(shapes[1])
    graphs.fallbacks[Fallback.TOO_LARGE] += 1
    runner = GridPrefillRunner(SimpleNamespace(), None, None)
    runner.use(graphs)
    assert graph_status(SimpleNamespace(prefill_cuda_graph_runner=runner)) == {
        "shapes": 2,
        "captured": 1,
        "pool_bytes": 0,
        "used_bytes": 0,
        "replays": {"8x1": 2},
        "fallbacks": {"too_large": 1},
    }


class ScriptedRunner(GridPrefillRunner):
    """Chooses as it is told, and computes nothing."""

    def __init__(self, choices: list[GraphShape | Fallback]) -> None:
        stock = SimpleNamespace(can_run_graph=lambda batch: False, execute=lambda batch, **kwargs: "stock")
        super().__init__(SimpleNamespace(), stock, SimpleNamespace(execute=lambda batch: "eager"))
        self.choices = choices
        self.has_room = True

    def _choose(self, forward_batch: Any) -> GraphShape | Fallback:
        return self.choices[0]

    def _wait_for_cached_kv(self) -> None:
        pass

    def _ragged(self, forward_batch: Any) -> Any:
        return None

    def _tail(self, forward_batch: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        return "replayed"


def test_it_is_told_which_prefills_were_replayed() -> None:
    shape, other = GraphShape(8, 2), GraphShape(16, 1)
    runner = ScriptedRunner([shape, Fallback.PADDING, other, shape])
    has_room = {shape: True, other: False}
    graphs = SimpleNamespace(
        fallbacks=Counter(),
        grid=GraphGrid(),
        make_ready=lambda one: has_room[one],
        load=lambda one, ragged: None,
        replay=lambda one: torch.zeros(one.tokens, 1),
    )
    runner.use(graphs)  # type: ignore[arg-type]
    engine = SimpleNamespace(prefill_cuda_graph_runner=runner)
    batch = SimpleNamespace(input_ids=torch.zeros(3), capture_hidden_mode=SimpleNamespace(is_full=lambda: False))
    seen = []
    while runner.choices:
        if runner.can_run_graph(batch):
            runner.execute(batch)
        # What SGLang's result says of a graph is also true where the grid's runner has run a batch eagerly.
        seen.append(replay_of(engine, 3, SimpleNamespace(can_run_cuda_graph=True)))
        runner.choices.pop(0)
    assert seen == [Replay(16, "8x2"), None, None, Replay(16, "8x2")]
    assert replay_of(SimpleNamespace(), 3, SimpleNamespace(can_run_cuda_graph=True)) is None


def sglang_runner(**changed: Any) -> SimpleNamespace:
    """What is read of SGLang's own prefill runner."""
    facts = {"capture_num_tokens": [4, 8, 64], "max_context_size": None, "max_seq_len": None, "_capture_req_slots": 1}
    return SimpleNamespace(
        prefill_cuda_graph_runner=SimpleNamespace(**{**facts, "prefill_backend_name": "breakable", **changed})
    )


def test_without_a_grid_prefills_are_planned_on_sglangs_buckets() -> None:
    grid = planned_grid(sglang_runner())
    assert isinstance(grid, TokenBuckets)
    assert grid.tokens == [4, 8, 64]
    assert grid.padded_at(5, 7, 35, 1000) == 2
    full = planned_grid(sglang_runner(prefill_backend_name="full", _capture_req_slots=4))
    assert (full.padded_at(9, 4, 36, 0), full.padded_at(9, 5, 36, 0)) == (2, -1)


@pytest.mark.parametrize("changed", [{"max_seq_len": 4096}, {"max_context_size": 4096}, {"capture_num_tokens": None}])
def test_where_sglangs_rule_is_another_one_prefills_are_planned_eagerly(changed: dict[str, Any]) -> None:
    assert not planned_grid(sglang_runner(**changed)).shapes
    assert not planned_grid(SimpleNamespace(prefill_cuda_graph_runner=None)).shapes


def test_the_bucket_that_sglang_has_replayed() -> None:
    on_graph, eager = (SimpleNamespace(can_run_cuda_graph=one) for one in (True, False))
    assert replay_of(sglang_runner(), 9, on_graph) == Replay(64, "64")
    assert replay_of(sglang_runner(), 8, on_graph) == Replay(8, "8")
    assert replay_of(sglang_runner(), 9, eager) is None
    assert replay_of(sglang_runner(), 65, on_graph) is None
    assert replay_of(sglang_runner(), 9, "a result without the flag") is None


@pytest.mark.parametrize(
    ("chunked", "most_prefill", "laps", "tokens"),
    [
        (8192, 16384, None, 8192),
        (8192, 4096, None, 4096),
        (-1, 16384, None, 16384),  # no chunks: a batch has what SGLang lets in
        (None, 16384, None, 16384),
        (8192, 16384, LapsOptions(), 8192),
        (8192, 16384, LapsOptions(max_chunk_tokens=12000), 12000),
        (8192, 16384, LapsOptions(max_chunk_tokens=2048), 2048),
    ],
)
def test_what_a_batch_has_at_most_bounds_the_shapes(
    monkeypatch: pytest.MonkeyPatch, chunked: int | None, most_prefill: int, laps: LapsOptions | None, tokens: int
) -> None:
    for name, value in ExtensionOptions(Role.SHORT, Device.CUDA, laps).to_environment().items():
        monkeypatch.setenv(name, value)
    arguments = SimpleNamespace(chunked_prefill_size=chunked, max_prefill_tokens=most_prefill)
    assert capture._max_batch_tokens(arguments) == tokens
