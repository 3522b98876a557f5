"""The store against a model of it: whatever happens in between, every line has one result or is in the queue."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.batch.database import StoreError, StoreFullError
from sglang_ext.batch.lines import BatchLine
from sglang_ext.batch.store import BatchStore, LineResult


def line(number: int, *, tokens: int = 10, key: bytes = b"", body: bytes = b"{}") -> BatchLine:
    return BatchLine(f"id-{number}", "/generate", body, tokens, key, "in.jsonl", number + 1)


def fill(store: BatchStore, lines: list[BatchLine], name: str = "job") -> int:
    job = store.create_job(name, {})
    store.add_lines(job, lines)
    store.make_ready(job)
    return job


def result(identifier: int, *, is_ok: bool = True, body: bytes = b"{}") -> LineResult:
    return LineResult(identifier, is_ok, 200 if is_ok else 400, "r", None if is_ok else "no", body, 3, 2)


class StoreMachine(RuleBasedStateMachine):
    """Two jobs, leased from by length, finished in groups, reopened at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="store-")
        self.path = Path(self.folder.name) / "s"
        self.store = BatchStore.open(self.path)
        self.jobs: dict[int, int] = {}
        self.leased: dict[int, str] = {}
        self.done: dict[int, dict[str, bool]] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @precondition(lambda self: len(self.jobs) < 2)
    @rule(tokens=st.lists(st.integers(1, 100), max_size=12), keys=st.lists(st.binary(max_size=2), min_size=12))
    def add_job(self, tokens: list[int], keys: list[bytes]) -> None:
        lines = [line(at, tokens=count, key=keys[at]) for at, count in enumerate(tokens)]
        job = fill(self.store, lines, f"job {len(self.jobs)}")
        self.jobs[job] = len(lines)
        self.done[job] = {}

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 1), most=st.integers(1, 5), is_long=st.booleans())
    def lease(self, which: int, most: int, is_long: bool) -> None:
        job = list(self.jobs)[which % len(self.jobs)]
        leased = self.store.lease(job, most, min_tokens=50 if is_long else 0, below_tokens=None if is_long else 50)
        for one in leased:
            assert one.id not in self.leased
            assert one.line.custom_id not in self.done[job]
            assert (one.line.prompt_tokens >= 50) == is_long
            self.leased[one.id] = one.line.custom_id

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.leased)), unique=True, min_size=1))
        good = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
        self.store.finish([result(one, is_ok=ok) for one, ok in zip(chosen, good, strict=True)])
        for one, ok in zip(chosen, good, strict=True):
            self.done[one >> 40][self.leased.pop(one)] = ok

    @precondition(lambda self: any(self.done.values()))
    @rule()
    def finish_again(self) -> None:
        job = next(job for job, done in self.done.items() if done)
        first = next(self.store.results(job))
        before = self.store.job(job)
        with pytest.raises(StoreError, match="second result"):
            self.store.finish([result(first.id)])
        assert self.store.job(job) == before

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = BatchStore.open(self.path)
        self.leased.clear()

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 1))
    def requeue(self, which: int) -> None:
        job = list(self.jobs)[which % len(self.jobs)]
        self.store.release_leases(job)
        self.leased = {one: name for one, name in self.leased.items() if one >> 40 != job}
        failed = [name for name, ok in self.done[job].items() if not ok]
        assert self.store.requeue_failed(job) == len(failed)
        for name in failed:
            del self.done[job][name]

    @invariant()
    def nothing_lost_nothing_twice(self) -> None:
        for job, count in self.jobs.items():
            told = self.store.job(job)
            done = self.done[job]
            assert (told.lines, told.succeeded, told.failed) == (
                count,
                sum(done.values()),
                len(done) - sum(done.values()),
            )
            by_input = list(self.store.results(job))
            assert {one.custom_id: one.is_ok for one in by_input} == done
            assert len(by_input) == len(done)
            assert [one.id for one in by_input] == sorted(one.id for one in by_input)
            queued = self.store.database.rows("SELECT count(*) FROM queue WHERE job=?", job)[0][0]
            assert queued == count - len(done)


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStore = pytest.mark.slow(StoreMachine.TestCase)


