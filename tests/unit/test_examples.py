"""The examples of clients compile, explain themselves, and use options that the clients have, where those are there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_ext.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("distill_*.py"))
TRL = ROOT / ".venv/judges/trl"


def keywords(example: Path, called: str) -> set[str]:
    """Names of the arguments that an example passes to what is called so."""
    calls = [node for node in ast.walk(ast.parse(example.read_text())) if isinstance(node, ast.Call)]
    found = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == called]
    assert found, f"{example.name} does not call {called}"
    return {keyword.arg for call in found for keyword in call.keywords if keyword.arg}


def class_fields(*sources: Path) -> set[str]:
    """Names that the classes in these files annotate, and arguments of their constructors."""
    names = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        names.add(item.target.id)
                    elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                        names |= {one.arg for one in item.args.args + item.args.kwonlyargs}
    return names


def test_there_is_one_for_each_client() -> None:
    assert [path.stem for path in EXAMPLES] == ["distill_datatrove", "distill_distilabel", "distill_trl"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_explains_itself_without_its_client(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--endpoint" in done.stdout
    assert "What was run" in done.stdout


def test_the_trl_example_uses_options_that_trl_has() -> None:
    if not TRL.is_dir():
        pytest.skip("TRL is not installed: `make judges-env`")
    import transformers.training_args

    options = class_fields(
        TRL / "experimental/server_distillation/server_distillation_config.py",
        TRL / "trainer/distillation_config.py",
        TRL / "trainer/base_config.py",
        Path(transformers.training_args.__file__),
    )
    example = ROOT / "examples/distill_trl.py"
    assert keywords(example, "ServerDistillationConfig") <= options
    trainer = class_fields(TRL / "experimental/server_distillation/server_distillation_trainer.py")
    assert keywords(example, "ServerDistillationTrainer") <= trainer


def test_options_that_are_not_there_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("class C:\n    a: int = 0\n    def __init__(self, b=1): ...\n")
    (tmp_path / "example.py").write_text("C(a=1, c=2)\n")
    assert keywords(tmp_path / "example.py", "C") - class_fields(tmp_path / "config.py") == {"c"}


SMALL_EXAMPLES = {
    "route_request": "chosen: instance 1",
    "write_policy": "MostCached: instance 1\nPredictedWait: instance 0",
    "replay_trace": "0.3 s: 12000 tokens, instance 1, TTFT 1.20 s",
    "decide_batch": "(mixed)",
}


@pytest.mark.parametrize("name", SMALL_EXAMPLES)
def test_a_small_example_runs_and_stays_small(name: str) -> None:
    example = ROOT / "examples" / f"{name}.py"
    assert len(example.read_text().splitlines()) <= 40
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert SMALL_EXAMPLES[name] in done.stdout


def test_the_scenario_of_a_simulation_is_one_that_the_command_takes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 400 * number, "input_length": 300 + 40 * number, "output_length": 2} for number in range(40))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "figures.json"
    command = ["simulate", str(ROOT / "examples/simulate.yaml"), "--set", f"workload.file={trace}", "--json", str(out)]
    assert main(command) == 0
    assert len(json.loads(out.read_text(encoding="utf-8"))["runs"]) == 3


def test_the_scenario_of_a_search_is_one_that_the_command_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", str(ROOT / "examples/size.yaml"), "--set", f"workload.file={tmp_path / 'none'}"]) == 2
    assert "search.profiles: h200.json is neither" in capsys.readouterr().err
