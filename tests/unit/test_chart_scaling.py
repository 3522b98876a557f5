"""The chart's ScaledObjects: what they go by, what they scale, and what is refused."""

from __future__ import annotations

import re

import jsonschema
import pytest
import yaml

from support import manifests
from support.chart import PACKAGES, ROOT, default_values, merged, needs_helm, render, values_schema
from support.custom_kinds import check_custom_kinds
from support.manifests import Document, of_kind, pods_of

MONITORS: Document = {
    "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
}
KEDA: Document = {"enabled": True, "prometheusAddress": "http://prometheus.monitoring:9090"}
SCALING: Document = {"networkPolicy": MONITORS, "autoscaling": {"keda": KEDA}}
APART: Document = {"prefill": None, **{name: {"role": name} for name in ("prefill-short", "prefill-long")}}
ALL_SCALE: Document = {"poolDefaults": {"autoscaled": True}, "pools": APART}
ACCEPTED: dict[str, Document] = {
    "default": {},
    "pools that scale": {
        "poolDefaults": {"autoscaled": True, "maxReplicas": 8},
        "pools": {**APART, "decode": {"role": "decode", "runningRequests": 32, "nodes": 2, "tp": 2}},
        "router": {"controller": "advise"},
        **SCALING,
    },
    "a pool that scales beside the controller": {
        "pools": {
            "prefill": None,
            "prefill-short": {"role": "prefill-short", "replicas": 2},
            "prefill-long": {"role": "prefill-long", "autoscaled": True, "queuedWorkSecs": 5},
        },
        "router": {"controller": "on"},
        **SCALING,
    },
    "one pool that scales without a controller": {
        "pools": {"prefill": {"role": "prefill", "autoscaled": True}},
        **SCALING,
        "networkPolicy": {"enabled": False},
    },
}
# What the schema refuses, with a part of the place that is named.
REFUSED: dict[str, tuple[Document, str]] = {
    "never an instance": ({"poolDefaults": {"minReplicas": 0}}, "minReplicas"),
    "an instance that is more than busy": ({"poolDefaults": {"busyShare": 1.5}}, "busyShare"),
    "no queue": ({"pools": {"a": {"role": "prefill", "queuedWorkSecs": 0}}}, "pools"),
    "a Prometheus without a scheme": (
        {"autoscaling": {"keda": {"prometheusAddress": "prom:9090"}}},
        "prometheusAddress",
    ),
    "a window that Kubernetes refuses": (
        {"autoscaling": {"keda": {"scaleDownWindowSecs": 7200}}},
        "scaleDownWindowSecs",
    ),
}
# What the templates refuse, with a part of the message, which names the place.
CONTRADICTIONS: dict[str, tuple[Document, str]] = {
    "a scaler of nothing": (SCALING, "no pool has autoscaled: true"),
    "a scaler without metrics": (
        {**ALL_SCALE, **SCALING, "autoscaling": {"keda": {"enabled": True}}},
        "autoscaling.keda.prometheusAddress",
    ),
    "a scaler that nothing may tell": (
        {**ALL_SCALE, "autoscaling": {"keda": KEDA}},
        "autoscaling.keda: networkPolicy.metricsFrom is empty",
    ),
    "instances that are not found": (
        {**ALL_SCALE, **SCALING, "router": {"serviceDiscovery": False}},
        "autoscaling.keda: without router.serviceDiscovery",
    ),
    "more at least than at most": (
        {**SCALING, "pools": {"decode": {"role": "decode", "autoscaled": True, "minReplicas": 5}}},
        "pools.decode: minReplicas 5 is more than maxReplicas 4",
    ),
    "a window shorter than the drain": (
        {**ALL_SCALE, **SCALING, "autoscaling": {"keda": {**KEDA, "scaleDownWindowSecs": 610}}},
        "scaleDownWindowSecs 610 must be longer than its drain, drainDelaySecs + shutdownGraceSecs = 610",
    ),
    "a scaler for each pool that the controller moves": (
        {**ALL_SCALE, **SCALING, "router": {"controller": "on"}},
        "with router.controller on only one prefill pool of Qwen/Qwen3-8B is autoscaled",
    ),
    "a scaler before the controller": (
        {
            **SCALING,
            "router": {"controller": "on"},
            "pools": {**APART, "prefill-long": {"role": "prefill-long", "autoscaled": True}},
            "autoscaling": {"keda": {**KEDA, "scaleUpWindowSecs": 30}},
        },
        "autoscaling.keda.scaleUpWindowSecs: 30, but with router.controller on the controller has the first 90 s",
    ),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Document]:
    return dict(zip(ACCEPTED, render(list(ACCEPTED.values())), strict=True))


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_schema_takes(name: str) -> None:
    jsonschema.Draft7Validator(values_schema()).validate(merged(ACCEPTED[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_the_schema_refuses(name: str) -> None:
    values, place = REFUSED[name]
    errors = list(jsonschema.Draft7Validator(values_schema()).iter_errors(merged(values)))
    assert any(place in f"{list(error.absolute_path)} {error.message}" for error in errors)


@needs_helm
def test_what_the_chart_refuses() -> None:
    refused = {**REFUSED, **{f"contradiction: {name}": case for name, case in CONTRADICTIONS.items()}}
    for (name, (_, place)), result in zip(refused.items(), render([case[0] for case in refused.values()]), strict=True):
        assert "error" in result, f"{name}: taken"
        assert place in result["error"], f"{name}: {result['error']}"


@pytest.mark.slow
@needs_helm
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_chart_renders_holds(results: dict[str, Document], name: str) -> None:
    assert results[name].get("problems") == [], results[name]
    manifests.check(results[name]["documents"])


def documented(part: str) -> list[Document]:
    """The YAML of docs/how-to/kubernetes.md's section on autoscaling in which `part` stands."""
    section = (ROOT / "docs/how-to/kubernetes.md").read_text().partition("\n## Autoscaling\n")[2].partition("\n## ")[0]
    (block,) = [one for one in (rest.partition("```")[0] for rest in section.split("```yaml\n")[1:]) if part in one]
    return list(yaml.safe_load_all(block))


@pytest.mark.slow
@needs_helm
def test_the_documented_values_scale() -> None:
    (values,) = documented("autoscaling:")
    (result,) = render([values])
    assert set(queries(result)) == {"sglang-ext-prefill", "sglang-ext-decode"}


def test_the_documented_hpa_goes_by_the_adapters_metric() -> None:
    adapter, hpa = documented("HorizontalPodAutoscaler")
    (rule,) = adapter["rules"]["external"]
    (metric,) = hpa["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    known = (ROOT / "docs/reference/metrics.md").read_text()
    for name in re.findall(r"sglang_ext_router_\w+", rule["metricsQuery"]):
        assert f"`{name}`" in known
    drain_s = default_values()["poolDefaults"]["drainDelaySecs"] + default_values()["poolDefaults"]["shutdownGraceSecs"]
    assert hpa["spec"]["minReplicas"] >= 1
    assert hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] > drain_s


@needs_helm
def test_what_scales(results: dict[str, Document]) -> None:
    """Each ScaledObject is of a workload without replicas of its own, by metrics that there are."""
    known = (ROOT / "docs/reference/metrics.md").read_text()
    for name in ACCEPTED:
        documents = results[name]["documents"]
        owners = {(pods.owner["kind"], pods.owner["metadata"]["name"]): pods for pods in pods_of(documents)}
        check_custom_kinds(documents)
        for scaled in of_kind(documents, "ScaledObject"):
            target = scaled["spec"]["scaleTargetRef"]
            pods = owners[target["kind"], target["name"]]
            assert target["apiVersion"] == pods.owner["apiVersion"]
            assert "replicas" not in pods.owner["spec"]
            down = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
            assert down["stabilizationWindowSeconds"] > pods.spec["terminationGracePeriodSeconds"]
            for trigger in scaled["spec"]["triggers"]:
                query = trigger["metadata"]["query"]
                assert 'namespace="sglang-ext"' in query
                for metric in re.findall(r"sglang_ext_router_\w+", query):
                    assert f"`{metric}`" in known
                assert pods.labels["sglang-ext.io/role"] != "decode" or "sglang:" in query
    assert not of_kind(results["default"]["documents"], "ScaledObject")


def queries(result: Document) -> dict[str, list[tuple[str, str]]]:
    return {
        one["metadata"]["name"]: [(t["metadata"]["query"], t["metadata"]["threshold"]) for t in one["spec"]["triggers"]]
        for one in of_kind(result["documents"], "ScaledObject")
    }


@pytest.mark.slow
@needs_helm
def test_decode_goes_by_its_own_pods() -> None:
    several = {"decode": {"role": "decode", "autoscaled": True}, "decode-2": {"role": "decode", "nodes": 2, "tp": 2}}
    several["decode-2"]["autoscaled"] = True
    (result,) = render([{**SCALING, "pools": several}])
    names = {
        "sglang-ext-decode": "sglang-ext-decode-7d9c5b6f4-x2x9k",
        "sglang-ext-decode-2": "sglang-ext-decode-2-group-0",
    }
    others = [
        "sglang-ext-decode-2-7d9c5b6f4-x2x9k",
        "sglang-ext-decode-2-group-0-1",
        "sglang-ext-router-7d9c5b6f4-x2x9k",
    ]
    for scaled, expressions in queries(result).items():
        for expression, _ in expressions:
            (pattern,) = re.findall('pod=~"([^"]*)"', expression)
            assert [name for name in [*names.values(), *others] if re.fullmatch(pattern, name)] == [names[scaled]]


@needs_helm
def test_beside_the_controller_one_pool_scales_by_the_work_of_both(results: dict[str, Document]) -> None:
    """As `simulate --scaler total` does it: what the pool that is not scaled takes is not asked for."""
    apart = queries(results["pools that scale"])
    assert set(apart) == {"sglang-ext-prefill-short", "sglang-ext-prefill-long", "sglang-ext-decode"}
    short = '{namespace="sglang-ext",model="Qwen/Qwen3-8B",pool=~"short"}'
    assert apart["sglang-ext-prefill-short"] == [
        (
            f"sum(max by (pool) (sglang_ext_router_pool_pending_tokens{short})"
            f" / max by (pool) (sglang_ext_router_pool_prefill_tokens_per_second{short}))",
            "2",
        ),
        (f"sum(max by (pool) (sglang_ext_router_pool_offered_instances{short}))", "0.7"),
    ]
    assert [each for _, each in apart["sglang-ext-decode"]] == ["32", "0.8"]
    (together,) = queries(results["a pool that scales beside the controller"]).values()
    both = short.replace('"short"', '"short|long"')
    assert together == [
        (
            f"clamp_min(sum(max by (pool) (sglang_ext_router_pool_pending_tokens{both})"
            f" / max by (pool) (sglang_ext_router_pool_prefill_tokens_per_second{both})) - 2 * 5, 0)",
            "5",
        ),
        (f"clamp_min(sum(max by (pool) (sglang_ext_router_pool_offered_instances{both})) - 2 * 0.7, 0)", "0.7"),
    ]
    (alone,) = queries(results["one pool that scales without a controller"]).values()
    assert len(alone) == 1


@needs_helm
@pytest.mark.skipif(not (PACKAGES / "promql_parser").is_dir(), reason="promql-parser is not there: `make charts-env`")
def test_the_queries_can_be_parsed(results: dict[str, Document], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGES))
    import promql_parser

    for name in ACCEPTED:
        for expressions in queries(results[name]).values():
            for expression, _ in expressions:
                promql_parser.parse(expression)


@pytest.mark.slow
@needs_helm
@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("DisaggregatedSet", ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSetRoleScaler")),
        ("RoleBasedGroup", ("workloads.x-k8s.io/v1alpha2", "RoleBasedGroupScalingAdapter")),
    ],
)
def test_what_scales_in_a_group(kind: str, target: tuple[str, str]) -> None:
    """The object that the group's controller makes for a role."""
    values = {
        **SCALING,
        "pools": {"decode": {"role": "decode", "autoscaled": True}},
        "groups": {"qwen": {"kind": kind, "pools": ["prefill", "decode"]}},
    }
    (result,) = render([values])
    check_custom_kinds(result["documents"])
    (scaled,) = of_kind(result["documents"], "ScaledObject")
    found = scaled["spec"]["scaleTargetRef"]
    assert (found["apiVersion"], found["kind"]) == target
    assert found["name"] == "sglang-ext-qwen-decode"
    # Its pods are named by the group's controller.
    assert all(
        '{namespace="sglang-ext",sglang_ext_io_pool="decode"}' in trigger["metadata"]["query"]
        for trigger in scaled["spec"]["triggers"]
    )
    (group,) = of_kind(result["documents"], kind)
    roles = {role["name"]: role for role in group["spec"]["roles"]}
    assert roles["decode"].get("scaling") == {"mode": "External"} or roles["decode"]["scalingAdapter"] == {
        "enable": True
    }
    assert "scaling" not in roles["prefill"]
    assert "scalingAdapter" not in roles["prefill"]
