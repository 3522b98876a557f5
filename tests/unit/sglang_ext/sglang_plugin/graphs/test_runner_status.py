"""What is reported of graphs: nothing where there are none, else shapes, replays and reasons."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_ext.policy.laps.graph_grid import Fallback, GraphShape
from sglang_ext.sglang_plugin.graphs.runner import GridPrefillRunner, graph_status
from sglang_ext_cuda_graphs.capture_plan import MemoryLedger
from sglang_ext_cuda_graphs.prefill_graphs import PrefillGraphs
from sglang_ext_cuda_graphs.recorders import DirectRecorder


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
