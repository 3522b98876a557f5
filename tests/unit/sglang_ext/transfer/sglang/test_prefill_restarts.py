"""What a decode instance knows of a prefill instance is dropped once another process answers at its address."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.transfer.sglang.prefill_restarts import drop_restarted

ADDRESS = "127.0.0.1:8998"


class Bootstrap:
    """The bootstrap server, as a session of `requests` sees it."""

    def __init__(self) -> None:
        self.answer: Any = {"rank_ip": "127.0.0.1", "rank_port": 1000}
        self.status = 200
        self.asked: list[dict[str, str]] = []

    def get(self, url: str, params: dict[str, str], timeout: float) -> Any:
        assert url == f"http://{ADDRESS}/route"
        assert timeout > 0
        self.asked.append(params)
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(status_code=self.status, json=lambda: self.answer)


class Manager:
    """The part of SGLang's manager that the hook uses."""

    def __init__(self, **pool: int) -> None:
        self.connection_lock = threading.Lock()
        self.session_pool_lock = threading.Lock()
        self.bootstrap = Bootstrap()
        self.session_pool: Any = defaultdict(lambda: self.bootstrap)
        self.connection_pool = {
            f"{ADDRESS}_{key}": [{"rank_ip": "127.0.0.1", "rank_port": port}] for key, port in pool.items()
        }
        self.lost: list[str] = []

    def _handle_node_failure(self, bootstrap_addr: str) -> None:
        self.lost.append(bootstrap_addr)
        self.connection_pool.clear()

    def check(self) -> list[str]:
        drop_restarted(None, self, ADDRESS)
        return self.lost


def test_one_that_stays_is_kept() -> None:
    manager = Manager(**{"0_0_0": 1000})
    for _ in range(3):
        assert manager.check() == []
    assert manager.bootstrap.asked[0] == {
        "prefill_dp_rank": "0",
        "prefill_cp_rank": "0",
        "target_tp_rank": "0",
        "target_pp_rank": "0",
    }


def test_another_process_at_the_address_is_noticed_once() -> None:
    manager = Manager(**{"0_0_0": 1000})
    assert manager.check() == []
    manager.bootstrap.answer = {"rank_ip": "127.0.0.1", "rank_port": 2000}
    assert manager.check() == [ADDRESS]
    manager.connection_pool[f"{ADDRESS}_0_0_0"] = [{"rank_ip": "127.0.0.1", "rank_port": 2000}]
    assert manager.check() == [ADDRESS]


def test_a_restart_before_the_first_check_is_noticed() -> None:
    manager = Manager(**{"0_0_0": 1000})
    manager.bootstrap.answer = {"rank_ip": "127.0.0.1", "rank_port": "2000"}
    assert manager.check() == [ADDRESS]


def test_ranks_that_are_not_the_one_asked_for_are_lost_at_most_once() -> None:
    manager = Manager(**{"0_0_None": 1001})
    for _ in range(3):
        manager.check()
        manager.connection_pool[f"{ADDRESS}_0_0_None"] = [{"rank_ip": "127.0.0.1", "rank_port": 1001}]
    assert manager.lost == [ADDRESS]


@pytest.mark.parametrize(
    ("status", "answer"), [(503, {}), (404, "no"), (200, []), (200, {"rank_ip": "a"}), (200, ConnectionError())]
)
def test_an_answer_that_tells_nothing_changes_nothing(status: int, answer: Any) -> None:
    manager = Manager(**{"0_0_0": 1000})
    manager.bootstrap.status, manager.bootstrap.answer = status, answer
    assert manager.check() == []


def test_nothing_is_asked_while_nothing_is_known() -> None:
    manager = Manager()
    assert manager.check() == []
    assert manager.bootstrap.asked == []


@pytest.mark.usefixtures("sglang_imported")
def test_sglang_calls_it_for_every_backend() -> None:
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    from sglang_ext.transfer.sglang.manager import HandshakeKVManager
    from sglang_ext.transfer.sglang.tcp_transfer import TcpKVManager

    for manager in (HandshakeKVManager, TcpKVManager, MooncakeKVManager, NixlKVManager):
        assert manager._on_heartbeat_success is CommonKVManager._on_heartbeat_success
        assert manager._handle_node_failure.__module__.startswith("sglang.")
