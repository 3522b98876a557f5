"""`promtool` over the alert rules: the syntax, and of each alert series that let it fire and series that do not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from support.monitoring_files import ALERTS, alert_rules, expressions
from support.prometheus_server import binary

pytestmark = pytest.mark.kubernetes

ROUTER = 'namespace="a", instance="r1"'
MINUTES = 90  # after which an alert is looked at; the longest waits 45


class Case(NamedTuple):
    """Series in promtool's notation (`start+step x count`, one value a minute), and who it is about."""

    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str]


def steady(value: float) -> str:
    return f"{value}x{MINUTES}"


def grows(per_minute: float) -> str:
    return f"0+{per_minute}x{MINUTES}"


NAMESPACE = {"namespace": "a"}
REQUESTS = "sglang_ext_router_requests_total"
OK = f'{REQUESTS}{{{ROUTER}, outcome="ok", status="200"}}'
BROKEN = f'{REQUESTS}{{{ROUTER}, outcome="error_after", status="502"}}'
MISTAKES = f'{REQUESTS}{{{ROUTER}, outcome="error_before", status="400"}}'
MET = f'sglang_ext_router_ttft_slo_total{{{ROUTER}, length_class="short", met="true"}}'
MISSED = f'sglang_ext_router_ttft_slo_total{{{ROUTER}, length_class="short", met="false"}}'
UP = f'sglang_ext_router_worker_up{{{ROUTER}, worker="w", role="decode"}}'
UP_FOR_ANOTHER = 'sglang_ext_router_worker_up{namespace="a", instance="r2", worker="w", role="decode"}'
UP_BESIDE = f'sglang_ext_router_worker_up{{{ROUTER}, worker="v", role="decode"}}'
CIRCUIT = f'sglang_ext_router_worker_circuit_open{{{ROUTER}, worker="w", role="decode"}}'
PRESSURE = f'sglang_ext_router_pool_pressure{{{ROUTER}, model="m", pool="long"}}'
MOVED = f'sglang_ext_router_pool_moves_total{{{ROUTER}, source="short", target="long", outcome="moved"}}'
NOT_MOVED = f'sglang_ext_router_pool_moves_total{{{ROUTER}, source="short", target="long", outcome="failed"}}'
LEADS = f"sglang_ext_router_controller_leader{{{ROUTER}}}"
ANOTHER_LEADS = 'sglang_ext_router_controller_leader{namespace="a", instance="r2"}'
FOUND, CONNECTED = (f"sglang_ext_router_peers_{state}{{{ROUTER}}}" for state in ("found", "connected"))
SYNC_AGE = f"sglang_ext_router_discovery_sync_age_seconds{{{ROUTER}}}"
REACHED = f"sglang_ext_router_discovery_connected{{{ROUTER}}}"
DONE = 'sglang_ext:transfer_requests_total{namespace="a", side="send", outcome="complete"}'
LOST = 'sglang_ext:transfer_requests_total{namespace="a", side="send", outcome="peer_lost"}'
CANCELLED = 'sglang_ext:transfer_requests_total{namespace="a", side="send", outcome="aborted"}'
USAGE = 'sglang:token_usage{namespace="a", instance="d1", engine_type="decode"}'
USAGE_BESIDE = 'sglang:token_usage{namespace="a", instance="d2", engine_type="decode"}'
RETRACTED = 'sglang:num_retracted_requests_total{namespace="a", instance="d1"}'
MEMBERS, READY, MEMBERS_LOST = (
    f'sglang_ext:cdsp_{name}{{namespace="a"}}' for name in ("members", "connected", "members_lost_total")
)
LAG = f"sglang_ext_router_event_loop_lag_seconds_bucket{{{ROUTER}"
OPEN, LIMIT = (f'process_{name}_fds{{{ROUTER}, process="0"}}' for name in ("open", "max"))
WRITTEN, OVERFLOW = (
    f'sglang_ext_router_access_log_lines_total{{{ROUTER}, result="{result}"}}' for result in ("written", "overflow")
)
REFUSED = f"sglang_ext_router_refused_total{{{ROUTER}"

