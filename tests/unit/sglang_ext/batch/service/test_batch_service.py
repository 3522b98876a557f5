"""Batches under every order of results, cancellations, ends of windows and restarts; requests end when told."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.batch.database import StoreError, StoreFullError
from sglang_ext.batch.decide.batch_lifecycle import BatchStatus, EventRefusedError
from sglang_ext.batch.service import batch_service
from sglang_ext.batch.service.api import build_app
from sglang_ext.batch.service.batch_service import MAX_RUNNING, BatchService, ServiceLimits
from sglang_ext.batch.service.batches import BatchEntry, BatchTable
from sglang_ext.batch.service.client_keys import ClientKeys
from sglang_ext.batch.service.dispatcher import Dispatcher
from sglang_ext.batch.service.file_bytes import FolderBytes
from sglang_ext.batch.service.files import FileStore, PlacedFile, StoredFile
from sglang_ext.batch.store import BatchStore, LineResult
from sglang_ext.types import DEFAULT_TENANT
from support.batch_service import chat_line, jsonl, parse_jsonl
from support.event_loops import guarded_runner, on_loop, within_limit
from support.examples import examples

REPLY = orjson.dumps({"choices": []})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_service, "POLL_S", 0.002)
    monkeypatch.setattr(batch_service, "FIRST_RETRY_S", 0.002)


class ObedientDispatcher(Dispatcher):
    """Gives a job's next request a result when it is told to, and never sends anything."""

    def __init__(self, store: BatchStore, *, is_eager: bool = False) -> None:
        self.store = store
        self.is_eager = is_eager
        self.allowed: dict[int, int] = {}
        self.running: set[int] = set()

    @property
    def in_flight(self) -> int:
        return len(self.running)

    @property
    def cap(self) -> int:
        return 1

    async def close(self) -> None:
        assert not self.running

    async def run_job(self, job: int, tenant: str = DEFAULT_TENANT) -> None:
        assert job not in self.running
        assert self.store.job(job).is_ready
        self.running.add(job)
        try:
            while self.store.job(job).remaining:
                await asyncio.sleep(0.001)
                if self.is_eager or self.allowed.get(job, 0):
                    self.allowed[job] = self.allowed.get(job, 0) - 1
                    for leased in self.store.lease(job, 1):
                        is_ok = not leased.line.custom_id.endswith("3")
                        self.store.finish([LineResult(leased.id, is_ok, 200 if is_ok else 400, "r", None, REPLY)])
        finally:
            self.running.remove(job)
            self.store.release_leases(job)


class Bench:
    """A service that is stopped and started again over one folder, and its clock."""

    def __init__(self, folder: Path, *, is_eager: bool = False) -> None:
        self.folder = folder
        self.is_eager = is_eager
        self.time_s = 1_000_000.0
        self.sent: dict[str, set[str]] = {}  # batch → its custom_ids
        self.accepted: list[str] = []
        self.open()

    def open(self) -> None:
        self.store = BatchStore.open(self.folder / "batches.sqlite")
        self.dispatcher = ObedientDispatcher(self.store, is_eager=self.is_eager)
        self.service = BatchService(
            self.store, self.dispatcher, FolderBytes(self.folder / "files"), ServiceLimits(), lambda: self.time_s
        )

    def upload(self, content: bytes) -> StoredFile:
        files = self.service.files
        with files.bytes.writing() as file:
            file.write(content)
            placed = files.place(file)
        return files.add(placed, "x.jsonl", "batch")

    def create(self, requests: int, window: str = "1h") -> str:
        ids = [f"r{i}" for i in range(requests)]
        source = self.upload(jsonl([chat_line(one, "x") for one in ids]))
        batch_id = self.service.create(source, "/v1/chat/completions", window).batch_id
        self.accepted.append(batch_id)
        self.sent[batch_id] = set(ids)
        return batch_id

    def entry(self, batch_id: str) -> BatchEntry:
        entry = self.service.find(batch_id)
        assert entry is not None
        return entry

    async def until(self, batch_id: str, *wanted: BatchStatus) -> BatchEntry:
        while (entry := self.entry(batch_id)).status not in wanted:
            assert not entry.status.is_terminal, entry
            await asyncio.sleep(0.001)
        return entry

    async def restart(self) -> None:
        await self.service.stop()
        self.store.close()
        self.open()
        await self.service.start()

    async def finish_all(self) -> None:
        self.dispatcher.is_eager = True
        while self.service.batches.open() or self.store.jobs():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.service.stop()
        self.store.close()

    def check(self, batch_id: str) -> BatchEntry:
        """What holds of a batch that is over; it is returned."""
        entry = self.entry(batch_id)
        assert entry.status.is_terminal
        output, errors = (
            [] if file_id is None else parse_jsonl((self.folder / "files" / file_id).read_bytes())
            for file_id in (entry.output_file_id, entry.error_file_id)
        )
        written = [line["custom_id"] for line in output + errors]
        assert len(written) == len(set(written))
        assert (entry.totals.completed, entry.totals.failed) == (len(output), len(errors))
        if written or entry.status is not BatchStatus.CANCELLED:  # else it was cancelled before it was validated
            assert set(written) == self.sent[batch_id]
            assert entry.totals.total == len(written)
        codes = {line["error"]["code"] for line in errors if line["response"] is None}
        assert codes <= {BatchStatus.EXPIRED: {"batch_expired"}, BatchStatus.CANCELLED: {"batch_cancelled"}}.get(
            entry.status, set()
        )
        assert (entry.status is BatchStatus.EXPIRED) <= bool(codes)
        for file_id in (entry.output_file_id, entry.error_file_id):
            assert file_id is None or self.service.files.find(file_id)
        return entry

    def check_disk(self) -> None:
        """Every file has a row, every row a file, and the store holds no request any more."""
        on_disk = {path.name for path in (self.folder / "files").iterdir()}
        known = {stored.file_id for stored in self.service.files.page(DEFAULT_TENANT, None, 10_000, None, False)}
        assert on_disk == known
        entries = self.service.batches.page(DEFAULT_TENANT, None, 1000)
        outputs = {
            stored.file_id for stored in self.service.files.page(DEFAULT_TENANT, None, 10_000, "batch_output", False)
        }
        assert outputs <= {one for entry in entries for one in (entry.output_file_id, entry.error_file_id)}
        with sqlite3.connect(self.store.database.name) as database:
            for table in ("jobs", "lines", "queue", "results"):
                assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        database.close()


