"""The instances in Kubernetes' EndpointSlices: which are there, in which role, and which are terminating.

A slice lists endpoints of one Service. An endpoint may be in several slices at a time, and comes and goes with its pod:
not ready while the model is loaded, ready, `terminating` while it finishes what it has, gone. A pod that replaces
another may get its address; its `uid` differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from sglang_ext.types import Role
from sglang_ext_router.decide.length_classes import parse_token_range
from sglang_ext_router.decide.pairing import TOPOLOGY_SEPARATOR

LABEL_PREFIX = "sglang-ext.io/"
ROLE_LABEL = LABEL_PREFIX + "role"
REVISION_LABEL, TOPOLOGY_LABEL = LABEL_PREFIX + "revision", LABEL_PREFIX + "topology"
BOOTSTRAP_ANNOTATION = LABEL_PREFIX + "bootstrap-port"
TOKEN_RANGE_LABEL = "llm-d.ai/context-length-range"
LLM_D_ROLE_LABEL = "llm-d.ai/role"
HTTP_PORT, HTTPS_PORT, BOOTSTRAP_PORT = "http", "https", "bootstrap"  # names of a Service's ports
_ROLES = {
    "prefill-short": Role.SHORT,
    "prefill-long": Role.LONG,
    "prefill": Role.BOTH,
    "decode": Role.DECODE,
    "plain": Role.PLAIN,
}


class EndpointState(StrEnum):
    """The state that the cluster wants of an endpoint."""

    SERVING = "serving"
    DRAINING = "draining"  # nothing new: its pod ends, or says that it is not ready


class Endpoint(NamedTuple):
    """One instance as its slices describe it."""

    url: str
    role: Role
    bootstrap_port: int | None
    uid: str  # of its pod; empty if the slice does not name it
    state: EndpointState
    revision: str | None = None  # None: the instance says it, or has none
    topology: str = ""  # DOMAIN/NODE, the domain being its zone unless a label says another one
    token_range: tuple[int, int] | None = None  # of the requests that it is for


class SliceError(ValueError):
    """A slice that cannot be used; the message names it and says why."""


def parse_selector(text: str) -> dict[str, str]:
    """Labels of `KEY=VALUE[,KEY=VALUE...]`; ValueError otherwise."""
    labels = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not key or not equals or not value:
            raise ValueError(f"{text!r} is not of the form KEY=VALUE[,KEY=VALUE...]")
        labels[key] = value
    return labels


class RoleRules(NamedTuple):
    """Finds a slice's role: by the first selector that its labels match, otherwise by the label `ROLE_LABEL`."""

    selectors: Sequence[tuple[Mapping[str, str], Role]] = ()

    def role_of(self, labels: Mapping[str, str]) -> Role | None:
        """Return None where the slice does not belong to this cluster."""
        for selector, role in self.selectors:
            if all(labels.get(key) == value for key, value in selector.items()):
                return role
        named = labels.get(ROLE_LABEL) or labels.get(LLM_D_ROLE_LABEL)
        return None if named is None else _ROLES.get(named)


def read_slice(item: Mapping[str, Any], rules: RoleRules, default_port: int | None) -> list[Endpoint]:
    """The endpoints of a slice with which something can be done; SliceError where it is not what it should be.

    Its port is the one named `http` or `https`, else its only one, else `default_port`. The bootstrap port is the one
    named so, or an annotation; without either the instance is asked.
    """
    metadata = item.get("metadata") or {}
    name = metadata.get("name")
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    role = rules.role_of(labels)
    if role is None:
        return []
    if item.get("addressType") not in {"IPv4", "IPv6"}:
        raise SliceError(f"EndpointSlice {name}: addressType {item.get('addressType')!r} is not served")
    ports = {port.get("name") or "": port.get("port") for port in item.get("ports") or () if port.get("port")}
    scheme = "https" if HTTPS_PORT in ports and HTTP_PORT not in ports else "http"
    port = ports.get(scheme) or default_port
    if port is None:
        others = [number for named, number in ports.items() if named != BOOTSTRAP_PORT]
        if len(others) != 1:
            raise SliceError(f"EndpointSlice {name}: none of its ports is named http, and it has {len(others)}")
        port = others[0]
    bootstrap = ports.get(BOOTSTRAP_PORT) or annotations.get(BOOTSTRAP_ANNOTATION)
    try:
        bootstrap_port = None if bootstrap is None else int(bootstrap)
    except ValueError:
        raise SliceError(f"EndpointSlice {name}: {BOOTSTRAP_ANNOTATION} {bootstrap!r} is not a port") from None
    revision = labels.get(REVISION_LABEL) or annotations.get(REVISION_LABEL) or None
    domain = labels.get(TOPOLOGY_LABEL) or annotations.get(TOPOLOGY_LABEL)
    token_range = parse_token_range(labels.get(TOKEN_RANGE_LABEL) or annotations.get(TOKEN_RANGE_LABEL) or "")
    found = []
    for endpoint in item.get("endpoints") or ():
        conditions = endpoint.get("conditions") or {}
        # Absent means unknown, which is to be taken for ready.
        is_ready = conditions.get("ready") is not False and not conditions.get("terminating")
        domains = (domain or endpoint.get("zone"), endpoint.get("nodeName"))
        topology = TOPOLOGY_SEPARATOR.join(name for name in domains if name)
        uid = (endpoint.get("targetRef") or {}).get("uid") or ""
        for address in (endpoint.get("addresses") or ())[:1]:  # the others are the same pod
            host = f"[{address}]" if ":" in address else address
            state = EndpointState.SERVING if is_ready else EndpointState.DRAINING
            url = f"{scheme}://{host}:{port}"
            found.append(Endpoint(url, role, bootstrap_port, uid, state, revision, topology, token_range))
    return found


