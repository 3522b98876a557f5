"""What must hold of Kubernetes manifests, whatever they were rendered from: pods, Services, rights, NetworkPolicies."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import yaml

from sglang_ext.engine import worker
from sglang_ext.long_pool.coordinator import coordinator_command
from sglang_ext.transfer.sglang import transfer_options
from sglang_ext.types import Role
from sglang_ext_router import command_line as router_command_line
from sglang_ext_router.command_line import config_from_arguments
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.decide.endpoint_slices import RoleRules, read_slice
from sglang_ext_router.http.access import PROBE_PATHS
from support.tenants import tenants_file

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR_PATHS = frozenset({"/health"})
WORKER_PATHS = frozenset({"/health", "/ping"})  # of SGLang's server
# What the pods of an instance on several nodes are told, by the kind that makes them.
_NODES = {"GROUP_SIZE": "2", "WORKER_INDEX": "1", "LEADER_ADDRESS": "leader.group"}
GROUP_PREFIXES = {"LeaderWorkerSet": "LWS_", "DisaggregatedSet": "LWS_", "RoleBasedGroup": "RBG_LWP_"}

Document = dict[str, Any]


class Pods(NamedTuple):
    """The pods of one template."""

    name: str  # of what makes them
    component: str  # router, worker or coordinator
    labels: Mapping[str, str]
    spec: Document
    owner: Document
    nodes: int = 1  # of one instance

    @property
    def container(self) -> Document:
        (one,) = self.spec["containers"]
        assert isinstance(one, dict)
        return one

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}


def pods_of(documents: list[Document]) -> list[Pods]:
    """Of every template."""
    return [pods for one in documents for pods in _pods_of_one(one)]


def _pods_of_one(one: Document) -> Iterator[Pods]:
    name, spec = one["metadata"]["name"], one.get("spec", {})
    if one["kind"] == "Deployment":
        yield _pods(name, spec["template"], one)
    elif one["kind"] == "LeaderWorkerSet":
        yield from _leader_and_workers(name, spec["leaderWorkerTemplate"], one)
    elif one["kind"] == "DisaggregatedSet":
        for role in spec["roles"]:
            yield from _leader_and_workers(f"{name}/{role['name']}", role["spec"]["leaderWorkerTemplate"], one)
    elif one["kind"] == "RoleBasedGroup":
        for role in spec["roles"]:
            role_name = f"{name}/{role['name']}"
            if "standalonePattern" in role:
                yield _pods(role_name, role["standalonePattern"]["template"], one)
            else:
                pattern = role["leaderWorkerPattern"]
                leader = strategic_merge(pattern["template"], pattern["leaderTemplatePatch"])
                for template in (leader, pattern["template"]):
                    yield _pods(role_name, template, one, pattern["size"])


def _leader_and_workers(name: str, template: Document, owner: Document) -> Iterator[Pods]:
    """Of a LeaderWorkerSet's template; without a template of their own leaders are as workers."""
    for part in ("leaderTemplate", "workerTemplate"):
        if part in template:
            yield _pods(name, template[part], owner, template["size"])


def _pods(name: str, template: Document, owner: Document, nodes: int = 1) -> Pods:
    labels = template["metadata"]["labels"]
    return Pods(name, labels["app.kubernetes.io/component"], labels, template["spec"], owner, nodes)