def test_threads_never_lease_the_same_line(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store, ThreadPoolExecutor(8) as threads:
        job = fill(store, [line(number) for number in range(4000)])
        leases = threads.map(lambda _: store.lease(job, 2), range(2000))
        assert sorted(one.id for leased in leases for one in leased) == sorted({(job << 40) + n for n in range(4000)})


def test_lines_leave_by_key_then_by_input(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store:
        job = fill(store, [line(0, key=b"b"), line(1, key=b"a"), line(2, key=b"b"), line(3, key=b"")])
        leased = [one.line.custom_id for _ in range(3) for one in store.lease(job, 2)]
        assert leased == ["id-3", "id-1", "id-0", "id-2"]


def test_a_lease_is_bounded_in_bytes(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store:
        job = fill(store, [line(number, body=b"x" * 1000) for number in range(10)])
        assert len(store.lease(job, 10, max_bytes=2500)) == 3
        assert len(store.lease(job, 10)) == 7


def test_results_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store:
        job = fill(store, [line(number) for number in range(2000)])
        leased = store.lease(job, 2000)
        store.finish([result(one.id, is_ok=one.id % 3 != 0) for one in reversed(leased)])
        assert [one.custom_id for one in store.results(job)] == [f"id-{number}" for number in range(2000)]
        good, bad = list(store.results(job, ok=True)), list(store.results(job, ok=False))
        assert len(good) + len(bad) == 2000
        assert all(one.is_ok for one in good)
        assert not any(one.is_ok for one in bad)
        assert store.job(job).prompt_tokens == 6000


def test_duplicates_are_found_with_their_places(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store:
        job = store.create_job("job", {})
        store.add_lines(job, [line(0), line(1), line(0)._replace(number=9)])
        (found,) = store.duplicates(job, 5)
        assert found[:3] == ("id-0", "in.jsonl:1", "in.jsonl:9")
        with pytest.raises(ValueError, match=r"'id-0' is on in\.jsonl:1 and on in\.jsonl:9"):
            store.make_ready(job)
        other = fill(store, [line(0)], "other")  # another job may have the same ids
        assert store.job(other).is_ready


def test_a_line_that_is_not_in_the_queue_gets_no_result(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store:
        job = fill(store, [line(0)])
        known = store.lease(job, 1)[0].id
        with pytest.raises(StoreError, match="2 lines have results, 1 of them were in the queue"):
            store.finish([result(known), result(known + 5)])
        assert store.job(job).remaining == 1
        assert not list(store.results(job))


def test_a_deleted_job_leaves_the_others(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s") as store:
        first, second = fill(store, [line(0), line(1)], "a"), fill(store, [line(0)], "b")
        store.finish([result(store.lease(first, 1)[0].id)])
        store.delete_job(first)
        assert [job.id for job in store.jobs()] == [second]
        with pytest.raises(KeyError):
            store.job(first)
        assert len(store.lease(second, 5)) == 1
        assert store.create_job("a", {}) > second


@pytest.mark.slow
def test_one_process_owns_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with BatchStore.open(path):
        code = "import pathlib, sys, sglang_ext.batch.store as s; s.BatchStore.open(pathlib.Path(sys.argv[1]))"
        other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
        assert "in use by another process" in other.stderr
        with pytest.raises(StoreError, match="in use"):
            BatchStore.open(path)
    BatchStore.open(path).close()


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, and long enough to be read as one" * 20)
    with pytest.raises(StoreError, match="not a database"):
        BatchStore.open(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE t(x)")
    other.commit()
    other.close()
    with pytest.raises(StoreError, match="no store of batches"):
        BatchStore.open(tmp_path / "other")
    with pytest.raises(StoreError, match="File exists"):
        BatchStore.open(tmp_path / "text" / "below")


def test_a_full_store_keeps_what_it_has_and_goes_on_with_more_space(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with BatchStore.open(path, limit_bytes=400_000) as store:
        job = fill(store, [line(number) for number in range(100)])
        finished = 0
        leased = [one.id for one in store.lease(job, 100)]

        def finish_all() -> None:
            nonlocal finished
            for one in leased:
                store.finish([result(one, body=b"x" * 20_000)])
                finished += 1

        with pytest.raises(StoreFullError, match="full"):
            finish_all()
        assert 0 < finished < 100
        assert store.job(job).succeeded == finished
    with BatchStore.open(path) as store:
        left = store.lease(job, 100)
        assert len(left) == 100 - finished
        store.finish([result(one.id) for one in left])
        assert store.job(job).remaining == 0


def test_starting_over_needs_no_space(tmp_path: Path) -> None:
    with BatchStore.open(tmp_path / "s", limit_bytes=200_000) as store:
        job = store.create_job("job", {})
        with pytest.raises(StoreFullError):
            store.add_lines(job, [line(number, body=b"x" * 10_000) for number in range(100)])
        store.start_over()
        assert store.jobs() == []
        assert fill(store, [line(0)])