@on_loop
async def test_one_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_eager=True)
    await bench.service.start()
    batch_id = bench.create(7)
    await bench.finish_all()
    entry = bench.check(batch_id)
    assert entry.status is BatchStatus.COMPLETED
    assert (entry.totals.completed, entry.totals.failed) == (6, 1)
    bench.check_disk()
    reading = bench.service.reading()
    assert reading.outcomes == {"succeeded": 6, "failed": 1}
    await bench.close()


@on_loop
async def test_lines_that_a_failed_runner_has_leased_are_sent_at_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    async def run_job(dispatcher: ObedientDispatcher, job: int, tenant: str = DEFAULT_TENANT) -> None:
        """Fails at first, with lines that it has leased; then it ends where nothing is left to lease."""
        leased = dispatcher.store.lease(job, 3 if not sent else 100)
        sent.append(len(leased))
        if len(sent) == 1:
            raise StoreError("lost")
        dispatcher.store.finish([LineResult(one.id, True, 200, "r", None, REPLY) for one in leased])
        dispatcher.store.release_leases(job)

    monkeypatch.setattr(ObedientDispatcher, "run_job", run_job)
    bench = Bench(tmp_path)
    await bench.service.start()
    batch_id = bench.create(7)
    await bench.finish_all()
    assert bench.check(batch_id).status is BatchStatus.COMPLETED
    assert sent == [3, 7]
    await bench.close()


@on_loop
async def test_output_files_are_deleted_when_their_time_is_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_eager=True)
    await bench.service.start()
    source = bench.upload(jsonl([chat_line("a", "x")]))
    batch_id = bench.service.create(source, "/v1/chat/completions", "1h", output_expires_after_s=3600).batch_id
    entry = await bench.until(batch_id, BatchStatus.COMPLETED)
    assert entry.output_file_id
    bench.time_s += 3599
    assert bench.service.files.find(entry.output_file_id)
    assert bench.service.files.delete_expired() == 0
    bench.time_s += 1
    assert bench.service.files.find(entry.output_file_id) is None  # at once, whenever it is swept
    assert bench.service.files.page(DEFAULT_TENANT, None, 10, "batch_output", False) == []
    assert bench.service.files.delete_expired() == 1
    assert bench.service.files.find(source.file_id)
    await bench.finish_all()
    bench.check_disk()
    await bench.close()