def strategic_merge(below: Any, patch: Any) -> Any:
    """As Kubernetes merges pod templates: lists of named things by their names, others are replaced."""
    if isinstance(below, dict) and isinstance(patch, dict):
        merged = {key: strategic_merge(below[key], value) if key in below else value for key, value in patch.items()}
        return below | merged
    if isinstance(below, list) and isinstance(patch, list) and all(isinstance(one, dict) for one in below + patch):
        key = next((key for key in ("mountPath", "name") if all(key in one for one in below + patch)), "")
        if key:
            merged_entries = {one[key]: one for one in below}
            for one in patch:
                merged_entries[one[key]] = strategic_merge(merged_entries.get(one[key], {}), one)
            return list(merged_entries.values())
    return patch


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [one for one in documents if one["kind"] == kind]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """As Kubernetes reads a LabelSelector; an empty one matches all."""
    for wanted in selector.get("matchExpressions", []):
        assert wanted["operator"] == "In"
        if labels.get(wanted["key"]) not in wanted["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def check(documents: list[Document]) -> None:
    """All of it."""
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(set(names)) == len(names), "a name is there twice"
    for pods in pods_of(documents):
        check_security(pods)
        check_volumes(pods)
        check_probes(pods)
        check_command(pods)
    check_services(documents)
    check_selectors(documents)
    check_disruption(documents)
    check_network(documents)
    check_rights(documents)
    check_roles(documents)


def check_security(pods: Pods) -> None:
    """No more rights than are needed, and what is requested of a node is told."""
    context = pods.spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pods.spec.keys()
    for container in pods.spec["containers"] + pods.spec.get("initContainers", []):
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in own
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        for entry in container["env"]:
            assert "KEY" not in entry["name"] or "secretKeyRef" in entry["valueFrom"], entry["name"]


def check_volumes(pods: Pods) -> None:
    """What is mounted is there, what is there is mounted, and there is a place for temporary files."""
    mounts = pods.container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pods.spec["volumes"]}
    places = [mount["mountPath"] for mount in mounts]
    assert len(set(places)) == len(places)
    assert "/tmp" in places
    home = next(entry["value"] for entry in pods.container["env"] if entry["name"] == "HOME")
    assert home in places


