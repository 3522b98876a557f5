"""The manifests in deploy/batch: their command lines are the command's, their pods have the rights they need."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.batch import batch_run, run_command

FOLDER = Path(__file__).resolve().parents[2] / "deploy/batch"


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text()) if one]


def parse(command_line: list[str]) -> argparse.Namespace:
    assert command_line[:3] == ["sglang-ext", "batch", "run"]
    parser = argparse.ArgumentParser()
    run_command.add_arguments(parser)
    return parser.parse_args(command_line[3:])


def the(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in documents(name) if one["kind"] == kind]
    return found


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that has containers, at whatever depth."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for one in value.values():
            yield from pod_specs(one)
    elif isinstance(value, list):
        for one in value:
            yield from pod_specs(one)


ALL_PODS = [pod for name in ("job.yaml", "rayjob.yaml") for one in documents(name) for pod in pod_specs(one)]


def test_the_jobs_command_line_is_the_commands() -> None:
    (container,) = the("Job", "job.yaml")["spec"]["template"]["spec"]["containers"]
    options = parse(container["command"] + container["args"])
    assert options.engine == "local"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert all(Path(path).parts[1] == "data" for path in [*options.input, options.output])
    assert mounted == {"/data", "/tmp"}


def test_the_ray_jobs_command_line_is_the_commands() -> None:
    options = parse(shlex.split(the("RayJob", "rayjob.yaml")["spec"]["entrypoint"]))
    assert options.engine == "ray"


def test_a_command_line_that_is_not_the_commands_is_noticed() -> None:
    with pytest.raises(SystemExit):
        parse(["sglang-ext", "batch", "run", "--input=a", "--output=b", "--endpoint=c", "--maximum=3"])


def test_the_job_ends_where_another_pod_would_end_the_same_way() -> None:
    spec = the("Job", "job.yaml")["spec"]
    (rule,) = [one["onExitCodes"] for one in spec["podFailurePolicy"]["rules"] if one["action"] == "FailJob"]
    assert sorted(rule["values"]) == sorted([batch_run.USAGE, batch_run.SOME_FAILED, batch_run.STORE_FULL])
    # Kubernetes refuses exit code rules for pods that restart themselves, and two pods would share a store otherwise.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["podReplacementPolicy"] == "Failed"
    assert rule["containerName"] == spec["template"]["spec"]["containers"][0]["name"]


@pytest.mark.parametrize("pod", ALL_PODS, ids=[pod["containers"][0]["name"] for pod in ALL_PODS])
def test_a_pod_has_no_more_rights_than_it_needs(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        (key,) = [one for one in container["env"] if one["name"] == "SGLANG_EXT_API_KEY"]
        assert "secretKeyRef" in key["valueFrom"]


def test_claims_are_those_that_are_mounted() -> None:
    for name in ("job.yaml", "rayjob.yaml"):
        claimed = {one["metadata"]["name"] for one in documents(name) if one["kind"] == "PersistentVolumeClaim"}
        mounted = {
            volume["persistentVolumeClaim"]["claimName"]
            for one in documents(name)
            for pod in pod_specs(one)
            for volume in pod["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert claimed == mounted


def test_ray_is_the_version_that_is_locked() -> None:
    lock = (FOLDER.parents[1] / "requirements/ray.lock").read_text().splitlines()
    version = the("RayJob", "rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in lock