class SliceTable:
    """The slices of one watch; what they say together."""

    def __init__(self, rules: RoleRules, default_port: int | None = None) -> None:
        self._rules = rules
        self._default_port = default_port
        self._slices: dict[str, list[Endpoint]] = {}  # by name

    def put(self, item: Mapping[str, Any]) -> None:
        """A slice was added or changed. SliceError: it cannot be used, and counts as empty until it changes again."""
        name = _name_of(item)
        self._slices[name] = []
        try:
            self._slices[name] = read_slice(item, self._rules, self._default_port)
        except (LookupError, TypeError, AttributeError) as error:
            raise SliceError(f"EndpointSlice {name} cannot be read: {error!r}") from None

    def delete(self, item: Mapping[str, Any]) -> None:
        self._slices.pop(_name_of(item), None)

    def replace(self, items: Iterable[Mapping[str, Any]]) -> list[SliceError]:
        """Take all existing slices, and return the unusable ones."""
        self._slices = {}
        errors = []
        for item in items:
            try:
                self.put(item)
            except SliceError as error:
                errors.append(error)
        return errors

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Return the endpoints by URL.

        An endpoint in several slices serves if any of them says so, in the role of that one.
        """
        merged: dict[str, Endpoint] = {}
        for endpoints in self._slices.values():
            for endpoint in endpoints:
                known = merged.get(endpoint.url)
                if known is None or (known.state, endpoint.state) == (EndpointState.DRAINING, EndpointState.SERVING):
                    merged[endpoint.url] = endpoint
        return merged


def one_of_each_pod(endpoints: Mapping[str, Endpoint], prefers_ipv6: bool) -> dict[str, Endpoint]:
    """Leave out the other address of a pod: a Service of both families has a slice, and so an endpoint, for each.

    Instances of one pod differ by port. An endpoint whose pod is not named stands for itself.
    """
    preferred = {_pod_port(url, one) for url, one in endpoints.items() if one.uid and _is_ipv6(url) is prefers_ipv6}
    return {
        url: one
        for url, one in endpoints.items()
        if _is_ipv6(url) is prefers_ipv6 or not one.uid or _pod_port(url, one) not in preferred
    }


def _is_ipv6(url: str) -> bool:
    return "[" in url


def _pod_port(url: str, endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.uid, url.rpartition(":")[2]


class Change(NamedTuple):
    """One change of the registry; `endpoint` is the wanted one, or the last known one of an instance that goes."""

    kind: ChangeKind
    endpoint: Endpoint


class ChangeKind(StrEnum):
    """Kinds of changes, in the order in which they are carried out for one address."""

    REMOVE = "remove"
    ADD = "add"
    PLACE = "place"  # its topology is another one
    DRAIN = "drain"
    RESUME = "resume"


def reconcile(held: Mapping[str, Endpoint], wanted: Mapping[str, Endpoint]) -> list[Change]:
    """Return the changes from the endpoints that were taken over to the endpoints of the cluster.

    An endpoint that is not ready is added once it is. Another pod, role, bootstrap port or revision at the same address
    is another instance: what was there goes, and what is there now comes when it serves. A pod does not move, so
    another topology is only known better.
    """
    changes = [Change(ChangeKind.REMOVE, endpoint) for url, endpoint in held.items() if url not in wanted]
    for url, endpoint in wanted.items():
        known = held.get(url)
        if known is not None and known._replace(state=endpoint.state, topology=endpoint.topology) != endpoint:
            changes.append(Change(ChangeKind.REMOVE, known))
            known = None
        if known is None:
            if endpoint.state is EndpointState.SERVING:
                changes.append(Change(ChangeKind.ADD, endpoint))
            continue
        if known.topology != endpoint.topology:
            changes.append(Change(ChangeKind.PLACE, endpoint))
        if known.state is not endpoint.state:
            is_serving = endpoint.state is EndpointState.SERVING
            changes.append(Change(ChangeKind.RESUME if is_serving else ChangeKind.DRAIN, endpoint))
    return changes


def _name_of(item: Mapping[str, Any]) -> str:
    metadata = item.get("metadata") or {}
    return f"{metadata.get('namespace')}/{metadata.get('name')}"
