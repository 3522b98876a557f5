"""Whatever the order of events, the table is what the slices say, and the changes lead to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.types import Role
from sglang_ext_router.decide.endpoint_slices import (
    ChangeKind,
    Endpoint,
    EndpointState,
    RoleRules,
    SliceError,
    SliceTable,
    one_of_each_pod,
    parse_selector,
    read_slice,
    reconcile,
)
from sglang_ext_router.instances.discovery import address_of
from support.scripted_kubernetes import endpoint, endpoint_slice

RULES = RoleRules()
PODS = st.builds(
    endpoint,
    st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
    ready=st.sampled_from([True, False, None]),
    terminating=st.booleans(),
    uid=st.sampled_from(["a", "b"]),
)
SLICES = st.builds(
    lambda name, role, pods: endpoint_slice(name, role, *pods),
    st.sampled_from(["s", "t", "u"]),
    st.sampled_from(["decode", "prefill-short"]),
    st.lists(PODS, max_size=3),
)


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), SLICES), max_size=12))
def test_events_lead_where_a_list_leads(events: list[tuple[bool, dict[str, Any]]]) -> None:
    table, slices = SliceTable(RULES), {}
    for is_deleted, item in events:
        name = item["metadata"]["name"]
        if is_deleted:
            table.delete(item)
            slices.pop(name, None)
        else:
            table.put(item)
            slices[name] = item
    listed = SliceTable(RULES)
    assert listed.replace(slices.values()) == []
    assert listed.endpoints.keys() == table.endpoints.keys()
    for url, one in table.endpoints.items():
        assert one.state is listed.endpoints[url].state
        copies = [other for item in slices.values() for other in read_slice(item, RULES, None) if other.url == url]
        assert one in copies
        assert (one.state is EndpointState.SERVING) == any(o.state is EndpointState.SERVING for o in copies)


ENDPOINTS = st.dictionaries(
    st.sampled_from(["http://a:1", "http://b:1", "http://c:1"]),
    st.tuples(
        st.sampled_from([Role.SHORT, Role.DECODE]),
        st.sampled_from([None, 8998]),
        st.sampled_from(["x", "y"]),
        st.sampled_from(EndpointState),
        st.sampled_from([None, "v2"]),
        st.sampled_from(["", "zone-a/n1"]),
    ),
).map(lambda found: {url: Endpoint(url, *parts) for url, parts in found.items()})


@pytest.mark.slow
@given(ENDPOINTS, ENDPOINTS)
def test_changes_lead_from_what_is_held_to_what_is_wanted(
    held: dict[str, Endpoint], wanted: dict[str, Endpoint]
) -> None:
    now = dict(held)
    for kind, one in reconcile(held, wanted):
        if kind is ChangeKind.REMOVE:
            del now[one.url]
        elif kind is ChangeKind.ADD:
            assert one.url not in now
            assert one.state is EndpointState.SERVING
            now[one.url] = one
        elif kind is ChangeKind.PLACE:
            assert now[one.url]._replace(state=one.state, topology=one.topology) == one, "the same instance"
            now[one.url] = one._replace(state=now[one.url].state)
        else:
            assert now[one.url]._replace(state=one.state) == one, "the same instance"
            assert (kind is ChangeKind.DRAIN) == (one.state is EndpointState.DRAINING)
            now[one.url] = one
    for url, one in wanted.items():
        known = held.get(url)
        is_same = known is not None and known._replace(state=one.state, topology=one.topology) == one
        if is_same or one.state is EndpointState.SERVING:
            assert now.pop(url) == one
    assert now == {}
    assert reconcile(wanted, wanted) == []


def read(**changes: Any) -> list[Endpoint]:
    item = endpoint_slice("d", "decode", endpoint("10.0.0.1"))
    return read_slice({**item, **changes}, RULES, None)


@pytest.mark.parametrize(
    ("ports", "url"),
    [
        ([{"name": "http", "port": 1}, {"name": "metrics", "port": 2}], "http://10.0.0.1:1"),
        ([{"name": "https", "port": 3}], "https://10.0.0.1:3"),
        ([{"name": "", "port": 4}], "http://10.0.0.1:4"),
        ([{"port": 5}, {"name": "bootstrap", "port": 6}], "http://10.0.0.1:5"),
    ],
)
def test_the_port_is_found(ports: list[dict[str, Any]], url: str) -> None:
    assert [one.url for one in read(ports=ports)] == [url]


@pytest.mark.parametrize(
    "changes",
    [
        {"ports": []},
        {"ports": None},
        {"ports": [{"name": "a", "port": 1}, {"name": "b", "port": 2}]},
        {"addressType": "FQDN"},
    ],
)
def test_a_slice_that_does_not_say_where_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SliceError, match="EndpointSlice d"):
        read(**changes)


def test_a_slice_that_became_unusable_counts_as_empty() -> None:
    table = SliceTable(RULES)
    item = endpoint_slice("d", "decode", endpoint("10.0.0.1"))
    table.put(item)
    with pytest.raises(SliceError):
        table.put({**item, "ports": []})
    assert table.endpoints == {}


@pytest.mark.parametrize("strange", [{"endpoints": ["10.0.0.1"]}, {"endpoints": 5}, {"ports": [8000]}])
def test_what_is_no_slice_is_refused(strange: dict[str, Any]) -> None:
    table = SliceTable(RULES)
    with pytest.raises(SliceError, match="EndpointSlice default/s cannot be read"):
        table.put({**endpoint_slice("s", "decode"), **strange})
    assert table.endpoints == {}


def test_null_lists_and_ipv6() -> None:
    item = endpoint_slice("d", "decode", endpoint("fd00::1"))
    assert [one.url for one in read_slice({**item, "addressType": "IPv6"}, RULES, None)] == ["http://[fd00::1]:30000"]
    assert read(endpoints=None) == []
    assert read(metadata={"name": "d", "labels": None}) == []


def test_roles() -> None:
    rules = RoleRules(((parse_selector("app=a, tier=b"), Role.LONG),))
    assert rules.role_of({"app": "a", "tier": "b", "sglang-ext.io/role": "decode"}) is Role.LONG
    assert rules.role_of({"app": "a", "sglang-ext.io/role": "decode"}) is Role.DECODE
    assert rules.role_of({"llm-d.ai/role": "prefill"}) is Role.BOTH
    assert rules.role_of({"sglang-ext.io/role": "plain"}) is Role.PLAIN
    assert rules.role_of({"sglang-ext.io/role": "something"}) is None
    for wrong in ("", "a", "a=", "=b", "a=b,"):
        with pytest.raises(ValueError, match="not of the form KEY=VALUE"):
            parse_selector(wrong)


def test_revision_and_place() -> None:
    pod = {**endpoint("10.0.0.1"), "zone": "zone-a", "nodeName": "n1"}
    (plain,) = read_slice(endpoint_slice("s", "decode", pod), RULES, None)
    assert (plain.revision, plain.topology) == (None, "zone-a/n1")
    labels = {"sglang-ext.io/revision": "v2", "sglang-ext.io/topology": "rack-7"}
    (labelled,) = read_slice(endpoint_slice("s", "decode", pod, labels=labels), RULES, None)
    assert (labelled.revision, labelled.topology) == ("v2", "rack-7/n1")
    item = endpoint_slice("s", "decode", endpoint("10.0.0.1"))
    item["metadata"]["annotations"] = {"sglang-ext.io/revision": "v3"}
    (annotated,) = read_slice(item, RULES, None)
    assert (annotated.revision, annotated.topology) == ("v3", "")


@pytest.mark.parametrize(("label", "token_range"), [("0-2048", (0, 2048)), ("many", None)])
def test_the_lengths_that_an_instance_is_for(label: str, token_range: tuple[int, int] | None) -> None:
    labels = {"llm-d.ai/context-length-range": label}
    (found,) = read_slice(endpoint_slice("s", "decode", endpoint("10.0.0.1"), labels=labels), RULES, None)
    assert found.token_range == token_range
    assert address_of(found).token_range == token_range


V4, V6 = "http://10.0.0.1:30000", "http://[fd00::1]:30000"


def known(*urls: str, uid: str = "pod") -> dict[str, Endpoint]:
    return {url: Endpoint(url, Role.DECODE, None, uid, EndpointState.SERVING) for url in urls}


@pytest.mark.parametrize(("prefers_ipv6", "url"), [(False, V4), (True, V6)])
@pytest.mark.parametrize("urls", [(V4, V6), (V6, V4)])
def test_a_pod_of_both_address_families_is_one_instance(prefers_ipv6: bool, url: str, urls: tuple[str, str]) -> None:
    assert one_of_each_pod(known(*urls), prefers_ipv6) == known(url)


@pytest.mark.parametrize("prefers_ipv6", [False, True])
@pytest.mark.parametrize(
    "endpoints",
    [
        known(V4),
        known(V6),
        known(V4, V6, uid=""),  # whose pods are not named
        {**known(V4, uid="a"), **known(V6, uid="b")},
        known(V4, "http://10.0.0.1:30001"),  # two instances in a pod
        known("http://10.0.0.1:30001", V6),
    ],
)
def test_what_is_not_the_same_instance_stays(endpoints: dict[str, Endpoint], prefers_ipv6: bool) -> None:
    assert one_of_each_pod(endpoints, prefers_ipv6) == endpoints
