"""Write `docs/reference/compatibility.md`, which model goes with what: `python tools/render_compatibility.py`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from sglang_ext.cpu.unserved_models import UNSERVED, UNSERVED_LAYERS, unserved_argument  # noqa: E402
from sglang_ext.engine.hooks.served_models import window_of  # noqa: E402
from sglang_ext.graphs.sglang.graph_options import architecture_exclusion  # noqa: E402
from sglang_ext.long_pool.sglang import cdsp_options  # noqa: E402
from sglang_ext.transfer.sglang import transfer_options  # noqa: E402
from sglang_ext.transfer.sglang.transfer_backend import RECURRENT  # noqa: E402
from support.model_families import FAMILIES, REFUSED_WINDOW, SIZES, Family  # noqa: E402

DOCUMENT = ROOT / "docs" / "reference" / "compatibility.md"
_HEAD = """# Model families and mechanisms

<!-- made by `python tools/render_compatibility.py` -->

Of each family below a tiny random model is served by SGLang's engine for CPUs, in float32: undivided, and by a prefill
and a decode instance with two queues, over `sglang_ext_tcp` and over the handshake. Its greedy tokens are Hugging
Face's (`make test-all`; six families in `make test`). Of each family that long pools take, the logits of two and three
members are within 1e-4 of those of one instance (`tests/integration/test_chunk_steps.py`). Collected: the prompt's own
instance has all KV before it goes to decode ([why](../explanation/long-pool.md#sliding-windows)). Where a mechanism
does not take a family, an instance refuses to start with the reason that stands below the table; a model that no table
names is served if SGLang serves it, and has not been compared. Prefill graphs are compared on a CPU, where a replay is
a run (`tests/integration/test_prefill_graphs.py`); on a GPU they have run with a Qwen 2 only. An engine runs without
them where the table has "no".

A pipeline (`--pp-size`) follows from SGLang's model class and from what the transfers refuse; it has run with Llama
and DeepSeek V3. No family is refused scores without decode; those of Llama have been compared with Hugging Face's.

| architecture | two queues | `sglang_ext_tcp` | handshake | long pool | pipeline | scores | prefill graphs (GPU) |
|---|---|---|---|---|---|---|---|
"""
_ONE_SIZE = "yes, prefill and decode of one tensor parallel size"
_REASONS = """
Reasons:

"""
_UNSERVED = """
## Not served on a CPU

| architecture | why |
|---|---|
"""
_ARGUMENTS_HEAD = """
## Speculative decoding and quantised KV

Refused in one line where the table has "no". What has "yes" is compared with Hugging Face's tokens on CPUs, FP8 with
keys and values rounded (`tests/integration/test_fp8_kv.py`); nothing here has been run on a GPU. Drafts: EAGLE with a
draft model of its own (Llama) and with the model's next-token layer (MTP: DeepSeek V3, GLM-4-MoE-lite), undivided and
over both transfers with two queues; what the target accepts of them is the same as undivided, so their KV has arrived
(`tests/integration/test_drafts.py`). On CPUs drafts are chains (`--speculative-eagle-topk 1`); where SGLang would
verify them greedily there at any temperature, tokens are drawn. `STANDALONE` is served undivided only.

| SGLang's argument | on a CPU without AMX | handshake | long pool | prefill graphs (GPU) | all else, on a GPU |
|---|---|---|---|---|---|
"""
_ARGUMENTS: tuple[dict[str, str], ...] = (
    {"speculative_algorithm": "EAGLE"},
    {"kv_cache_dtype": "fp8_e4m3"},
)
_RUN = {True: "yes", False: "not run"}
_SERVED_AS = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}  # by SGLang's Olmo3Config
_PLAIN = {
    "speculative_algorithm": None,
    "speculative_eagle_topk": 1,
    "disaggregation_mode": "prefill",
    "enable_dp_attention": False,
    "kv_cache_dtype": "auto",
    "device": "cpu",
    "pp_size": 1,
    "dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "disaggregation_decode_allocation_policy": "early",
    "disable_radix_cache": False,
    "enable_hierarchical_cache": False,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "enable_hisparse": False,
    "enable_pd_role_switch": False,
}


def render() -> str:
    """Return the document's text."""
    numbers: dict[str, int] = {}

    def cell(reason: str | None) -> str:
        return "yes" if reason is None else f"no ({numbers.setdefault(reason, len(numbers) + 1)})"

    rows = []
    for architecture, family in sorted(FAMILIES.items()):
        if architecture != REFUSED_WINDOW:
            pool = cell(_pool_refusal(architecture, family))
            on_gpu = cdsp_options.architecture_conflict(architecture, on_gpu=True) is None
            pool += ", on CPUs" if pool == "yes" and not on_gpu else ""
            pool += ", collected" if family.states and pool.startswith("yes") else ""
            cells = ["yes", "yes", _handshake(family, cell), pool]
            cells += [_pipeline(architecture, family, cell), "yes"]
            cells.append(cell(_graph_refusal(architecture, family)))
            rows.append(f"| {architecture} | {' | '.join(cells)} |\n")
    parts = [_HEAD, *rows, _REASONS]
    parts += [f"{number}. {reason}\n" for reason, number in numbers.items()]
    parts.append(_UNSERVED)
    parts += [f"| {architecture} | {reason} |\n" for architecture, reason in sorted(UNSERVED.items())]
    parts += [f"| {name} with layers `{kind}` | {why} |\n" for name, (kind, why) in UNSERVED_LAYERS.items()]
    parts.append(
        f"| {REFUSED_WINDOW} with a sliding window | SGLang leaves the window out, on every device; served where "
        "`--context-length` is at most the window |\n"
    )
    parts += [_ARGUMENTS_HEAD, *map(_argument_row, _ARGUMENTS)]
    return "".join(parts)


def _argument_row(given: dict[str, str]) -> str:
    """Return the row of an argument; a model runner, which does not run here, would say which KV graphs take."""
    server_args = SimpleNamespace(**{**_PLAIN, **given})
    unserved = unserved_argument(server_args)
    problems = [
        None if unserved is None else f"({unserved[1]})",
        transfer_options.conflict(server_args, has_staging_buffer=False),
        cdsp_options.conflict(server_args),
    ]
    ((name, value),) = given.items()
    is_run = unserved is None  # on a CPU, with all mechanisms that take it there
    cells = [_RUN[is_run] if problem is None else f"no: {_reason(problem)}" for problem in problems]
    cells += ["no: the draft reads other states" if value == "EAGLE" else "no: KV is stored in another type", "not run"]
    return f"| `--{name.replace('_', '-')} {value}` | {' | '.join(cells)} |\n"


def _reason(problem: str) -> str:
    return problem.partition("(")[2].partition(")")[0]


def _handshake(family: Family, cell: Any) -> str:
    kv_args = SimpleNamespace(state_types=family.states, num_draft_entries=0, swa_kv_cache_layout="nhd")
    problem = transfer_options.model_conflict(kv_args, 1)
    is_whole = RECURRENT in family.states and not family.divides_states
    return _ONE_SIZE if problem is None and is_whole else str(cell(problem))


def _pipeline(architecture: str, family: Family, cell: Any) -> str:
    """Return what several stages of a prefill instance go with: SGLang asks the model class, then a transfer its KV."""
    if not _has_stages(architecture):
        return str(cell("SGLang's model class has no stages"))
    kv_args = SimpleNamespace(state_types=family.states, num_draft_entries=0, swa_kv_cache_layout="nhd")
    return "yes" if transfer_options.model_conflict(kv_args, 2) is None else "not over the handshake; else not run"


def _has_stages(architecture: str) -> bool:
    """Return whether `forward` of SGLang's model class takes what a stage sends, as SGLang asks when it starts.

    The sources are read: importing the models takes half a minute.
    """
    node = _model_classes()[_SERVED_AS.get(architecture, architecture)]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            return any(argument.arg == "pp_proxy_tensors" for argument in (*item.args.args, *item.args.kwonlyargs))
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in _model_classes()]
    return any(map(_has_stages, bases))


@cache
def _model_classes() -> dict[str, ast.ClassDef]:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, ast.ClassDef] = {}
    for path in sorted((Path(spec.origin).parent / "srt" / "models").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "For" in source or "LMHeadModel" in source:
            found |= {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return found


def _pool_refusal(architecture: str, family: Family) -> str | None:
    config = _config(architecture, family)
    config.sliding_window_size = window_of(config.hf_text_config)
    problem = cdsp_options.model_conflict(config, on_gpu=False)
    return None if problem is None else problem.partition("(")[2].removesuffix(")")


def _graph_refusal(architecture: str, family: Family) -> str | None:
    problem = architecture_exclusion(architecture, _config(architecture, family))
    return None if problem is None else problem.removeprefix(architecture).lstrip(": ")


def _config(architecture: str, family: Family) -> SimpleNamespace:
    """Return what the refusals read of SGLang's ModelConfig."""
    text = SimpleNamespace(architectures=[architecture], **{**SIZES, **family.more, **family.written})
    return SimpleNamespace(hf_config=text, hf_text_config=text)


def main() -> int:
    DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
    DOCUMENT.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