def check_probes(pods: Pods) -> None:
    """Paths and ports exist; loading is waited for; liveness computes no token."""
    container = pods.container
    if not pods.ports:  # a node of an instance that does not serve
        assert not {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys()
        return
    paths = {
        "router": {path.decode() for path in PROBE_PATHS},
        "worker": WORKER_PATHS,
        "coordinator": COORDINATOR_PATHS,
    }[pods.component]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        assert probe["timeoutSeconds"] >= 5
        if "httpGet" in probe:
            assert probe["httpGet"]["path"] in paths
            assert probe["httpGet"]["port"] in pods.ports
        else:
            assert pods.component == "worker"
            assert "/ping" in probe["exec"]["command"][-1]
            compile(probe["exec"]["command"][-1], "probe", "exec")
    alive = container["livenessProbe"].get("httpGet", {}).get("path", "/ping")
    ready = container["readinessProbe"]["httpGet"]["path"]
    if pods.component == "router":
        assert (alive, ready) == ("/liveness", "/readyz")
    if pods.component == "worker":
        assert (alive, ready) == ("/ping", "/health")
        start = container["startupProbe"]
        assert start["failureThreshold"] * start["periodSeconds"] >= 60
        if pods.owner["kind"] == "Deployment":
            waits_s = start["failureThreshold"] * start["periodSeconds"]
            assert pods.owner["spec"]["progressDeadlineSeconds"] > waits_s


def words_of(pods: Pods) -> list[str]:
    """The command line as the process gets it."""
    values = {entry["name"]: entry.get("value", "of-the-cluster") for entry in pods.container["env"]}
    if pods.nodes > 1:
        values |= {GROUP_PREFIXES[pods.owner["kind"]] + name: value for name, value in _NODES.items()}
    words = []
    for word in [*pods.container["command"], *pods.container["args"]]:
        for name, value in values.items():
            word = word.replace(f"$({name})", value)
        assert "$(" not in word, f"{word} names a variable that is not there"
        words.append(word)
    return words


def check_command(pods: Pods) -> None:
    """The program takes its options, and has the time that it asks for."""
    words = words_of(pods)
    assert words[:2] == ["sglang-ext", pods.component]
    parser = argparse.ArgumentParser(exit_on_error=False)
    grace_s = pods.spec["terminationGracePeriodSeconds"]
    if pods.component == "router":
        config = router_configuration(pods)
        expected = {"peer": config.peer_port, "metrics": config.metrics_port}
        expected["https" if config.ssl_certfile else "http"] = config.port
        assert {name: port for name, port in expected.items() if port} == {
            name: port for name, port in pods.ports.items() if expected.get(name)
        }
        assert grace_s > config.drain_delay_secs + config.shutdown_grace_period_secs
    elif pods.component == "coordinator":
        coordinator_command.add_arguments(parser)
        options = parser.parse_args(words[2:])
        assert pods.ports == {"members": options.port, "http": options.http_port}
    else:
        worker.add_arguments(parser)
        options = parser.parse_args(words[2:])
        options.dry_run = True
        with NamedTemporaryFile("w") as key_file:  # the Secret's, which is there in the pod alone
            key_file.write(16 * "k")
            key_file.flush()
            if options.cdsp_key_file is not None:
                options.cdsp_key_file = Path(key_file.name)
            # What moves KV between GPUs is in the image.
            with patch.object(transfer_options, "unavailable_reason", return_value=None):
                assert worker.run(options) == 0, "the options contradict each other"
        assert options.host == "0.0.0.0"
        assert options.engine_arguments
        if pods.ports:
            assert pods.ports["http"] == options.port
            assert pods.ports.get("bootstrap", options.bootstrap_port) == options.bootstrap_port
        assert grace_s > pods.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        check_group(pods, options.engine_arguments)


def check_group(pods: Pods, engine_arguments: list[str]) -> None:
    """The ranks of an instance fit on its pods' GPUs."""
    given = dict(word.partition("=")[::2] for word in engine_arguments)
    ranks = int(given["--tp-size"]) * int(given.get("--pp-size", 1))
    requests, limits = pods.container["resources"]["requests"], pods.container["resources"].get("limits", {})
    gpus = [name for name in limits if "/" in name and "gpu" in name]
    assert any(word.startswith("--nnodes=") for word in engine_arguments) == (pods.nodes > 1)
    for name in gpus:
        assert requests[name] == limits[name]
        assert limits[name] * pods.nodes == ranks


def router_configuration(pods: Pods) -> RouterConfig:
    """Return what the router makes of its command line, with keys in its environment; an error for what it refuses.

    The file of tenants, which a Secret would bring, is one of a single tenant.
    """
    parser = argparse.ArgumentParser(exit_on_error=False)
    router_command_line.add_arguments(parser)
    options = parser.parse_args(words_of(pods)[2:])
    for entry in pods.container["env"]:
        if entry["name"] == "SGLANG_EXT_PEER_KEY":
            options.peer_key = "a key that is long enough to be one, in any case"
    with TemporaryDirectory() as folder:
        if options.tenants_file:
            options.tenants_file = tenants_file(Path(folder), a={})
        return config_from_arguments(options)


def check_services(documents: list[Document]) -> None:
    """Each selects pods, and names ports that they have; a group of nodes is served by its leader alone."""
    sets = {one["metadata"]["name"] for one in of_kind(documents, "LeaderWorkerSet")}
    for service in of_kind(documents, "Service"):
        name = service["metadata"]["name"]
        # The controller of a LeaderWorkerSet makes a Service of the same name.
        assert name not in sets
        chosen = [
            pods for pods in pods_of(documents) if matches({"matchLabels": service["spec"]["selector"]}, pods.labels)
        ]
        assert len(chosen) == 1, f"Service {name} selects pods of {len(chosen)} templates"
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in chosen[0].ports, f"Service {name}: no port {port['targetPort']}"
            if service["spec"].get("clusterIP") == "None":
                assert port["port"] == chosen[0].ports[port["targetPort"]], f"Service {name} is headless"
    for pods in pods_of(documents):
        if pods.component == "router":
            config = router_configuration(pods)
            if config.peer_service:
                (peers,) = [
                    one for one in of_kind(documents, "Service") if one["metadata"]["name"] == config.peer_service
                ]
                assert peers["spec"]["clusterIP"] == "None"
                assert peers["spec"]["publishNotReadyAddresses"] is True


def check_selectors(documents: list[Document]) -> None:
    """A Deployment has its own pods and no other's."""
    for deployment in of_kind(documents, "Deployment"):
        selected = [pods.name for pods in pods_of(documents) if matches(deployment["spec"]["selector"], pods.labels)]
        assert selected == [deployment["metadata"]["name"]]
        template = deployment["spec"]["template"]
        for constraint in template["spec"].get("topologySpreadConstraints", []):
            assert matches(constraint["labelSelector"], template["metadata"]["labels"])


def check_disruption(documents: list[Document]) -> None:
    """Routers and every pool have a budget of their own."""
    budgets = of_kind(documents, "PodDisruptionBudget")
    for pods in pods_of(documents):
        if pods.component != "coordinator":
            chosen = [one for one in budgets if matches(one["spec"]["selector"], pods.labels)]
            assert len(chosen) == 1, f"{pods.name} has {len(chosen)} PodDisruptionBudgets"
    for budget in budgets:
        owners = {pods.name for pods in pods_of(documents) if matches(budget["spec"]["selector"], pods.labels)}
        assert len(owners) == 1


def reaches(documents: list[Document], source: Mapping[str, str], target: Mapping[str, str], port: int) -> bool:
    """Whether the NetworkPolicies let a pod with labels `source`, of the same namespace, reach `port` of `target`."""
    selecting = [
        one["spec"] for one in of_kind(documents, "NetworkPolicy") if matches(one["spec"]["podSelector"], target)
    ]
    if not selecting:
        return True
    for rule in (rule for spec in selecting for rule in spec["ingress"]):
        opens = any(one["port"] <= port <= one.get("endPort", one["port"]) for one in rule["ports"])
        from_it = "from" not in rule or any(
            "podSelector" in peer and "namespaceSelector" not in peer and matches(peer["podSelector"], source)
            for peer in rule["from"]
        )
        if opens and from_it:
            return True
    return False


def check_network(documents: list[Document]) -> None:
    """Who reaches what, where there are NetworkPolicies."""
    if not of_kind(documents, "NetworkPolicy"):
        return
    for policy in of_kind(documents, "NetworkPolicy"):
        selected = [pods for pods in pods_of(documents) if matches(policy["spec"]["podSelector"], pods.labels)]
        assert selected or policy["metadata"]["name"].endswith(("-prefill", "-decode")), policy["metadata"]["name"]
    everything = pods_of(documents)
    stranger = {"app.kubernetes.io/name": "another"}
    has_coordinator = any(pods.component == "coordinator" for pods in everything)
    for target in everything:
        for name, port in target.ports.items():
            if target.component == "worker" or name == "peer":
                assert not reaches(documents, stranger, target.labels, port)
            for source in everything:
                is_open = reaches(documents, source.labels, target.labels, port)
                if target.component == "worker" and name == "http":
                    assert is_open == (source.component == "router")
                if name == "peer":
                    assert is_open == (source.component == "router")
        if target.component == "worker":
            for source in everything:
                is_open = reaches(documents, source.labels, target.labels, 45678)  # a backend's own port
                kinds = {kind_of(source), kind_of(target)}
                if source.component != "worker":
                    assert is_open is False
                elif source.name == target.name and target.nodes > 1:
                    assert is_open
                elif any(may_switch(pods) for pods in everything):
                    assert is_open == (kind_of(target) in {"prefill", "decode"})
                else:
                    assert is_open == (kinds == {"prefill", "decode"} or (has_coordinator and kinds == {"prefill"}))
        if target.component == "coordinator":
            for source in everything:
                is_member = kind_of(source) == "prefill"
                assert reaches(documents, source.labels, target.labels, target.ports["members"]) == is_member


def kind_of(pods: Pods) -> str:
    """prefill, decode or plain; empty where the pods are no instances."""
    return str(pods.labels.get("sglang-ext.io/role", "")).partition("-")[0]


def may_switch(pods: Pods) -> bool:
    """Return whether an instance may change between prefill and decode."""
    return "--enable-pd-role-switch" in pods.container["args"]


def documented_rules() -> list[Document]:
    """The rules of the Role in docs/how-to/kubernetes.md."""
    text = (ROOT / "docs/how-to/kubernetes.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    roles = [one for block in blocks for one in yaml.safe_load_all(block) if one and one.get("kind") == "Role"]
    (role,) = roles
    rules = role["rules"]
    assert isinstance(rules, list)
    return rules


def check_rights(documents: list[Document]) -> None:
    """A token and rights for routers that ask the API server, as documented; for nothing else."""
    accounts = of_kind(documents, "ServiceAccount")
    assert all(one["automountServiceAccountToken"] is False for one in accounts)
    slices, leases = documented_rules()
    for pods in pods_of(documents):
        config = router_configuration(pods) if pods.component == "router" else None
        needs_token = config is not None and config.service_discovery
        assert pods.spec["automountServiceAccountToken"] == needs_token
        for binding in of_kind(documents, "RoleBinding"):
            (subject,) = binding["subjects"]
            assert (subject["name"] == pods.spec.get("serviceAccountName", "default")) == needs_token
        if config is not None:
            for role in of_kind(documents, "Role"):
                assert role["rules"] == ([slices, leases] if config.controller_lease else [slices])
                assert {one["roleRef"]["name"] for one in of_kind(documents, "RoleBinding")} == {
                    role["metadata"]["name"]
                }
    assert not of_kind(documents, "ClusterRole") + of_kind(documents, "Secret")


def check_roles(documents: list[Document]) -> None:
    """Discovery finds each pool's Service in the role that its pods were started in."""
    services = list(pool_services(documents))
    assert services
    for service, pods in services:
        (endpoint,) = read_slice(slice_of(service, pods), RoleRules(), None)
        options = dict(word[2:].partition("=")[::2] for word in words_of(pods) if word.startswith("--"))
        assert endpoint.role == Role(options["role"])
        assert endpoint.url == f"http://10.1.2.3:{options['port']}"
        kind = kind_of(pods)
        has_bootstrap_server = kind == "prefill" or may_switch(pods)
        assert endpoint.bootstrap_port == (int(options["bootstrap-port"]) if has_bootstrap_server else None)
        assert pods.labels.get("llm-d.ai/role", "plain") == kind
        length = {Role.SHORT: "0-", Role.LONG: f"{int(options.get('laps-boundary-tokens', 0)) + 1}-"}
        assert pods.labels.get("llm-d.ai/context-length-range", "").startswith(length.get(endpoint.role, ""))


def pool_services(documents: list[Document]) -> Iterator[tuple[Document, Pods]]:
    for service in of_kind(documents, "Service"):
        for pods in pods_of(documents):
            if pods.component == "worker" and matches({"matchLabels": service["spec"]["selector"]}, pods.labels):
                yield service, pods


def slice_of(service: Document, pods: Pods) -> Document:
    """An EndpointSlice as the controller makes it of a Service and one ready pod."""
    return {
        "metadata": {"name": service["metadata"]["name"] + "-x1", "labels": service["metadata"]["labels"]},
        "addressType": "IPv4",
        "ports": [
            {"name": one["name"], "port": pods.ports[one["targetPort"]], "protocol": "TCP"}
            for one in service["spec"]["ports"]
        ],
        "endpoints": [{"addresses": ["10.1.2.3"], "conditions": {"ready": True}, "targetRef": {"uid": "u"}}],
    }