CASES = {
    "SglangExtNoRouter": Case({}, {f"sglang_ext_router_build_info{{{ROUTER}}}": steady(1)}, {}),
    "SglangExtRequestsFail": Case(
        {OK: grows(900), BROKEN: grows(20)},
        {OK: grows(900), BROKEN: grows(5), MISTAKES: grows(300)},
        NAMESPACE,
    ),
    "SglangExtDeadlinesMissed": Case(
        {MET: grows(90), MISSED: grows(10)},
        {MET: grows(98), MISSED: grows(2)},
        {**NAMESPACE, "length_class": "short"},
    ),
    "SglangExtQueueRefuses": Case(
        {f'{REFUSED}, reason="queue_full"}}': grows(3)},
        {f'{REFUSED}, reason="queue_full"}}': steady(7), f'{REFUSED}, reason="bad_request"}}': grows(9)},
        {**NAMESPACE, "reason": "queue_full"},
    ),
    "SglangExtRoleWithoutInstance": Case(
        {UP: steady(0), UP_BESIDE: steady(0)},
        {UP: steady(0), UP_BESIDE: steady(1)},
        {**NAMESPACE, "role": "decode"},
    ),
    "SglangExtInstanceDown": Case(
        {UP: steady(0), UP_FOR_ANOTHER: steady(0)},
        {UP: steady(0), UP_FOR_ANOTHER: steady(1)},
        {**NAMESPACE, "role": "decode", "worker": "w"},
    ),
    "SglangExtCircuitOpen": Case(
        {CIRCUIT: steady(1)}, {CIRCUIT: "0 1 1 0 0 1 1 0 " * 11}, {**NAMESPACE, "role": "decode", "worker": "w"}
    ),
    "SglangExtPoolPressed": Case(
        {PRESSURE: steady(2)}, {PRESSURE: steady(1.2)}, {**NAMESPACE, "model": "m", "pool": "long"}
    ),
    "SglangExtMovesFail": Case(
        {NOT_MOVED: f"0x80 1x{MINUTES}", MOVED: grows(1)},
        {NOT_MOVED: f"0x20 1x{MINUTES}", MOVED: grows(1)},
        {**NAMESPACE, "outcome": "failed"},
    ),
    "SglangExtNoLeader": Case(
        {LEADS: steady(0), ANOTHER_LEADS: steady(0)}, {LEADS: steady(0), ANOTHER_LEADS: steady(1)}, NAMESPACE
    ),
    "SglangExtTwoLeaders": Case(
        {LEADS: steady(1), ANOTHER_LEADS: steady(1)}, {LEADS: steady(1), ANOTHER_LEADS: steady(0)}, NAMESPACE
    ),
    "SglangExtPeersApart": Case(
        {FOUND: steady(2), CONNECTED: steady(1)},
        {FOUND: steady(2), CONNECTED: "2 1 2 2 " * 25},
        {**NAMESPACE, "instance": "r1"},
    ),
    "SglangExtDiscoveryStale": Case(
        {REACHED: steady(0)},
        {REACHED: steady(1), SYNC_AGE: steady(280)},
        {**NAMESPACE, "instance": "r1"},
    ),
    "SglangExtTransfersFail": Case(
        {DONE: grows(90), LOST: grows(3)},
        {DONE: grows(900), LOST: grows(3), CANCELLED: grows(99)},
        {**NAMESPACE, "side": "send"},
    ),
    "SglangExtDecodeFull": Case(
        {USAGE: steady(0.97), USAGE_BESIDE: steady(0.99)}, {USAGE: steady(0.97), USAGE_BESIDE: steady(0.5)}, NAMESPACE
    ),
    "SglangExtRetractions": Case({RETRACTED: grows(12)}, {RETRACTED: grows(3)}, NAMESPACE),
    "SglangExtLongPoolApart": Case(
        {MEMBERS: steady(4), READY: steady(3)}, {MEMBERS: steady(4), READY: steady(4)}, NAMESPACE
    ),
    "SglangExtLongPoolMembersLost": Case({MEMBERS_LOST: grows(0.5)}, {MEMBERS_LOST: grows(0.05)}, NAMESPACE),
    "SglangExtRouterOutOfCpu": Case(
        {f'{LAG}, le="0.25"}}': grows(200), f'{LAG}, le="0.5"}}': grows(240), f'{LAG}, le="+Inf"}}': grows(240)},
        {f'{LAG}, le="0.25"}}': grows(239), f'{LAG}, le="0.5"}}': grows(240), f'{LAG}, le="+Inf"}}': grows(240)},
        {**NAMESPACE, "instance": "r1"},
    ),
    "SglangExtRouterFilesRunOut": Case(
        {OPEN: steady(900), LIMIT: steady(1000)},
        {OPEN: steady(700), LIMIT: steady(1000)},
        {**NAMESPACE, "instance": "r1", "process": "0"},
    ),
    "SglangExtAccessLogLost": Case(
        {WRITTEN: grows(9), OVERFLOW: grows(1)},
        {WRITTEN: grows(9), OVERFLOW: steady(4)},
        {**NAMESPACE, "instance": "r1", "result": "overflow"},
    ),
}


