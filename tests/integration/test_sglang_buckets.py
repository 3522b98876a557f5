"""What a prefill is planned on without a grid is what SGLang's own prefill runner chooses: asked of its class on a CPU.

SGLang captures these graphs on a CUDA device only, so its rule runs here, and no graph.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from support.preloaded import preloaded_context

pytestmark = pytest.mark.integration
MAX_BUCKET = 2048
REQUESTS = (1, 3, 64)


def test_every_batch_is_planned_as_sglang_runs_it() -> None:
    """On breakable graphs, and on full ones with places for three requests; SGLang's buckets, and fewer."""
    with ProcessPoolExecutor(1, mp_context=preloaded_context()) as pool:
        buckets, disagreements = pool.submit(_compare).result(300)
    assert buckets[:3] == [4, 8, 12]
    assert buckets[-1] == MAX_BUCKET
    assert disagreements == []


def _compare() -> tuple[list[int], list[tuple[object, ...]]]:
    from types import SimpleNamespace

    from sglang_ext import cpu

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    cpu.install((*cpu.CANDIDATES, *cpu.BENCHMARK_CANDIDATES))
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    from sglang_ext.graphs.sglang.runner import planned_grid, replay_of

    by_default = generate_prefill_cuda_graph_batch_sizes(MAX_BUCKET)
    disagreements = []
    for backend, buckets in itertools.product(("breakable", "full"), (by_default, [4, 64, 512])):
        runner = PrefillCudaGraphRunner.__new__(PrefillCudaGraphRunner)
        vars(runner).update(
            prefill_backend_name=backend,
            _is_full_backend=backend == "full",
            _fa4_prefill=False,
            _capture_req_slots=3,
            _qwen_bcg_hc_sidechannel=False,
            _qwen_bcg_mtp_draft=False,
            has_mha_companion_layers=False,
            capture_num_tokens=buckets,
            max_num_tokens=buckets[-1],
            max_context_size=None,
            max_seq_len=None,
        )
        runner._has_uncapturable_chunked_prefix = lambda prefix_lens: False
        engine = SimpleNamespace(prefill_cuda_graph_runner=runner)
        grid = planned_grid(engine)
        for requests in REQUESTS:
            for tokens in range(requests, buckets[-1] + 9):
                on_graph = runner.can_replay_locally(
                    batch_size=requests,
                    num_tokens=tokens,
                    input_embeds=None,
                    replace_embeds=None,
                    prefix_lens=[0] * requests,
                    is_target_verify=False,
                    capture_hidden_mode=None,
                    return_logprob=False,
                )
                at = grid.padded_at(tokens - requests + 1, requests, tokens, 0)
                planned = grid.tokens[at] if at >= 0 else None
                wanted = runner._pad_to_bucket(tokens, buckets) if on_graph else None
                replay = replay_of(engine, tokens, SimpleNamespace(can_run_cuda_graph=on_graph))
                if not planned == wanted == (None if replay is None else replay.tokens):
                    disagreements.append((backend, requests, tokens, planned, wanted, replay))
    return by_default, disagreements
