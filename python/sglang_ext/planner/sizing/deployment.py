"""A layout written down: values of the Helm chart, and the file of `sglang-ext up`.

Both start what was simulated: pools, boundary, TP, the objectives that LAPS schedules by and the chunk size.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from sglang_ext.cluster.cluster_file import dump_cluster
from sglang_ext.cluster.config import ClusterConfig, CoordinatorConfig, PoolConfig, PoolsConfig, RouterSettings
from sglang_ext.planner.sizing.load_trial import ClusterLayout, SloTargets
from sglang_ext.types import Role

_CHART_POOLS = {
    Role.SHORT: "prefill-short",
    Role.LONG: "prefill-long",
    Role.BOTH: "prefill",
    Role.DECODE: "decode",
}
_CHART_DEFAULT_POOLS = (Role.BOTH, Role.DECODE)  # that the chart has unless they are set to null
_CPU_BACKEND = "sglang_ext_tcp"


class DeployedModel(NamedTuple):
    """Describes what every instance serves, and how."""

    name: str  # folder, or name on the Hub
    chunk_tokens: int | None  # None: SGLang's own choice
    is_cpu: bool
    ring_sizes: tuple[int, ...] = (1, 2, 4)  # how many instances may share a chunk, where they share prompts


def helm_values(layout: ClusterLayout, model: DeployedModel, targets: SloTargets) -> dict[str, object]:
    """Values to lay over those of deploy/helm/sglang-ext; a pool that the layout has not is null."""
    pools: dict[str, object] = {
        _CHART_POOLS[role]: None for role in _CHART_DEFAULT_POOLS if role not in dict(layout.pools())
    }
    for role, count in layout.pools():
        pool: dict[str, object] = {"role": _CHART_POOLS[role], "replicas": count, "tp": _tp(layout, role)}
        if layout.pp(role) > 1:
            pool["pp"] = layout.pp(role)
        if layout.shares(role):
            pool["sharesLongPrompts"] = True
        if role.is_prefill:
            pool["args"] = [f"{option}={value}" for option, value in _laps_options(targets)]
            if model.chunk_tokens is not None:
                pool["sglangArgs"] = [f"--chunked-prefill-size={model.chunk_tokens}"]
        pools[_CHART_POOLS[role]] = pool
    defaults: dict[str, object] = {"model": model.name}
    if model.is_cpu:
        defaults |= {"gpus": 0, "transferBackend": _CPU_BACKEND}
    values: dict[str, object] = {
        "boundaryTokens": layout.boundary_tokens,
        "poolDefaults": defaults,
        "pools": pools,
    }
    values["coordinator"] = (
        {"enabled": True, "spSizes": list(model.ring_sizes)} if layout.is_ring else {"enabled": False}
    )
    return values


def cluster_config(layout: ClusterLayout, model: DeployedModel, targets: SloTargets) -> ClusterConfig:
    """The cluster for `sglang-ext up`. ConfigError for what it would refuse."""
    pools = {}
    for role, count in layout.pools():
        worker_args = [word for option in _laps_options(targets) for word in option] if role.is_prefill else []
        args = []
        if role.is_prefill and model.chunk_tokens is not None:
            args = ["--chunked-prefill-size", str(model.chunk_tokens)]
        pools[role.value] = PoolConfig(
            count=count,
            tp=_tp(layout, role),
            pp=layout.pp(role),
            args=tuple(args),
            worker_args=tuple(worker_args),
        )
    sizes = ",".join(str(size) for size in model.ring_sizes)
    return ClusterConfig(
        model=model.name,
        pools=PoolsConfig(**pools),
        coordinator=CoordinatorConfig(enabled=layout.is_ring, args=("--sp-sizes", sizes) if layout.is_ring else ()),
        router=RouterSettings(length_boundary_tokens=layout.boundary_tokens),
    )


def write_values(path: Path, heading: str, values: dict[str, object]) -> None:
    """Write the values, with the lines of `heading` as comments above. OSError where that is not possible."""
    path.write_text(_comment(heading) + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def write_cluster(path: Path, heading: str, config: ClusterConfig) -> None:
    """Write the cluster file, with the lines of `heading` as comments above. OSError where that is not possible."""
    path.write_text(_comment(heading) + dump_cluster(config), encoding="utf-8")


def _comment(heading: str) -> str:
    return "".join(f"# {line}\n" for line in heading.splitlines())


def _tp(layout: ClusterLayout, role: Role) -> int:
    return layout.tp if role.is_prefill else layout.decode_tp


def _laps_options(targets: SloTargets) -> list[tuple[str, str]]:
    return [
        ("--laps-short-ttft-slo-ms", f"{1e3 * targets.short_ttft_s:g}"),
        ("--laps-long-slo-stretch", f"{targets.long_stretch:g}"),
    ]
