"""What the Helm chart passes on to SGLang are arguments of SGLang."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

TEMPLATE = Path(__file__).resolve().parents[4] / "deploy/helm/sglang-ext/templates/_worker.tpl"


def passed_on() -> list[str]:
    """Options that stand behind `--` in the worker's template."""
    behind = TEMPLATE.read_text().partition("        - --\n")[2].partition("      env:")[0]
    return re.findall(r"^ +- (--[a-z-]+)=", behind, re.MULTILINE)


@pytest.mark.usefixtures("sglang_imported")
def test_they_are_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    options = passed_on()
    assert {"--tp-size", "--nnodes", "--node-rank", "--dist-init-addr"} <= set(options)
    assert set(options) - known == set()
