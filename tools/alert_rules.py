"""The alerts: when each fires, what it means, and what to do. `render_monitoring.py` writes them."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

import yaml

ROUTER = "sglang_ext_router_"
TRANSFER = "sglang_ext:transfer_"
LONG_POOL = "sglang_ext:cdsp_"
SGLANG = "sglang:"
HEADER = "# Written by tools/render_monitoring.py: change tools/alert_rules.py.\n"


class Alert(NamedTuple):
    """One alert. `critical`: requests fail or are late now. `warning`: it can wait for office hours."""

    name: str
    severity: str  # critical, warning
    expression: str
    lasts: str  # how long the condition holds before the alert fires
    summary: str  # one line; {{ $labels.x }} stands for a label
    runbook: str  # what to look at first, and what to do


def share_of(part: str, whole: str, by: str, window: str = "5m") -> str:
    """Of what one counter grows by, the share that another one does."""
    return f"sum by ({by}) (rate({part}[{window}])) / sum by ({by}) (rate({whole}[{window}]))"


ALERTS = (
    Alert(
        "SglangExtNoRouter",
        "critical",
        f"absent({ROUTER}build_info)",
        "3m",
        "Prometheus scrapes no router",
        "See whether router pods run (`kubectl get pods -l app.kubernetes.io/component=router`), then whether "
        "Prometheus lists them as targets: the PodMonitor's selector, and `networkPolicy.metricsFrom` of the chart.",
    ),
    Alert(
        "SglangExtRequestsFail",
        "critical",
        share_of(
            f'{ROUTER}requests_total{{outcome=~"error_.*", status=~"5.."}}', f"{ROUTER}requests_total", "namespace"
        )
        + " > 0.01",
        "5m",
        "{{ $value | humanizePercentage }} of the requests in {{ $labels.namespace }} fail",
        "Panel Outcomes has their status: 503 is no instance that takes the model (`GET /workers` says why), 502 a "
        "reply that was cut, 504 a time limit. The access log has the instances of each request.",
    ),
    Alert(
        "SglangExtDeadlinesMissed",
        "warning",
        share_of(f'{ROUTER}ttft_slo_total{{met="false"}}', f"{ROUTER}ttft_slo_total", "namespace, length_class", "10m")
        + " > 0.05",
        "10m",
        "{{ $value | humanizePercentage }} of the {{ $labels.length_class }} requests in {{ $labels.namespace }} miss "
        "their deadline",
        "Compare Backlog and Pressure: one pool pressed and the other not is the controller's to settle (`--controller "
        "on`), both pressed needs instances. Neither pressed: look at the phases, transfer first.",
    ),
    Alert(
        "SglangExtQueueRefuses",
        "critical",
        f'sum by (namespace, reason) (rate({ROUTER}refused_total{{reason=~"queue_full|queue_timeout"}}[5m])) > 0',
        "5m",
        "Routers in {{ $labels.namespace }} refuse requests ({{ $labels.reason }})",
        "More arrives than the instances take. Add instances to the pool with the largest Backlog; raise "
        "`--max-concurrent-requests` only where the instances' own queues are short.",
    ),
    Alert(
        "SglangExtRoleWithoutInstance",
        "critical",
        f"sum by (namespace, role) (max by (namespace, worker, role) ({ROUTER}worker_up)) == 0",
        "2m",
        "No {{ $labels.role }} instance in {{ $labels.namespace }} takes requests",
        "`GET /workers` of a router has the state of each and its last error; `kubectl logs` of the pods why they do "
        "not start. A model that loads is not ready for up to `startupSecs`.",
    ),
    Alert(
        "SglangExtInstanceDown",
        "warning",
        f"max by (namespace, worker, role) ({ROUTER}worker_up) == 0",
        "45m",
        "{{ $labels.worker }} ({{ $labels.role }}) takes no requests",
        "Longer than loading (30 min): look at the pod's events and log. A drained instance counts as well: resume it "
        "(`POST /workers/{name}/drain`) or remove it.",
    ),
    Alert(
        "SglangExtCircuitOpen",
        "warning",
        f"max by (namespace, worker, role) ({ROUTER}worker_circuit_open) == 1",
        "5m",
        "Requests to {{ $labels.worker }} ({{ $labels.role }}) keep failing",
        "Its log has the first failure. All instances of a role at once is rather the other half: prefill fails where "
        "decode cannot be reached, and the other way round.",
    ),
    Alert(
        "SglangExtPoolPressed",
        "warning",
        f"max by (namespace, model, pool) ({ROUTER}pool_pressure) > 1.5",
        "15m",
        "The {{ $labels.pool }} pool of {{ $labels.model }} does not keep up",
        "With `--controller advise` `GET /pools` shows which move would help. With `on` and no move: panel Decisions "
        "of the controller has the reason, mostly that the other pool has nothing to spare: add instances.",
    ),
    Alert(
        "SglangExtMovesFail",
        "warning",
        f'sum by (namespace, outcome) (increase({ROUTER}pool_moves_total{{outcome!="moved"}}[15m])) > 0',
        "0m",
        "A move between pools in {{ $labels.namespace }} ended as {{ $labels.outcome }}",
        "`GET /pools` has the move and its detail. not_undone: the instance does not confirm its mode; restart it.",
    ),
    Alert(
        "SglangExtNoLeader",
        "warning",
        f"sum by (namespace) ({ROUTER}controller_leader) == 0",
        "3m",
        "No router in {{ $labels.namespace }} moves instances",
        "A killed leader is followed within 17 s. Longer: the API server, or the Role lacks get, create and update on "
        "`leases` (`kubectl auth can-i update leases --as system:serviceaccount:NAMESPACE:ACCOUNT`).",
    ),
    Alert(
        "SglangExtTwoLeaders",
        "critical",
        f"sum by (namespace) ({ROUTER}controller_leader) > 1",
        "2m",
        "{{ $value }} routers in {{ $labels.namespace }} move instances",
        "Two releases in one namespace, or routers with different `--controller-lease`: set the controller of all but "
        "one to `off`. Two scrapes at different times may show it for a moment only.",
    ),
    Alert(
        "SglangExtPeersApart",
        "warning",
        f"{ROUTER}peers_connected < {ROUTER}peers_found",
        "5m",
        "{{ $labels.instance }} is not connected to all routers of its group",
        "Its log names the peer: another `--peer-key` (a Secret that was changed needs all routers restarted), or a "
        "NetworkPolicy that closes the peer port. Meanwhile conversations lose prefix hits; nothing fails.",
    ),
    Alert(
        "SglangExtDiscoveryStale",
        "warning",
        f"{ROUTER}discovery_sync_age_seconds > 600 or {ROUTER}discovery_connected == 0",
        "5m",
        "{{ $labels.instance }} does not learn of new or ended instances",
        "The last known ones go on serving. The router's log has the API server's answer: 403 is a missing Role "
        "(docs/how-to/kubernetes.md), a time-out the network to the API server.",
    ),
    Alert(
        "SglangExtTransfersFail",
        "critical",
        share_of(
            f'{TRANSFER}requests_total{{outcome=~"peer_lost|stalled|refused|write_failed"}}',
            f"{TRANSFER}requests_total",
            "namespace, side",
        )
        + " > 0.01",
        "5m",
        "{{ $value | humanizePercentage }} of the KV transfers in {{ $labels.namespace }} fail ({{ $labels.side }})",
        "By outcome: refused is two instances that do not fit (model, KV dtype, page size), peer_lost and stalled the "
        "network between prefill and decode or a NetworkPolicy, write_failed the transport; see the instances' logs.",
    ),
    Alert(
        "SglangExtDecodeFull",
        "warning",
        f'min by (namespace) ({SGLANG}token_usage{{engine_type="decode"}}) > 0.95',
        "10m",
        "Every decode instance in {{ $labels.namespace }} is full of KV",
        "New requests wait for slots (panel Decode: requests) and time to first token grows for all: add "
        "decode instances.",
    ),
    Alert(
        "SglangExtRetractions",
        "warning",
        f"sum by (namespace) (rate({SGLANG}num_retracted_requests_total[10m])) > 0.1",
        "10m",
        "Decode in {{ $labels.namespace }} takes back requests that it had started",
        "KV runs out while requests decode; their work is done again. Add decode instances, or lower "
        "`--max-running-requests` of SGLang.",
    ),
    Alert(
        "SglangExtLongPoolApart",
        "warning",
        f"max by (namespace) ({LONG_POOL}members_ready) < max by (namespace) ({LONG_POOL}members)",
        "5m",
        "Members of the long pool in {{ $labels.namespace }} hang, or others cannot reach them",
        "They get no chunks meanwhile. `GET /status` of the coordinator says which (`is_ready`), its log why; members "
        "reach each other on any port.",
    ),
    Alert(
        "SglangExtLongPoolMembersLost",
        "warning",
        f"sum by (namespace) (increase({LONG_POOL}members_lost_total[30m])) > 3",
        "0m",
        "The long pool in {{ $labels.namespace }} keeps losing members",
        "`former_members` of the coordinator's `GET /status` has the reason of each: a restart, or no reply in time "
        "(`cdsp.step_timeout_s`).",
    ),
    Alert(
        "SglangExtRouterOutOfCpu",
        "warning",
        "histogram_quantile(0.99, sum by (namespace, instance, le) "
        f"(rate({ROUTER}event_loop_lag_seconds_bucket[5m]))) > 0.25",
        "10m",
        "{{ $labels.instance }} serves its event loop late",
        "Every request waits this much longer. Add routers or raise their CPU request; a process uses one core.",
    ),
    Alert(
        "SglangExtRouterFilesRunOut",
        "warning",
        'process_open_fds{process!=""} / process_max_fds{process!=""} > 0.8',
        "5m",
        "{{ $labels.instance }} has {{ $value | humanizePercentage }} of its file descriptors open",
        "A connection is a descriptor. Lower `limits.max_connections`, raise the limit (`ulimit -n`), or add routers.",
    ),
    Alert(
        "SglangExtAccessLogLost",
        "warning",
        f'sum by (namespace, instance, result) (rate({ROUTER}access_log_lines_total{{result!="written"}}[5m])) > 0',
        "5m",
        "{{ $labels.instance }} loses lines of its access log ({{ $labels.result }})",
        "failed is a full disk or a closed pipe, overflow a disk that is too slow. Requests are not held up by it.",
    ),
)


def rules() -> list[dict[str, object]]:
    """As Prometheus and a PrometheusRule list them."""
    return [
        {
            "alert": one.name,
            "expr": one.expression,
            "for": one.lasts,
            "labels": {"severity": one.severity},
            "annotations": {"summary": one.summary, "runbook": one.runbook},
        }
        for one in ALERTS
    ]


def as_yaml() -> str:
    """A file of rules."""
    return HEADER + yaml.safe_dump({"groups": [{"name": "sglang-ext", "rules": rules()}]}, sort_keys=False, width=110)


def as_page() -> str:
    """The page for operators."""
    lines = [
        "# Alerts",
        "",
        "Written by `tools/render_monitoring.py` from `tools/alert_rules.py`; how they are installed is in",
        "[monitoring.md](monitoring.md). critical: requests fail or are late now. warning:",
        "it can wait for office hours.",
    ]
    for one in ALERTS:
        wait = "at once" if one.lasts == "0m" else f"after {one.lasts}"
        about = textwrap.wrap(f"{one.severity}, {wait}. {one.runbook}", 120, break_on_hyphens=False)
        lines += ["", f"## {one.name}", "", *about, "", "```", one.expression, "```"]
    return "\n".join(lines) + "\n"