@pytest.mark.slow
@on_loop
async def test_a_cancellation_while_validating(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    batch_id = bench.create(20_000)
    while (job := bench.store.find_job(batch_id)) is None or not job.lines:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert bench.service.cancel(batch_id)
    await bench.until(batch_id, BatchStatus.CANCELLED)
    await bench.finish_all()
    entry = bench.check(batch_id)
    assert entry.totals.total == 0
    assert entry.output_file_id is entry.error_file_id is None
    bench.check_disk()
    await bench.close()


@on_loop
async def test_an_input_that_was_deleted_fails_the_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    source = bench.upload(b"{}")
    batch_id = bench.service.create(source, "/v1/chat/completions", "1h").batch_id
    bench.service.files.delete(source.file_id)
    await bench.service.start()
    entry = await bench.until(batch_id, BatchStatus.FAILED)
    assert [problem.code for problem in entry.problems] == ["file_not_found"]
    await bench.close()


@on_loop
async def test_a_disk_that_is_full_for_a_while_delays_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, is_eager=True)
    await bench.service.start()
    failures = iter(range(5))
    place = FileStore.place

    def full(self: FileStore, file: Any, *stopped: Any) -> PlacedFile:
        if file.tell() and bench.accepted and next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        return place(self, file, *stopped)

    batch_id = bench.create(4)
    monkeypatch.setattr(FileStore, "place", full)
    await bench.until(batch_id, BatchStatus.COMPLETED)
    assert next(failures, None) is None
    await bench.finish_all()
    bench.check(batch_id)
    bench.check_disk()
    await bench.close()


@on_loop
async def test_results_that_come_while_the_window_ends_complete_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job = ObedientDispatcher.run_job

    async def last_moment(self: ObedientDispatcher, job: int, tenant: str) -> None:
        try:
            await run_job(self, job, tenant)
        except asyncio.CancelledError:
            self.store.finish([LineResult(one.id, True, 200, "r", None, REPLY) for one in self.store.lease(job, 100)])
            raise

    monkeypatch.setattr(ObedientDispatcher, "run_job", last_moment)
    bench = Bench(tmp_path)
    await bench.service.start()
    batch_id = bench.create(3)
    await bench.until(batch_id, BatchStatus.IN_PROGRESS)
    await asyncio.sleep(0.01)
    bench.time_s += 3600
    entry = await bench.until(batch_id, BatchStatus.COMPLETED)
    assert entry.totals.completed == 3
    await bench.finish_all()
    await bench.close()


@pytest.mark.slow
@on_loop
async def test_a_full_disk_is_told_as_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    app = build_app(bench.service, ClientKeys(), 1000)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def locked(*args: Any) -> None:
        raise StoreFullError("database or disk is full")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        form: Any = {"files": {"file": ("x", b"{}")}, "data": {"purpose": "batch"}}
        source = (await client.post("/v1/files", **form)).json()["id"]
        before = os.listdir(tmp_path / "files")
        monkeypatch.setattr(FileStore, "place", full)
        reply = await client.post("/v1/files", **form)
        assert (reply.status_code, reply.json()["error"]["type"]) == (507, "server_error")
        assert "No space left" in reply.json()["error"]["message"]
        assert os.listdir(tmp_path / "files") == before
        monkeypatch.setattr(BatchTable, "put", locked)
        new = {"input_file_id": source, "endpoint": "/generate", "completion_window": "1h"}
        reply = await client.post("/v1/batches", json=new)
        assert reply.status_code == 507
        assert bench.service.batches.page(DEFAULT_TENANT, None, 10) == []
    await bench.close()


