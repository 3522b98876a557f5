"""Shared by all tests."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest

import support.engines  # noqa: F401 - takes note of the environment before any test changes it
from sglang_ext_router.compiled import describe_compiled
from support.examples import QUICK_EXAMPLES
from support.module_groups import group_of

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=QUICK_EXAMPLES)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to test compiled modules that are older than their sources."""
    is_stale, message = describe_compiled()
    if is_stale:
        pytest.exit(message, returncode=2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Tests that `make test` does not run: `--full` for `make test-all`, `--kubernetes` for `make test-k8s`."""
    parser.addoption("--full", action="store_true", help="run tests that are marked full, too")
    parser.addoption("--kubernetes", action="store_true", help="run tests that are marked kubernetes, too")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that import SGLang as slow; without its option, leave a marker's tests out."""
    for item in items:
        if "sglang_imported" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    left_out = [marker for marker in ("full", "kubernetes") if not config.getoption(f"--{marker}")]
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if any(map(item.get_closest_marker, left_out)) else kept).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give modules that share engines, or SGLang's imports, to the same worker, which starts or makes these once."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples a property is tried with; name failures where the controller of workers prints dots."""
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "quick")
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(_FailuresAtOnce(config))


class _FailuresAtOnce:
    """Name each failure when it is known: a run that is cut off has named those before."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            crash = getattr(report.longrepr, "reprcrash", None)
            message = "" if crash is None else str(crash.message).split("\n", 1)[0][:300]
            terminal.write_line(f"\nFAILED in {report.when}: {report.nodeid} {message}")
