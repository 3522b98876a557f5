"""The Helm chart: what it renders to over many values, and what it refuses. deploy/k8s is its default.

What needs Helm is skipped without it (`make charts-env`); the rendered default and the schema are always looked at.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sglang_ext import __version__
from sglang_ext_router.length_classes_file import read_length_classes
from support import manifests
from support.chart import CHART, ROOT, default_values, merged, needs_helm, render, values_schema
from support.custom_kinds import DEFINITIONS, SPECS, check_custom_kinds, read_definitions
from support.manifests import Document, Pods, matches, of_kind, pods_of
from support.monitoring_files import documented_scrape

pytestmark = pytest.mark.slow

RENDERED = ROOT / "deploy/k8s"

CPU_POOL = {"gpus": 0, "transferBackend": "sglang_ext_tcp", "args": ["--threads=4", "--kv-memory-mib=4096"]}
DIVIDED = {"role": "decode", "tp": 4, "dcp": 2, "sglangArgs": ["--attention-backend=flashmla"]}
STAGED = {"role": "prefill-long", "tp": 2, "pp": 2}
LARGE = {"nodes": 2, "tp": 16, "extraResources": {"rdma/hca": 8}, "addCapabilities": ["IPC_LOCK"]}
ROLES = ("prefill", "decode")
PVC: Document = {
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
}
ACCEPTED: dict[str, Document] = {
    "default": {},
    "pools apart": {
        "pools": {"prefill": None, **{name: {"role": name} for name in ("prefill-short", "prefill-long")}},
        "router": {"controller": "on"},
    },
    "prefill alone": {"pools": {"decode": {"role": "decode", "enabled": False}}},
    "many models": {
        "pools": {
            **{f"short-{i}": {"role": "prefill-short", "model": f"org/m{i}", "replicas": i + 1} for i in range(4)},
            **{
                f"decode-{i}": {"role": "decode", "model": f"org/m{i}", "servedModelName": f"org/m{i}"}
                for i in range(4)
            },
        }
    },
    "several nodes": {
        "pools": {
            "prefill-long": {"role": "prefill-long", **LARGE, "exclusiveTopology": "cloud.example/rack"},
            "decode": {"role": "decode", **LARGE, "replicas": 3, "maxSurge": 0, "maxUnavailable": 1},
        }
    },
    "an undivided pool and divided ones": {
        "pools": {"plain": {"role": "plain", "replicas": 2, "transferBackend": "nixl", "autoscaled": True}},
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
        "autoscaling": {"keda": {"enabled": True, "prometheusAddress": "http://p:9090"}},
    },
    "only undivided instances": {
        "pools": {
            **{name: {"role": name, "enabled": False} for name in ROLES},
            "plain": {"role": "plain", "nodes": 2, "tp": 16},
        }
    },
    "instances that change their role": {
        "poolDefaults": {"transferBackend": "mooncake", "sglangArgs": ["--enable-pd-role-switch"]},
        "router": {"controller": "on"},
    },
    "pipeline stages": {"pools": {"prefill-long": STAGED, "prefill-short": {"role": "prefill-short", "pp": 2}}},
    "KV-parallel decode": {"coordinator": {"enabled": False}, "pools": {"decode": DIVIDED}},
    "two revisions": {
        "pools": {
            **{
                f"new-{name}": {"role": role, "revision": "v2", "transferBackend": "nixl"}
                for name, role in (("prefill", "prefill"), ("decode", "decode"))
            },
        }
    },
    "no rights made": {"router": {"rbac": {"create": False}, "serviceAccount": {"create": False, "name": "given"}}},
    "no discovery": {
        "router": {
            "serviceDiscovery": False,
            "serviceAccount": {"create": False},
            "extraArgs": ["--prefill=http://10.0.0.1:30000", "--decode=http://10.0.0.2:30000"],
        }
    },
    "one router without a group": {"router": {"replicas": 1}, "keys": {"peer": ""}},
    "a controller": {"router": {"controller": "on", "replicas": 3}},
    "a controller that advises": {"router": {"controller": "advise"}},
    "TLS": {"router": {"tls": {"secret": "certificate"}, "service": {"type": "LoadBalancer", "port": 443}}},
    "tenants": {"router": {"tenants": {"secret": "our-tenants", "maxConcurrentRequests": 200}}},
    "length classes": {
        "router": {
            "lengthClasses": {
                "prefill": [
                    {"name": "s", "max_tokens": 256, "ttft_s": 0.5},
                    {"name": "m", "max_tokens": 4096},
                    {"name": "l"},
                ],
                "decode": [{"name": "few", "max_tokens": 2048}, {"name": "many"}],
            }
        },
        "pools": {
            "prefill": {"role": "prefill", "contextLengthRange": "0-4096"},
            "large": {"role": "prefill", "contextLengthRange": "4097-10000000"},
            "decode": {"role": "decode", "contextLengthRange": "0-2048"},
        },
    },
    "all keys": {"keys": {"api": "a", "admin": "b", "worker": "c", "huggingFace": "hf"}},
    "no coordinator": {"coordinator": {"enabled": False}},
    "CPU engines and a coordinator": {
        "poolDefaults": CPU_POOL,
        "pools": {"prefill-long": {"role": "prefill-long", "replicas": 2, "sharesLongPrompts": True}},
    },
    "a coordinator without a key": {
        "keys": {"pool": ""},
        "poolDefaults": CPU_POOL,
        "pools": {"prefill-long": {"role": "prefill-long", "replicas": 2, "sharesLongPrompts": True}},
    },
    "models on a volume": {"poolDefaults": {"model": "/models/m", "servedModelName": "m", **PVC}},
    "a route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example"]}},
    "no network policies": {"networkPolicy": {"enabled": False}},
    "metrics and clients": {
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "clientsFrom": [{"namespaceSelector": {}}],
        }
    },
    "a disaggregated set": {"groups": {"qwen": {"kind": "DisaggregatedSet", "pools": [*ROLES]}}},
    "a disaggregated set over several nodes": {
        "pools": {
            "prefill-long": {"role": "prefill-long", **LARGE, "exclusiveTopology": "cloud.example/rack"},
            "decode": {"role": "decode", **LARGE, "autoscaled": True},
        },
        "groups": {
            "large": {
                "kind": "DisaggregatedSet",
                "pools": ["prefill-long", "decode"],
                "slices": 2,
                "placement": {"type": "ExclusiveSlice", "topology": "cloud.example/block"},
            }
        },
    },
    "a role-based group": {
        "pools": {"decode": {"role": "decode", **LARGE, "autoscaled": True}},
        "groups": {"qwen": {"kind": "RoleBasedGroup", "pools": [*ROLES]}},
    },
    "monitoring": {
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}]},
        "monitoring": {
            "podMonitors": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
            "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
            "dashboard": {"enabled": True},
        },
    },
    "placement": {
        "router": {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "a", "operator": "Exists"}]},
        "poolDefaults": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "runtimeClassName": "nvidia",
            "priorityClassName": "serving",
            "podAnnotations": {"a": "b"},
            "autoscaled": True,
            "cacheSize": "200Gi",
        },
        "imagePullSecrets": [{"name": "registry"}],
    },
    "digests and a large boundary": {
        "boundaryTokens": 2000000,
        "router": {"image": {"repository": "r.example/router", "tag": "x", "digest": "sha256:" + "0" * 64}},
        "poolDefaults": {"image": {"repository": "r.example/worker", "tag": "x"}},
    },
    "other ports": {
        "router": {"port": 8080, "peerPort": 8081, "metricsPort": 8082},
        "worker": {"port": 9000, "bootstrapPort": 9001, "distributedPort": 9002},
        "pools": {"decode": {"role": "decode", "nodes": 4, "tp": 8}},
    },
    "a long name": {"fullnameOverride": "a" * 24, "pools": {"p" * 16: {"role": "prefill", "nodes": 2, "tp": 2}}},
}
# What the schema refuses, with a part of the place that is named.
REFUSED: dict[str, tuple[Document, str]] = {
    "an unknown value": ({"routers": {}}, "routers"),
    "a misspelt option": ({"router": {"replica": 3}}, "replica"),
    "a misspelt option of a pool": ({"pools": {"decode": {"role": "decode", "gpu": 1}}}, "gpu"),
    "no router": ({"router": {"replicas": 0}}, "replicas"),
    "an unknown role": ({"pools": {"a": {"role": "short"}}}, "pools"),
    "no role": ({"pools": {"a": {"model": "m"}}}, "pools"),
    "no instance": ({"poolDefaults": {"replicas": 0}}, "replicas"),
    "a name that no Service can have": ({"pools": {"Decode": {"role": "decode"}}}, "Decode"),
    "a name that is too long": ({"pools": {"d" * 17: {"role": "decode"}}}, "d" * 17),
    "a controller that YAML took for false": ({"router": {"controller": False}}, "controller"),
    "a tag in place of a digest": ({"router": {"image": {"repository": "r", "tag": "t", "digest": "v1"}}}, "digest"),
    "a revision that is no label": ({"poolDefaults": {"revision": "a b"}}, "revision"),
    "an unknown backend": ({"poolDefaults": {"transferBackend": "rdma"}}, "transferBackend"),
    "resources without memory": ({"pools": {"a": {"role": "decode", "resources": {"requests": {"cpu": 1}}}}}, "pools"),
    "a privileged port": ({"router": {"port": 80}}, "port"),
    "half a GPU": ({"poolDefaults": {"gpus": 0.5}}, "gpus"),
    "ports as text": ({"worker": {"port": "30000"}}, "port"),
    "a folder of the node": ({"poolDefaults": {"volumes": [{"name": "m", "hostPath": {"path": "/"}}]}}, "volumes"),
    "all capabilities": ({"poolDefaults": {"addCapabilities": ["SYS_ADMIN"]}}, "addCapabilities"),
    "a key in the values": ({"keys": {"api": "sk secret"}}, "api"),
    "an interval without a unit": ({"monitoring": {"podMonitors": {"interval": "15"}}}, "interval"),
    "an unknown kind of group": ({"groups": {"a": {"kind": "Deployment", "pools": [*ROLES]}}}, "groups"),
    "a group of one pool": ({"groups": {"a": {"kind": "DisaggregatedSet", "pools": ["decode"]}}}, "groups"),
    "a time without a unit": ({"httpRoute": {"timeout": "30"}}, "timeout"),
    "SGLang's arguments among the worker's": ({"poolDefaults": {"args": ["--"]}}, "args"),
    "an arbitrary start-up": ({"poolDefaults": {"startupSecs": 1}}, "startupSecs"),
    "no pools": ({"pools": {}}, "pools"),
}
# What the templates refuse, with a part of what they say; which names the place.
CONTRADICTIONS: dict[str, tuple[Document, str]] = {
    "ranks that do not fit nodes": (
        {"pools": {"decode": {"role": "decode", "nodes": 2, "tp": 3}}},
        "pools.decode: tp 3 is not a multiple of nodes 2",
    ),
    "stages that do not fit nodes": (
        {"pools": {"prefill-long": {**STAGED, "nodes": 3}}},
        "pools.prefill-long: tp 2 times pp 2 is not a multiple of nodes 3",
    ),
    "KV-parallel prefill": (
        {"pools": {"prefill-long": {"role": "prefill-long", "tp": 2, "dcp": 2}}},
        "pools.prefill-long: dcp 2, and only decode divides KV among ranks",
    ),
    "KV among ranks that do not divide": (
        {"pools": {"decode": {**DIVIDED, "tp": 3}}},
        "pools.decode: tp 3 is not a multiple of dcp 2",
    ),
    "KV-parallel decode and handshake": (
        {"poolDefaults": {"transferBackend": "handshake"}, "pools": {"decode": DIVIDED}},
        "pools.decode: dcp 2 does not go with transferBackend handshake",
    ),
    "KV-parallel decode and instances that share prompts": (
        {"pools": {"decode": DIVIDED}},
        "coordinator.enabled: false",
    ),
    "KV-parallel decode on CPUs": ({"pools": {"decode": {**DIVIDED, **CPU_POOL}}}, "dcp 2 needs GPUs"),
    "decode in stages": ({"pools": {"decode": {"role": "decode", "pp": 2}}}, "only prefill runs in stages"),
    "an undivided instance in stages": ({"pools": {"a": {"role": "plain", "pp": 2}}}, "only prefill runs in stages"),
    "an undivided instance in the coordinator's pool": (
        {"pools": {"a": {"role": "plain", "sharesLongPrompts": True}}},
        "is for prefill",
    ),
    "stages in the coordinator's pool": (
        {"pools": {"prefill-long": {**STAGED, "sharesLongPrompts": True}}},
        "needs all layers",
    ),
    "a topology for one node": (
        {"pools": {"decode": {"role": "decode", "exclusiveTopology": "rack"}}},
        "pools.decode: exclusiveTopology",
    ),
    "no coordinator": (
        {
            "coordinator": {"enabled": False},
            "pools": {"prefill-long": {"role": "prefill-long", "sharesLongPrompts": True}},
        },
        "needs coordinator.enabled",
    ),
    "decode in the coordinator's pool": (
        {"pools": {"decode": {"role": "decode", "sharesLongPrompts": True}}},
        "is for prefill",
    ),
    "an update that cannot go on": ({"poolDefaults": {"maxSurge": 0}}, "maxSurge and maxUnavailable are both 0"),
    "two transfer backends of a model": (
        {"pools": {"decode": {"role": "decode", "transferBackend": "nixl"}}},
        "transferBackend",
    ),
    "decode of a revision without prefill": (
        {"pools": {"decode": {"role": "decode", "revision": "v2"}}},
        "of revision v2",
    ),
    "decode without prefill": (
        {"pools": {"decode": {"role": "decode", "model": "other"}}},
        "no pool prefills for other",
    ),
    "routers that do not know each other": ({"keys": {"peer": ""}}, "keys.peer"),
    "a controller without discovery": (
        {"router": {"controller": "on", "serviceDiscovery": False}},
        "router.controller",
    ),
    "monitors that reach nothing": ({"monitoring": {"podMonitors": {"enabled": True}}}, "networkPolicy.metricsFrom"),
    "a group of a pool that is not there": (
        {"groups": {"a": {"kind": "RoleBasedGroup", "pools": ["prefill", "other"]}}},
        "groups.a: there is no pool other",
    ),
    "a pool in two groups": (
        {"groups": {name: {"kind": "RoleBasedGroup", "pools": [*ROLES]} for name in ("a", "b")}},
        "groups.b: pool prefill is in groups.a, too",
    ),
    "a group of two models": (
        {
            "pools": {"other": {"role": "prefill", "model": "other"}},
            "groups": {"a": {"kind": "DisaggregatedSet", "pools": ["prefill", "other"]}},
        },
        "a group is of one model",
    ),
    "names that are too long together": (
        {
            "fullnameOverride": "a" * 24,
            "groups": {"g" * 8: {"kind": "DisaggregatedSet", "pools": ["prefill", "decode"]}},
        },
        "longer than 36 characters",
    ),
    "slices of a role-based group": (
        {"groups": {"a": {"kind": "RoleBasedGroup", "slices": 2, "pools": [*ROLES]}}},
        "groups.a: slices and placement",
    ),
    "a route to nowhere": ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
    "a name that is too long": ({"fullnameOverride": "a" * 25}, "fullnameOverride"),
}


@pytest.fixture(scope="module")
def results() -> dict[str, Document]:
    return dict(zip(ACCEPTED, render(list(ACCEPTED.values())), strict=True))


def rendered_default() -> list[Document]:
    return [one for path in sorted(RENDERED.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text()) if one]


def the(documents: list[Document], component: str, role: str | None = None) -> Pods:
    (found,) = [
        pods
        for pods in pods_of(documents)
        if pods.component == component and role in {None, pods.labels.get("sglang-ext.io/role")}
    ]
    return found


# -- without Helm


def test_the_rendered_default_holds() -> None:
    documents = rendered_default()
    assert {path.name for path in RENDERED.iterdir()} == {
        f"{name}.yaml" for name in ("coordinator", "network", "pools", "rights", "router")
    }
    manifests.check(documents)
    assert {pods.labels["sglang-ext.io/role"] for pods in pods_of(documents) if pods.component == "worker"} == {*ROLES}
    router = the(documents, "router")
    assert router.owner["spec"]["replicas"] >= 2
    config = manifests.router_configuration(router)
    assert config.service_discovery
    assert config.peer_service == "sglang-ext-router-peers"
    for pods in pods_of(documents):
        if pods.component == "worker":
            start = pods.container["startupProbe"]
            assert start["failureThreshold"] * start["periodSeconds"] == 1800


def test_instances_have_all_of_their_grace_period_after_the_delay() -> None:
    values = default_values()["poolDefaults"]
    for pods in pods_of(rendered_default()):
        if pods.component == "worker":
            delay_s = pods.container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert delay_s == values["drainDelaySecs"]
            assert pods.spec["terminationGracePeriodSeconds"] >= delay_s + values["shutdownGraceSecs"] + 5


def test_the_chart_is_of_the_packages_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert default_values()["router"]["image"]["tag"] == chart["appVersion"]


def test_the_probes_paths_are_sglangs() -> None:
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    source = (Path(sglang.origin).parent / "srt/entrypoints/http_server.py").read_text()
    assert all(f'@app.get("{path}")' in source for path in manifests.WORKER_PATHS)
    coordinator = (ROOT / "python/sglang_ext/long_pool/coordinator").glob("*.py")
    assert any('"/health"' in path.read_text() for path in coordinator)


def test_the_schema_is_one_and_takes_the_chart_s_values() -> None:
    jsonschema.Draft7Validator.check_schema(values_schema())
    jsonschema.Draft7Validator(values_schema()).validate(default_values())


def test_the_values_in_the_documentation_are_taken() -> None:
    text = (ROOT / "docs/how-to/kubernetes.md").read_text()
    values = yaml.safe_load(text.partition("my-values.yaml <<'END'\n")[2].partition("END\n")[0])
    assert {pool["role"] for pool in values["pools"].values()} == {*ROLES}
    jsonschema.Draft7Validator(values_schema()).validate(merged(values))


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCEPTED)
def test_the_schema_takes(name: str) -> None:
    jsonschema.Draft7Validator(values_schema()).validate(merged(ACCEPTED[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_the_schema_refuses(name: str) -> None:
    values, place = REFUSED[name]
    if name == "no pools":
        values = {**default_values(), "pools": {}}
    errors = list(
        jsonschema.Draft7Validator(values_schema()).iter_errors(merged(values) if name != "no pools" else values)
    )
    assert errors
    assert any(place in f"{list(error.absolute_path)} {error.message}" for error in errors)


def test_every_value_is_described() -> None:
    """What the schema knows is in values.yaml, so that a reader finds it."""

    def missing(described: Document, values: Any, place: str) -> list[str]:
        found = []
        for key, inner in described.get("properties", {}).items():
            if key not in values:
                found.append(f"{place}{key}")
            elif isinstance(values[key], dict) and "properties" in inner:
                found += missing(inner, values[key], f"{place}{key}.")
        return found

    assert missing(values_schema(), default_values(), "") == ["global"]


@pytest.mark.slow
def test_what_does_not_hold_is_noticed() -> None:
    """The checks themselves: each of these breaks the default in one place."""

    def no_user(documents: list[Document]) -> None:
        del the(documents, "router").spec["securityContext"]["runAsNonRoot"]

    def token(documents: list[Document]) -> None:
        the(documents, "worker", "decode").spec["automountServiceAccountToken"] = True

    def option(documents: list[Document]) -> None:
        the(documents, "router").container["args"].append("--no-such-option=1")

    def port(documents: list[Document]) -> None:
        of_kind(documents, "Service")[0]["spec"]["ports"][0]["targetPort"] = "grpc"

    def selector(documents: list[Document]) -> None:
        of_kind(documents, "Service")[0]["spec"]["selector"]["sglang-ext.io/pool"] = "other"

    def open_worker(documents: list[Document]) -> None:
        (policy,) = [one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"].endswith("-workers")]
        del policy["spec"]["ingress"][0]["from"]

    def liveness(documents: list[Document]) -> None:
        the(documents, "worker", "decode").container["livenessProbe"]["httpGet"]["path"] = "/health"

    def rights(documents: list[Document]) -> None:
        of_kind(documents, "Role")[0]["rules"][0]["verbs"].append("delete")

    def grace(documents: list[Document]) -> None:
        the(documents, "router").spec["terminationGracePeriodSeconds"] = 100

    def budget(documents: list[Document]) -> None:
        documents.remove(of_kind(documents, "PodDisruptionBudget")[0])

    def role(documents: list[Document]) -> None:
        for service, _ in manifests.pool_services(documents):
            service["metadata"]["labels"]["sglang-ext.io/role"] = "prefill"

    broken = (no_user, token, option, port, selector, open_worker, liveness, rights, grace, budget, role)
    for breaks in broken:
        documents = rendered_default()
        breaks(documents)
        try:
            manifests.check(documents)
        except (Exception, SystemExit):
            continue
        pytest.fail(f"{breaks.__name__} was not noticed")


# -- with Helm


@pytest.mark.slow
@needs_helm
def test_the_rendered_default_is_what_the_chart_renders(results: dict[str, Document]) -> None:
    key = manifest_key
    assert sorted(rendered_default(), key=key) == sorted(results["default"]["documents"], key=key), (
        "run `python tools/render_chart.py`"
    )


def manifest_key(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


@needs_helm
def test_helm_finds_nothing_wrong() -> None:
    command = [sys.executable, "tools/render_chart.py", "--lint"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
@needs_helm
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_chart_renders_holds(results: dict[str, Document], name: str) -> None:
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["problems"] == []
    manifests.check(result["documents"])
    check_custom_kinds(result["documents"])
    for one in of_kind(result["documents"], "LeaderWorkerSet"):
        assert one["spec"]["leaderWorkerTemplate"]["size"] > 1


@needs_helm
@pytest.mark.kubernetes
def test_the_complete_definitions_allow_it(results: dict[str, Document]) -> None:
    definitions = read_definitions()
    if not SPECS.keys() <= definitions.keys():
        missing = ", ".join(kind for _, kind in sorted(SPECS.keys() - definitions.keys()))
        pytest.skip(f"{DEFINITIONS} has no CustomResourceDefinition of {missing}")
    for name, result in results.items():
        for one in result["documents"]:
            schema = definitions.get((one["apiVersion"], one["kind"]))
            if schema is not None:
                errors = [error.message[:200] for error in jsonschema.Draft7Validator(schema).iter_errors(one)]
                assert not errors, f"{name}: {one['kind']}: {errors}"
                surplus = {**one, "spec": {**one["spec"], "noSuchField": 1}}
                assert not jsonschema.Draft7Validator(schema).is_valid(surplus)


@pytest.mark.slow
@needs_helm
def test_what_the_chart_refuses() -> None:
    refused = {**REFUSED, **{f"contradiction: {name}": case for name, case in CONTRADICTIONS.items()}}
    del refused["no pools"]  # the chart's own would be left
    for (name, (_, place)), result in zip(refused.items(), render([case[0] for case in refused.values()]), strict=True):
        assert "error" in result, f"{name}: taken"
        assert place in result["error"], f"{name}: {result['error']}"


@needs_helm
def test_an_instance_of_several_nodes(results: dict[str, Document]) -> None:
    documents = results["several nodes"]["documents"]
    sets = of_kind(documents, "LeaderWorkerSet")
    assert {one["metadata"]["name"] for one in sets} == {"sglang-ext-prefill-long-group", "sglang-ext-decode-group"}
    (long,) = [one for one in sets if "long" in one["metadata"]["name"]]
    assert long["metadata"]["annotations"] == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.example/rack"}
    for pods in pods_of(documents):
        if pods.owner["kind"] == "LeaderWorkerSet":
            assert pods.container["resources"]["limits"]["nvidia.com/gpu"] == 8
            assert pods.container["resources"]["limits"]["rdma/hca"] == 8
            assert pods.container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
            assert bool(pods.ports) == (pods.labels["sglang-ext.io/part"] == "leader")


@needs_helm
def test_pools_of_a_group(results: dict[str, Document]) -> None:
    """Their pods are what they are without a group, and there is nothing else that makes them."""
    alone = {
        pods.labels["sglang-ext.io/pool"]: pods for pods in pods_of(rendered_default()) if pods.component == "worker"
    }
    documents = results["a disaggregated set"]["documents"]
    grouped = {pods.labels["sglang-ext.io/pool"]: pods for pods in pods_of(documents) if pods.component == "worker"}
    assert grouped.keys() == alone.keys()
    for name, pods in grouped.items():
        assert (pods.labels, pods.spec) == (alone[name].labels, alone[name].spec)
        assert pods.owner["kind"] == "DisaggregatedSet"
    assert [one["metadata"]["name"] for one in of_kind(documents, "Deployment")] == [
        "sglang-ext-coordinator",
        "sglang-ext-router",
    ]

    (large,) = of_kind(results["a disaggregated set over several nodes"]["documents"], "DisaggregatedSet")
    assert (large["spec"]["slices"], large["spec"]["placementPolicy"]["type"]) == (2, "ExclusiveSlice")
    long, decode = large["spec"]["roles"]
    assert long["metadata"]["annotations"] == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.example/rack"}
    assert (long["spec"]["replicas"], decode["scaling"]) == (1, {"mode": "External"})

    documents = results["a role-based group"]["documents"]
    leader, member = [pods for pods in pods_of(documents) if pods.nodes == 2]
    assert (leader.labels["sglang-ext.io/part"], member.labels["sglang-ext.io/part"]) == ("leader", "member")
    assert leader.ports.keys() == {"http", "load-events"}
    assert not member.ports
    assert "--node-rank=$(RBG_LWP_WORKER_INDEX)" in member.container["args"]
    assert of_kind(documents, "RoleBasedGroup")[0]["spec"]["roles"][1]["scalingAdapter"] == {"enable": True}


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("a disaggregated set", ("roles", 0, "spec", "rolloutStrategy", "type"), "Recreate"),
        ("a disaggregated set", ("roles", 0, "spec", "leaderWorkerTemplate", "restart"), "None"),
        ("a role-based group", ("roles", 0, "workload"), {}),
        ("a role-based group", ("roles", 1, "leaderWorkerPattern", "size"), 0),
        ("monitoring", ("podMetricsEndpoints", 0, "interval"), "soon"),
        ("a route", ("rules", 0, "matches", 0, "path", "type"), "Prefix"),
    ],
)
@needs_helm
def test_the_schemas_of_other_kinds_refuse(
    results: dict[str, Document], name: str, place: tuple[str | int, ...], value: object
) -> None:
    documents = copy.deepcopy(results[name]["documents"])
    kinds = ("DisaggregatedSet", "RoleBasedGroup", "PodMonitor", "HTTPRoute")
    inner = next(one for one in documents if one["kind"] in kinds)["spec"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check_custom_kinds(documents)


@needs_helm
def test_what_watches(results: dict[str, Document]) -> None:
    documents = results["monitoring"]["documents"]
    for monitor in of_kind(documents, "PodMonitor"):
        (chosen,) = {pods.component for pods in pods_of(documents) if matches(monitor["spec"]["selector"], pods.labels)}
        assert monitor["metadata"]["name"] == f"sglang-ext-{chosen}"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
        relabelled = [
            {snake.get(key, key): value for key, value in one.items()} for one in endpoint.get("metricRelabelings", [])
        ]
        assert relabelled == (documented_scrape()["metric_relabel_configs"] if chosen == "worker" else [])
        assert all(
            endpoint["port"] in pods.ports for pods in pods_of(documents) if pods.component == chosen and pods.ports
        )
    assert len(of_kind(documents, "PodMonitor")) == 3
    (rules,) = of_kind(documents, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    (board,) = of_kind(documents, "ConfigMap")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["sglang-ext.json"]) == json.loads((CHART / "files/dashboard.json").read_text())
    assert not of_kind(results["default"]["documents"], "PodMonitor")


@needs_helm
def test_undivided_and_switching_instances(results: dict[str, Document]) -> None:
    documents = results["an undivided pool and divided ones"]["documents"]
    plain = the(documents, "worker", "plain")
    assert "--role=plain" in plain.container["args"]
    assert not [argument for argument in plain.container["args"] if "bootstrap" in argument or "transfer" in argument]
    assert plain.ports.keys() == {"http", "kv-events", "kv-replay", "load-events"}
    assert (plain.ports["kv-events"], plain.ports["kv-replay"], plain.ports["load-events"]) == (5557, 5558, 5559)
    given = {"--kv-events-port=5557", "--kv-events-replay-port=5558", "--load-events-port=5559"}
    assert given <= set(plain.container["args"])
    policy = next(one for one in documents if one["metadata"]["name"].endswith("-kv-events"))
    (rule,) = policy["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [5557, 5558, 5559]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    (scaled,) = of_kind(documents, "ScaledObject")
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    for series in (
        'pending_tokens{namespace="sglang-ext",model="Qwen/Qwen3-8B",pool=~"plain"}',
        "num_running_reqs",
        "usage",
    ):
        assert series in queries

    documents = results["instances that change their role"]["documents"]
    decode = the(documents, "worker", "decode")
    assert "--bootstrap-port=8998" in decode.container["args"]
    assert decode.ports.keys() == {"http", "bootstrap", "load-events"}
    for policy in of_kind(documents, "NetworkPolicy"):
        if policy["metadata"]["name"].endswith(("-prefill", "-decode")):
            (source,) = policy["spec"]["ingress"][0]["from"]
            assert "sglang-ext.io/role" not in json.dumps(source)


@needs_helm
def test_what_the_values_say_reaches_the_programs(results: dict[str, Document]) -> None:
    controller = manifests.router_configuration(the(results["a controller"]["documents"], "router"))
    assert (controller.controller, controller.controller_lease) == ("on", "sglang-ext-router-controller")
    tls = the(results["TLS"]["documents"], "router")
    assert tls.container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert manifests.router_configuration(tls).ssl_certfile == "/etc/sglang-ext/tls/tls.crt"
    shared = the(results["tenants"]["documents"], "router")
    shared_router = manifests.router_configuration(shared)
    assert shared_router.tenants_file
    assert (shared_router.usage_db, shared_router.max_concurrent_requests) == ("/var/lib/sglang-ext/usage.db", 200)
    mounts = {mount["name"]: mount for mount in shared.container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in shared.spec["volumes"]}
    assert mounts["tenants"] == {"name": "tenants", "mountPath": "/etc/sglang-ext/tenants", "readOnly": True}
    assert mounts["usage"]["mountPath"] == "/var/lib/sglang-ext"
    assert volumes["tenants"]["secret"]["secretName"] == "our-tenants"
    assert "emptyDir" in volumes["usage"]
    divided = results["length classes"]["documents"]
    classes = read_length_classes(manifests.router_configuration(the(divided, "router")).length_classes)
    assert [(spec.name, spec.max_tokens, spec.ttft_s) for spec in classes.prefill] == [
        ("s", 256, 0.5),
        ("m", 4096, 0.0),
        ("l", None, 0.0),
    ]
    assert [spec.max_tokens for spec in classes.decode] == [2048, None]
    labels = {
        (document["kind"], document["metadata"]["labels"]["sglang-ext.io/pool"]): document["metadata"]["labels"]
        for document in divided
        if "sglang-ext.io/pool" in document["metadata"].get("labels", {})
    }
    ranges = {
        pool: each.get("llm-d.ai/context-length-range") for (kind, pool), each in labels.items() if kind == "Service"
    }
    assert ranges == {"prefill": "0-4096", "large": "4097-10000000", "decode": "0-2048"}
    keyed = the(results["all keys"]["documents"], "worker", "decode")
    assert "--api-key=$(SGLANG_EXT_WORKER_API_KEY)" in keyed.container["args"]
    cpu = results["CPU engines and a coordinator"]["documents"]
    assert "--device=cpu" in the(cpu, "worker", "decode").container["args"]
    assert "nvidia.com/gpu" not in the(cpu, "worker", "decode").container["resources"].get("limits", {})
    member = the(cpu, "worker", "prefill-long")
    assert "--cdsp-coordinator=sglang-ext-coordinator:8990" in member.container["args"]
    for one, option in ((member, "--cdsp-key-file"), (the(cpu, "coordinator"), "--key-file")):
        assert f"{option}=/etc/sglang-ext/pool/key" in one.container["args"]
        assert {"name": "pool-key", "mountPath": "/etc/sglang-ext/pool", "readOnly": True} in (
            one.container["volumeMounts"]
        )
        (key,) = (volume["secret"] for volume in one.spec["volumes"] if volume["name"] == "pool-key")
        assert (key["secretName"], key["items"]) == ("sglang-ext-keys", [{"key": "pool-key", "path": "key"}])
    assert "pool-key" not in json.dumps(the(cpu, "worker", "decode").spec)
    assert "pool-key" not in json.dumps(results["a coordinator without a key"]["documents"])
    large = manifests.router_configuration(the(results["digests and a large boundary"]["documents"], "router"))
    assert large.length_boundary_tokens == 2000000
    image = the(results["digests and a large boundary"]["documents"], "router").container["image"]
    assert image == "r.example/router@sha256:" + "0" * 64
    scaled = results["placement"]["documents"]
    assert "replicas" not in the(scaled, "worker", "decode").owner["spec"]
    assert not of_kind(results["no network policies"]["documents"], "NetworkPolicy")
    assert of_kind(results["a route"]["documents"], "HTTPRoute")
    assert not of_kind(results["no rights made"]["documents"], "Role")


@needs_helm
def test_who_shares_long_prompts(results: dict[str, Document]) -> None:
    """One pool does, with a coordinator; its instances send KV themselves, and so their decode instances take it."""

    def said(name: str, option: str) -> dict[str, list[str]]:
        return {
            pods.labels.get("sglang-ext.io/pool", pods.component): [
                argument.partition("=")[2] for argument in pods.container["args"] if argument.startswith(f"--{option}=")
            ]
            for pods in pods_of(results[name]["documents"])
        }

    (address,) = said("default", "cdsp-coordinator")["prefill"]
    assert address == "sglang-ext-coordinator:8990"
    assert said("default", "transfer-backend") == {
        "prefill": ["handshake"],
        "decode": ["handshake"],
        "router": [],
        "coordinator": [],
    }
    assert said("default", "coordinator-url")["router"] == ["http://sglang-ext-coordinator:8991"]
    for name in ("pools apart", "no coordinator"):
        assert "coordinator" not in said(name, "transfer-backend")
        assert not any(said(name, "cdsp-coordinator").values())
        assert said(name, "transfer-backend")["decode"] == ["auto"]
        assert said(name, "coordinator-url")["router"] == []