@pytest.mark.full
@on_loop
async def test_a_file_that_is_being_read_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path, is_eager=True)
    await bench.service.start()
    app = build_app(bench.service, ClientKeys(), 1000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        batch_id = bench.create(20_000)
        source = bench.entry(batch_id).input_file_id
        reply = await client.delete(f"/v1/files/{source}")
        assert reply.status_code == 409
        assert bench.service.files.find(source)
        await bench.until(batch_id, BatchStatus.IN_PROGRESS)
        assert (await client.delete(f"/v1/files/{source}")).json()["deleted"]
        bench.service.cancel(batch_id)
        await bench.finish_all()
    assert bench.check(batch_id).totals.total == 20_000
    bench.check_disk()
    await bench.close()


@pytest.mark.slow
@on_loop
async def test_batches_beyond_those_that_run_wait_and_can_expire(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.service.start()
    running = [bench.create(2) for _ in range(MAX_RUNNING)]
    for batch_id in running:
        await bench.until(batch_id, BatchStatus.IN_PROGRESS)
    late, waiting = bench.create(2, "10s"), bench.create(2)
    for batch_id in (late, waiting):
        await bench.until(batch_id, BatchStatus.IN_PROGRESS)
    await asyncio.sleep(0.02)
    assert len(bench.dispatcher.running) == len(running)
    bench.time_s += 10
    await bench.until(late, BatchStatus.EXPIRED)
    bench.service.cancel(running[0])
    await bench.finish_all()
    for batch_id in bench.accepted:
        bench.check(batch_id)
    assert bench.entry(waiting).status is BatchStatus.COMPLETED
    await bench.close()


ACTIONS = st.one_of(
    st.tuples(st.just("create"), st.integers(1, 4), st.sampled_from(["10s", "1h"])),
    st.tuples(st.just("cancel"), st.integers(0, 4)),
    st.tuples(st.just("allow"), st.integers(0, 4), st.integers(1, 3)),
    st.tuples(st.just("clock"), st.integers(1, 8)),
    st.tuples(st.just("turn"), st.integers(1, 6)),
    st.just(("restart",)),
)


@pytest.mark.full
@given(actions=st.lists(ACTIONS, max_size=16))
@settings(max_examples=examples(60), deadline=None)
def test_any_order_of_what_can_happen(actions: list[tuple[Any, ...]], tmp_path_factory: pytest.TempPathFactory) -> None:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    cancelled: set[str] = set()

    async def act(name: str, *values: Any) -> None:
        chosen = bench.accepted[values[0]] if name in {"cancel", "allow"} and values[0] < len(bench.accepted) else None
        if name == "create":
            bench.create(*values)
        elif name == "clock":
            bench.time_s += values[0]
        elif name == "turn":
            await asyncio.sleep(0.002 * values[0])
        elif name == "restart":
            await bench.restart()
        elif name == "allow" and chosen and (job := bench.store.find_job(chosen)):
            bench.dispatcher.allowed[job.id] = bench.dispatcher.allowed.get(job.id, 0) + values[1]
        elif name == "cancel" and chosen:
            try:
                entry = bench.service.cancel(chosen)
            except EventRefusedError:
                assert bench.entry(chosen).status not in {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS}
            else:
                assert entry
                assert entry.status is BatchStatus.CANCELLING
                cancelled.add(chosen)

    async def play() -> None:
        await bench.service.start()
        for action in actions:
            await act(*action)
        await bench.finish_all()
        for batch_id in bench.accepted:
            entry = bench.check(batch_id)
            assert (entry.status is BatchStatus.CANCELLED) == (batch_id in cancelled)
        bench.check_disk()
        await bench.close()

    with guarded_runner("asyncio") as runner:
        runner.run(within_limit(play()))


class KilledError(BaseException):
    """Stands for SIGKILL: from here on nothing is written."""


class Killer:
    """Lets the first `step` calls that change the disk through, and none after them."""

    def __init__(self, step: int) -> None:
        self.left = step
        self.has_killed = False

    def guarded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self.left:
                self.has_killed = True
                raise KilledError
            self.left -= 1
            return real(*args, **options)

        return call

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, names in (
                (BatchStore, ("create_job", "add_lines", "make_ready", "finish", "delete_job")),
                (FileStore, ("place", "add", "delete")),
                (BatchTable, ("put",)),
            ):
                for name in names:
                    patch.setattr(owner, name, self.guarded(getattr(owner, name)))
            yield


def die_at(step: int, ending: str, folder: Path) -> bool:
    """A service dies at a write, and another one finishes the batch; False if the first came through."""
    bench = Bench(folder, is_eager=ending == "completed")
    killer = Killer(step)
    is_cancelled = False

    async def story() -> None:
        nonlocal is_cancelled
        await bench.service.start()
        batch_id = bench.create(4)
        await bench.until(batch_id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED)
        if ending == "cancelled":
            bench.service.cancel(batch_id)
            is_cancelled = True
        if ending == "expired":
            bench.time_s += 3600
        await bench.finish_all()

    async def first() -> None:
        task = asyncio.create_task(story())
        while not task.done() and not killer.has_killed:  # noqa: ASYNC110 - set in a thread
            await asyncio.sleep(0.001)
        if not killer.has_killed:
            task.result()

    async def second() -> None:
        bench.store.close()
        bench.open()
        bench.time_s += 3600 if ending == "expired" else 0
        await bench.service.start()
        await bench.finish_all()
        entries = bench.service.batches.page(DEFAULT_TENANT, None, 10)
        assert {entry.batch_id for entry in entries} >= set(bench.accepted)
        for entry in entries:
            bench.sent.setdefault(entry.batch_id, {f"r{i}" for i in range(4)})  # killed before it was acknowledged
            bench.check(entry.batch_id)
            is_other = ending == "cancelled" and not is_cancelled
            assert entry.status.value == ("completed" if is_other else ending)
        bench.check_disk()
        await bench.close()

    with killer.at_work():
        asyncio.run(first())
    asyncio.run(within_limit(second()))
    return killer.has_killed


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["completed", "expired", "cancelled"])
def test_a_service_that_dies_at_any_write_goes_on(ending: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    step = 0
    while die_at(step, ending, tmp_path_factory.mktemp("bench")):
        step += 1
    assert step > 8
