"""`sglang-ext batch run --engine ray`: the same run on several machines, carried out by Ray Data.

    lines (Parquet, prepared by this process) → LineSender (an actor on each node) → write_parquet (OUTPUT/*.parquet)

The input is read, checked and held against a resumed run as `--engine local` does it, through the store
(OUTPUT.store). Its lines are then laid out in OUTPUT.lines, a row group for each of Ray's tasks, shared prefixes
adjacent. A sender is a `JobRunner` over a store of its own that it can lose: retries, caps, outages and scores are
those of the local engine. It never raises for a line; a line that fails for good is a row with `error`.

Ray Data's checkpoint (OUTPUT.checkpoint) makes a run resume: it lists the ids that a task is about to write, renames
the list when the task's file is complete, and at the next start removes files whose list was not renamed. So every
`custom_id` is in the output once, wherever driver, node or task was lost. That holds for files (what a lost task had
sent is sent again), needs one file system under all nodes, holds all ids in memory, and is alpha in Ray 2.60.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.batch.batch_run import INTERRUPTED, OK, SOME_FAILED, STORE_FULL, USAGE, BatchRun
from sglang_ext.batch.database import StoreError, StoreFullError
from sglang_ext.batch.endpoint import EndpointClient
from sglang_ext.batch.inputs import InputError
from sglang_ext.batch.lines import BatchLine, Mode
from sglang_ext.batch.object_storage import SCHEME, ObjectPath
from sglang_ext.batch.outputs import OutputError, OutputFormat, generate_table
from sglang_ext.batch.progress import counted
from sglang_ext.batch.runner import JobRunner, RunnerSettings, reply_body
from sglang_ext.batch.scores import pack_scores, score_schema, score_table
from sglang_ext.batch.sending_options import RunError, api_key
from sglang_ext.batch.store import BatchStore, StoredResult

# A row group is what one task sends and what becomes one file, so also what is sent again when a task is lost.
_GROUP_ROWS, _GROUP_BYTES = {Mode.GENERATE: 1024, Mode.SCORE: 128}, 16 << 20
_SENT_ROWS = {Mode.GENERATE: 256, Mode.SCORE: 32}  # at a time; Ray keeps four of these under way in a task
_GROUPS_PER_FILE = 64
_CALLS_PER_SENDER = 2  # the next task begins while the last lines of one are under way
# Ray's filter for what a checkpoint has takes a whole CPU; reading, sending and writing must fit with it on two.
_READ_CPUS = _WRITE_CPUS = 0.25
_SEND_CPUS = 0.1
_MIN_CPUS = 2
_LINE_COLUMNS = ("custom_id", "path", "body", "prompt_tokens", "sort_key", "file", "number", "prompt_len")


class _LineGroup(NamedTuple):
    """A row group of the prepared lines."""

    path: str
    number: int
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """The settings of a sender, on any node."""

    endpoint: str
    api_key: str | None
    mode: Mode
    runner: RunnerSettings


def run_on_ray(args: Namespace) -> int:
    """Run the batch and return the exit status, with the options and statuses of `--engine local`."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.data") is None:
        return _refuse("--engine ray needs Ray Data: pip install 'sglang-ext[ray]'")
    if isinstance(args.output, ObjectPath) or any(given.startswith(SCHEME) for given in args.input):
        return _refuse(f"{SCHEME} is not for --engine ray, whose nodes share a folder")
    try:
        run = BatchRun(args)
        _check_options(run)
        paths = _Paths(args.output)
        paths.check(run.store_path)
        asyncio.run(_check_key(run))
        with BatchStore.open(run.store_path) as store:
            job = run.prepare(store)
            _lay_out(store, job.id, run.options.mode, paths.lines)
            began_s = time.monotonic()
            _carry_out(run, paths)
            return _summarise(paths.output, job.lines, time.monotonic() - began_s)
    except (RunError, InputError, OutputError) as error:
        return _refuse(str(error))
    except StoreFullError as error:
        _refuse(f"{error}; make room, and the same command goes on")
        return STORE_FULL
    except StoreError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("sglang-ext batch run: stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED


def _refuse(reason: str) -> int:
    print(f"sglang-ext batch run: error: {reason}", file=sys.stderr)
    return USAGE


async def _check_key(run: BatchRun) -> None:
    async with run.client:
        await run.check_key()


def _check_options(run: BatchRun) -> None:
    """RunError for what Ray Data cannot do."""
    args = run.args
    if not run.output.is_folder or run.output.format is not OutputFormat.PARQUET:
        raise RunError(f"--output: {args.output}: with --engine ray it is a folder, of Parquet files")
    for option, given in (
        ("--retry-failed", args.retry_failed),
        ("--limit-requests-per-s", args.limit_requests_per_s is not None),
        ("--limit-tokens-per-s", args.limit_tokens_per_s is not None),
    ):
        if given:
            raise RunError(f"{option} is not for --engine ray")


class _Paths:
    """The paths of a run's files, next to the output."""

    def __init__(self, output: Path) -> None:
        self.output = output.absolute()
        self.lines = self.output.with_name(self.output.name + ".lines")
        self.checkpoint = self.output.with_name(self.output.name + ".checkpoint")

    def check(self, store: Path) -> None:
        """RunError where there is something of a run whose store is gone."""
        if store.exists():
            return
        for path in (self.lines, self.checkpoint):
            if path.exists():
                raise RunError(f"{path} is of a run whose store ({store}) is gone; remove it, and the output")
        if self.output.is_dir() and any(self.output.iterdir()):
            raise RunError(f"--output: {self.output} is not empty, and no run of this command began there")


# -- lines ------------------------------------------------------------------------------------------------------------


def _lay_out(store: BatchStore, job: int, mode: Mode, folder: Path) -> None:
    """Write the job's lines, in the order in which they leave, unless they are there; rewrite a partial folder."""
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    import pyarrow.parquet as pq

    writer: Any = None
    try:
        for index, group in enumerate(_groups(store, job, _GROUP_ROWS[mode])):
            if index % _GROUPS_PER_FILE == 0:
                if writer is not None:
                    writer.close()
                name = f"lines-{index // _GROUPS_PER_FILE:05d}.parquet"
                writer = pq.ParquetWriter(partial / name, _line_schema(), compression="zstd")
            writer.write_table(_line_table(group), row_group_size=len(group))
    except OSError as error:
        raise StoreFullError(f"{partial}: {error.strerror or error}") from None
    finally:
        if writer is not None:
            writer.close()
        store.release_leases(job)
    partial.rename(folder)


def _groups(store: BatchStore, job: int, max_rows: int) -> Iterator[list[BatchLine]]:
    while leased := store.lease(job, max_rows, max_bytes=_GROUP_BYTES):
        yield [leased_line.line for leased_line in leased]


def _line_schema() -> Any:
    import pyarrow as pa

    text, blob, number = pa.string(), pa.binary(), pa.int64()
    return pa.schema(list(zip(_LINE_COLUMNS, (text, text, blob, number, blob, text, number, number), strict=True)))


def _line_table(lines: Sequence[BatchLine]) -> Any:
    import pyarrow as pa

    return pa.Table.from_pylist([line._asdict() for line in lines], schema=_line_schema())


def _line_groups(folder: Path) -> list[_LineGroup]:
    import pyarrow.parquet as pq

    groups = []
    for path in sorted(folder.glob("lines-*.parquet")):
        metadata = pq.read_metadata(path)
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            groups.append(_LineGroup(str(path), index, group.num_rows, group.total_byte_size))
    return groups


def _read_group(group: _LineGroup) -> Iterator[Any]:
    """Read a row group, in one of Ray's tasks."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(group.path) as opened:
        yield opened.read_row_group(group.number)


# -- the pipeline -----------------------------------------------------------------------------------------------------


def _carry_out(run: BatchRun, paths: _Paths) -> None:
    """Read, send and write what the checkpoint has not, on the cluster of `RAY_ADDRESS` or on one of this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask, read_datasource
    from ray.data.block import BlockMetadata
    from ray.data.checkpoint import CheckpointConfig

    class PreparedLines(Datasource):  # type: ignore[misc]
        """The row groups, a task each."""

        def __init__(self, groups: list[_LineGroup]) -> None:
            super().__init__()
            self.groups = groups

        def get_name(self) -> str:
            return "Lines"

        def estimate_inmemory_data_size(self) -> int:
            return sum(group.size_bytes for group in self.groups)

        def get_read_tasks(
            self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
        ) -> list[Any]:
            return [
                ReadTask(
                    lambda group=group: _read_group(group),
                    BlockMetadata(
                        num_rows=group.rows, size_bytes=group.size_bytes, input_files=[group.path], exec_stats=None
                    ),
                )
                for group in self.groups
            ]

    groups = _line_groups(paths.lines)
    address = os.environ.get("RAY_ADDRESS")
    cpus = None if address else max(_MIN_CPUS, os.cpu_count() or 1)
    # What a sender says at its end is not for the operator; what ends a run is raised here.
    ray.init(
        address=address or "local", num_cpus=cpus, include_dashboard=None if address else False, log_to_driver=False
    )
    try:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if sum(node["Resources"]["CPU"] for node in nodes) < _MIN_CPUS:
            raise RunError(f"--engine ray needs a cluster with {_MIN_CPUS} CPUs at the least")
        senders = max(1, min(len(nodes), run.settings.cap.max_in_flight))
        checkpoint = CheckpointConfig("custom_id", str(paths.checkpoint), delete_checkpoint_on_success=False)
        checkpoint.checkpoint_actor_pool_max_size = 1  # a second one could take the CPU that the others need
        context = DataContext.get_current()
        context.checkpoint_config = checkpoint
        lines = read_datasource(PreparedLines(groups), override_num_blocks=len(groups), num_cpus=_READ_CPUS)
        results = lines.map_batches(
            LineSender,
            fn_constructor_args=(_sender_settings(run, senders),),
            batch_size=_SENT_ROWS[run.options.mode],
            batch_format="pyarrow",
            num_cpus=_SEND_CPUS,
            compute=ActorPoolStrategy(
                size=senders,
                max_concurrent_calls_per_actor=_CALLS_PER_SENDER,
                max_tasks_in_flight_per_actor=2 * _CALLS_PER_SENDER,
                enable_true_multi_threading=True,
            ),
        )
        results.write_parquet(str(paths.output), compression="zstd", ray_remote_args={"num_cpus": _WRITE_CPUS})
    finally:
        ray.shutdown()


def _sender_settings(run: BatchRun, senders: int) -> SenderSettings:
    """Return the settings of one of `senders` senders, which share what may be in flight."""
    from dataclasses import replace

    cap = replace(run.settings.cap, max_in_flight=max(1, run.settings.cap.max_in_flight // senders))
    return SenderSettings(
        run.args.endpoint,
        api_key(run.args),
        run.options.mode,
        replace(run.settings, cap=cap),
    )


class LineSender:
    """The actor: tables of lines in, tables of results out, a row for each line, failed or not."""

    def __init__(self, settings: SenderSettings) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-ext-sender-")
        self._store = BatchStore.open(Path(self._folder.name) / "lines")
        self._starting: asyncio.Future[JobRunner] | None = None
        self._running: asyncio.Task[bool] | None = None
        self._count = 0

    async def __call__(self, batch: Any) -> Any:
        """Send these lines; the table has the columns of the output."""
        runner = await self._runner()
        self._count += 1
        job = self._store.create_job(str(self._count), {})
        # Made of the first pass's lines, which are good, in an order that is good already.
        self._store.add_lines(job, [BatchLine(**{**row, "sort_key": b""}) for row in batch.to_pylist()])
        self._store.make_ready(job)
        ended = asyncio.Event()
        runner.add_job(
            job,
            pack_scores if self._settings.mode is Mode.SCORE else reply_body,
            on_end=lambda ended_job: ended.set(),
        )
        waiting = asyncio.ensure_future(ended.wait())
        assert self._running is not None
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.is_set():
            waiting.cancel()
            self._running.result()  # raises why
        results = list(self._store.results(job))
        self._store.delete_job(job)
        return result_table(results, self._settings.mode)

    async def _runner(self) -> JobRunner:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_future()
            settings = self._settings
            client = EndpointClient(settings.endpoint, api_key=settings.api_key)
            await client.__aenter__()
            runner = JobRunner(self._store, client, settings.runner)
            self._running = asyncio.create_task(runner.run(until_idle=False))
            self._starting.set_result(runner)
        return await self._starting


def result_table(results: Sequence[StoredResult], mode: Mode) -> Any:
    """Results as a pyarrow table in the order given: the columns of `--engine local`, and for scores `error`, too.

    A result that cannot be read is an error of its line.
    """
    import pyarrow as pa

    if mode is Mode.GENERATE:
        return generate_table(results)
    schema = score_schema().append(pa.field("error", pa.string()))
    good = score_table((result.custom_id, result.body) for result in results if result.is_ok)
    good = good.append_column(schema.field("error"), pa.nulls(len(good), pa.string()))
    bad = [{"custom_id": result.custom_id, "error": result.error} for result in results if not result.is_ok]
    return pa.concat_tables([good, pa.Table.from_pylist(bad, schema=schema)])


# -- the end ----------------------------------------------------------------------------------------------------------


def _summarise(output: Path, lines: int, wall_s: float) -> int:
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    written = ds.dataset(output, format="parquet")
    rows = written.count_rows()
    failed = written.count_rows(filter=pc.field("error").is_valid())
    print(f"{rows - failed} of {counted(lines, 'line')} done, {failed} failed; {wall_s:.1f} s; written: {output}")
    if rows != lines:
        problem = f"{output} has {counted(rows, 'row')} for {counted(lines, 'line')}"
        print(f"sglang-ext batch run: error: {problem}", file=sys.stderr)
        return SOME_FAILED
    if failed:
        print(f"{counted(failed, 'line')} failed: the rows whose `error` is not null")
    return SOME_FAILED if failed else OK
