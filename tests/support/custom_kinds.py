"""Schemas of the kinds that Kubernetes itself does not have, for what the chart renders of them.

Each lists the fields that the chart may use, with their types and enumerations as the kind's own definition has them,
and refuses any other. Pod templates within them are checked by the schemas of Kubernetes (`tools/render_chart.py`).
Where the projects' own CustomResourceDefinitions are at hand (`DEFINITIONS`), documents are held against these as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """`required` names some of them; no other is allowed."""
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def _list_of(item: Schema, at_least: int = 0, at_most: int = 1000) -> Schema:
    return {"type": "array", "items": item, "minItems": at_least, "maxItems": at_most}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT: Schema = {"type": "integer", "minimum": 0}
SIZE: Schema = {"type": "integer", "minimum": 1}
COUNT_OR_SHARE: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
FLAG: Schema = {"type": "boolean"}
TEMPLATE: Schema = {"type": "object", "required": ["spec"]}
SELECTOR: Schema = _object(("matchLabels",), matchLabels=TEXTS)

_LEADER_WORKER_SET = {
    "replicas": COUNT,
    "startupPolicy": _one_of("LeaderCreated", "LeaderReady"),
    "rolloutStrategy": _object(
        ("type",),
        type=_one_of("RollingUpdate"),
        rollingUpdateConfiguration=_object(maxSurge=COUNT_OR_SHARE, maxUnavailable=COUNT_OR_SHARE),
    ),
    "leaderWorkerTemplate": _object(
        ("workerTemplate",),
        leaderTemplate=TEMPLATE,
        workerTemplate=TEMPLATE,
        size=SIZE,
        restartPolicy=_one_of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
    ),
}
_DISAGGREGATED_SET = _object(
    ("roles",),
    slices={"type": "integer", "minimum": 1, "maximum": 100},
    placementPolicy=_object(type=_one_of("None", "ExclusiveSlice", "ExclusiveTopology"), topology=TEXT),
    roles=_list_of(
        _object(
            ("name", "spec"),
            name=NAME,
            metadata=_object(labels=TEXTS, annotations=TEXTS),
            scaling=_object(mode=_one_of("Static", "External")),
            spec=_object(("leaderWorkerTemplate",), **_LEADER_WORKER_SET),
        ),
        at_least=2,
        at_most=10,
    ),
)
_ROLE_BASED_GROUP = _object(
    ("roles",),
    roles=_list_of(
        {
            **_object(
                ("name", "replicas"),
                name=TEXT,
                labels=TEXTS,
                replicas=COUNT,
                scalingAdapter=_object(enable=FLAG),
                rolloutStrategy=_object(
                    ("type",),
                    type=_one_of("RollingUpdate"),
                    rollingUpdate=_object(maxSurge=COUNT_OR_SHARE, maxUnavailable=COUNT_OR_SHARE),
                ),
                standalonePattern=_object(("template",), template=TEMPLATE),
                leaderWorkerPattern=_object(
                    ("template", "size"),
                    size=SIZE,
                    restartPolicyConfig=_object(type=_one_of("None", "RecreateRoleInstanceOnPodRestart")),
                    template=TEMPLATE,
                    leaderTemplatePatch=TEMPLATE,
                    workerTemplatePatch=TEMPLATE,
                ),
            ),
            "oneOf": [{"required": ["standalonePattern"]}, {"required": ["leaderWorkerPattern"]}],
        },
        at_least=1,
    ),
)
_DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_HTTP_ROUTE = _object(
    ("parentRefs", "rules"),
    parentRefs=_list_of({"type": "object", "required": ["name"]}, at_least=1, at_most=32),
    hostnames=_list_of(TEXT, at_most=16),
    rules=_list_of(
        _object(
            matches=_list_of(
                _object(
                    path=_object(
                        ("type", "value"), type=_one_of("Exact", "PathPrefix", "RegularExpression"), value=TEXT
                    )
                )
            ),
            timeouts=_object(request=_DURATION, backendRequest=_DURATION),
            backendRefs=_list_of(_object(("name", "port"), name=NAME, port={"type": "integer", "maximum": 65535})),
        ),
        at_least=1,
        at_most=16,
    ),
)
_POD_MONITOR = _object(
    ("selector", "podMetricsEndpoints"),
    selector=SELECTOR,
    podTargetLabels=_list_of(TEXT),
    podMetricsEndpoints=_list_of(
        _object(
            port=TEXT,
            path=TEXT,
            interval={"type": "string", "pattern": "^[0-9]+(s|m|h)$"},
            metricRelabelings=_list_of(
                _object(sourceLabels=_list_of(TEXT), regex=TEXT, targetLabel=TEXT, replacement=TEXT)
            ),
        ),
        at_least=1,
    ),
)
_PROMETHEUS_RULE = _object(
    ("groups",),
    groups=_list_of(
        _object(
            ("name", "rules"),
            name=TEXT,
            rules=_list_of(
                _object(
                    ("alert", "expr"),
                    alert=TEXT,
                    expr=TEXT,
                    labels=TEXTS,
                    annotations=TEXTS,
                    **{"for": {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}},
                ),
                at_least=1,
            ),
        ),
        at_least=1,
    ),
)
_SCALING_RULES = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=_list_of(
        _object(
            ("type", "value", "periodSeconds"),
            type=_one_of("Pods", "Percent"),
            value=SIZE,
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
_SCALED_OBJECT = _object(
    ("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "triggers"),
    scaleTargetRef=_object(("apiVersion", "kind", "name"), apiVersion=TEXT, kind=TEXT, name=TEXT),
    pollingInterval=SIZE,
    minReplicaCount=SIZE,
    maxReplicaCount=SIZE,
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=_SCALING_RULES, scaleDown=_SCALING_RULES))
    ),
    triggers=_list_of(
        _object(
            ("type", "metricType", "metadata"),
            type=_one_of("prometheus"),
            metricType=_one_of("AverageValue"),
            metadata={**TEXTS, "required": ["serverAddress", "query", "threshold"]},
            authenticationRef=_object(("name",), name=TEXT),
        ),
        at_least=1,
    ),
)
# apiVersion and kind → schema of `spec`
SPECS: dict[tuple[str, str], Schema] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _object(("leaderWorkerTemplate",), **_LEADER_WORKER_SET),
    ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"): _DISAGGREGATED_SET,
    ("workloads.x-k8s.io/v1alpha2", "RoleBasedGroup"): _ROLE_BASED_GROUP,
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _HTTP_ROUTE,
    ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): _PROMETHEUS_RULE,
}
# Groups of kinds that Kubernetes has itself.
_BUILT_IN = frozenset({"", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io"})


def check_custom_kinds(documents: list[dict[str, Any]]) -> None:
    """AssertionError for a kind that no schema knows, jsonschema.ValidationError for what a schema refuses."""
    for one in documents:
        group, slash, _ = one["apiVersion"].partition("/")
        if (group if slash else "") in _BUILT_IN:
            continue
        key = one["apiVersion"], one["kind"]
        assert key in SPECS, f"{key} has no schema"
        jsonschema.validate(one["spec"], SPECS[key])
        check_set_rules(one)


def check_set_rules(one: dict[str, Any]) -> None:
    """What the definition of a DisaggregatedSet says in rules: names once, and replicas of all roles or of none."""
    if one["kind"] != "DisaggregatedSet":
        return
    roles = one["spec"]["roles"]
    assert len({role["name"] for role in roles}) == len(roles)
    counts = [
        role["spec"].get("replicas", 1) for role in roles if role.get("scaling", {}).get("mode", "Static") == "Static"
    ]
    assert all(counts) or not any(counts)


# -- the complete definitions, where they are at hand

DEFINITIONS = Path(os.environ.get("SGLANG_EXT_CRDS") or Path.home() / ".cache/sglang-ext/crds")


def read_definitions(folder: Path = DEFINITIONS) -> dict[tuple[str, str], Schema]:
    """Of each CustomResourceDefinition in the folder's YAML files: apiVersion and kind → schema of the whole object."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # they have megabytes
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for one in yaml.load_all(path.read_text(encoding="utf-8"), loader):
            if one and one.get("kind") == "CustomResourceDefinition":
                for version in one["spec"]["versions"]:
                    key = f"{one['spec']['group']}/{version['name']}", one["spec"]["names"]["kind"]
                    found[key] = closed(version["schema"]["openAPIV3Schema"])
                    found[key]["properties"]["metadata"] = {"type": "object"}
    return found


def closed(schema: Schema) -> Schema:
    """A structural schema as JSON Schema that refuses what an API server would prune: fields that it does not name."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    result = {key: value for key, value in schema.items() if key != "format"}  # int32 and the like
    if "properties" in result:
        result["properties"] = {name: closed(inner) for name, inner in result["properties"].items()}
        if not result.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = closed(result[key])
    return result
