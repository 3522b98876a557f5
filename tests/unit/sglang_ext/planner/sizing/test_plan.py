"""`sglang-ext plan`: a verdict for each prompt of each pool; an error is one line that names the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ext.cli import main
from sglang_ext.costs.engine_profile import FORMAT
from support.settings import sets

PREFILL = {"alpha_s": 2e-10, "token_s": 4e-5, "read_s": 0.0, "kappa_s": 0.01}

PROFILE = {
    "format": FORMAT,
    "version": 1,
    "model": "org/made-up",
    "prefill": PREFILL,
    "pipelines": [{"stages": 4, "prefill": {**PREFILL, "token_s": 1e-5, "alpha_s": 5e-11, "kappa_s": 0.0025}}],
    "provenance": {"model_shape": {"hidden_size": 2048, "num_hidden_layers": 24}},
}


def test_pools_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    pools = ["--pool", "long:8:65536,131072", "--pool", "short:2:200"]
    assert main(["plan", "--profile", "table1", *pools, "--chunk-ms", "250", "--json", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [one["better"] for one in found["long"]] == ["pipeline", "pipeline"]
    assert [one["better"] for one in found["short"]] == ["instances apart"]
    printed = capsys.readouterr().out
    assert "long, 131072 tokens: pipeline: the pipeline is filled and its hops pass in" in printed
    assert main(["plan", "--profile", "table1", *pools, "--chunk-ms", "2000"]) == 0
    assert "long, 131072 tokens: ring: " in capsys.readouterr().out


def test_what_was_measured_is_used_and_the_rest_reckoned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE), encoding="utf-8")
    pools = ["--pool", "long:4:100000", "--pool", "more:2:100000"]
    assert main(["plan", "--profile", str(path), *pools]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].endswith("links: pipeline of 2, ring of 2, ring of 4")

    def ring_s(*more: str) -> float:
        out = tmp_path / "plan.json"
        assert main(["plan", "--profile", str(path), *pools, *more, "--json", str(out)]) == 0
        return float(json.loads(out.read_text(encoding="utf-8"))["long"][0]["times"]["ring"]["prompt_s"])

    assert ring_s(*sets("links.ring_gb_per_s=0.1")) > 2 * ring_s()
    assert ring_s(*sets("links.ring_step_us=0"), *sets("links.layers=24")) == ring_s(*sets("links.ring_step_us=0"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "long:4"], "--pool 'long:4' is not NAME:N:TOKENS"),
        (["--pool", "long:1:100"], "--pool 'long:1:100' is not NAME:N:TOKENS with N of at least 2"),
        (["--pool", "long:4:x"], "--pool 'long:4:x' is not"),
        (["--pool", "long:4:100", "--chunk-ms", "0"], "--chunk-ms must be above 0, got 0"),
        (["--pool", "long:4:100", *sets("links.hop_ms=-1")], "links.hop_ms must be at least 0, got -1"),
        (["--pool", "long:3:100", *sets("links.ring_gb_per_s=0")], "links.ring_gb_per_s must be above 0, got 0"),
        (["--pool", "long:3:100", *sets("links.ring_step_us=-1")], "links.ring_step_us must be at least 0, got -1"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", "table1", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_profile_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", "none.json", "--pool", "long:4:100"]) == 2
    assert "error: --profile: none.json is neither table1" in capsys.readouterr().err