def promtool(*arguments: str) -> None:
    done = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def verdicts(folder: Path, rules: Path) -> subprocess.CompletedProcess[str]:
    """What `promtool test rules` makes of all cases."""
    known = {rule["alert"]: rule for rule in alert_rules()}
    tests = []
    for name, case in CASES.items():
        for is_firing, series in ((True, case.fires), (False, case.quiet)):
            expected = [{"exp_labels": {**case.labels, **known[name]["labels"]}}] if is_firing else []
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": one, "values": values} for one, values in series.items()],
                    "alert_rule_test": [{"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": expected}],
                }
            )
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": tests}))
    command = [binary("promtool"), "test", "rules", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def without_annotations(folder: Path) -> Path:
    """promtool compares texts as well; they are looked at by `test_texts_have_their_values`."""
    groups = yaml.safe_load(ALERTS.read_text())
    for rule in groups["groups"][0]["rules"]:
        del rule["annotations"]
    file = folder / "alerts.yaml"
    file.write_text(yaml.safe_dump(groups))
    return file


def test_the_rules_are_well_formed() -> None:
    promtool("check", "rules", str(ALERTS))


def test_every_panel_is_well_formed(tmp_path: Path) -> None:
    """As recording rules, which promtool parses."""
    rules = [
        {"record": f"panel_{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression) in enumerate(expressions())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_each_alert_fires_and_does_not(tmp_path: Path) -> None:
    assert CASES.keys() == {rule["alert"] for rule in alert_rules()}
    done = verdicts(tmp_path, without_annotations(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("broken", ["vector(1) < 0", "({}) or sum (vector(1))"], ids=["never", "always"])
def test_an_alert_that_never_fires_or_always_does_is_noticed(tmp_path: Path, broken: str) -> None:
    """The cases themselves."""
    groups = yaml.safe_load(without_annotations(tmp_path).read_text())
    for rule in groups["groups"][0]["rules"]:
        rule["expr"] = broken.format(rule["expr"])
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump(groups))
    found = verdicts(tmp_path, file).stderr
    assert [name for name in CASES if f"alertname: {name}," not in found] == [], found


def test_texts_have_their_values(tmp_path: Path) -> None:
    (rule,) = [one for one in alert_rules() if one["alert"] == "SglangExtRequestsFail"]
    case = CASES["SglangExtRequestsFail"]
    summary = "2.174% of the requests in a fail"
    expected = {
        "exp_labels": {**case.labels, "severity": "critical"},
        "exp_annotations": {"summary": summary, "runbook": rule["annotations"]["runbook"]},
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in case.fires.items()],
        "alert_rule_test": [{"eval_time": "30m", "alertname": rule["alert"], "exp_alerts": [expected]}],
    }
    file = tmp_path / "texts.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [test]}))
    promtool("test", "rules", str(file))
