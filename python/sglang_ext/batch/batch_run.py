"""One run of `sglang-ext batch run`: check options and input, prepare the job, send its lines, export the results."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import orjson
import uvloop

from sglang_ext.batch.endpoint import EndpointClient
from sglang_ext.batch.inputs import FileIdentity, Findings, add_input, find_inputs, identify
from sglang_ext.batch.lines import LineOptions, Mode
from sglang_ext.batch.object_storage import SCHEME, ObjectPath
from sglang_ext.batch.outputs import OutputFormat, OutputOptions, choose_output, export
from sglang_ext.batch.progress import ProgressReport, counted
from sglang_ext.batch.runner import JobRunner, reply_body
from sglang_ext.batch.scores import distillkit_config, pack_scores
from sglang_ext.batch.sending_options import RunError, api_key, rate_limit, runner_settings
from sglang_ext.batch.store import BatchStore, Job

OK, USAGE, SOME_FAILED, STORE_FULL, INTERRUPTED = 0, 2, 3, 4, 130  # exit statuses
JOB_NAME = "run"  # a store of this command holds one job


def line_options(args: argparse.Namespace) -> LineOptions:
    """Return what is added to every line. Raises RunError, which names a bad option."""
    defaults: object = {}
    if args.defaults:
        try:
            defaults = orjson.loads(args.defaults)
        except orjson.JSONDecodeError as error:
            raise RunError(f"--defaults: is not valid JSON: {error}") from None
    if not isinstance(defaults, dict):
        raise RunError("--defaults: must be a JSON object")
    try:
        return LineOptions(Mode(args.mode), args.model, args.top_logprobs, defaults)
    except ValueError as error:
        raise RunError(str(error)) from None


class BatchRun:
    """One run of the command. The constructor checks the options and touches nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.options = line_options(args)
        self.settings = runner_settings(args)
        self.requests_limit = rate_limit("--limit-requests-per-s", args.limit_requests_per_s)
        self.tokens_limit = rate_limit("--limit-tokens-per-s", args.limit_tokens_per_s)
        try:
            self.client = EndpointClient(args.endpoint, api_key=api_key(args))
        except ValueError as error:
            raise RunError(f"--endpoint: {error}") from None
        self.output: OutputOptions = choose_output(
            args.output,
            self.options.mode,
            None if args.format is None else OutputFormat(args.format),
            vocabulary=args.vocabulary,
        )
        self.files = find_inputs(args.input)
        self.store_path: Path = args.store or self._default_store()
        self._check_output()

    def _default_store(self) -> Path:
        path = self.output.path
        if isinstance(path, ObjectPath):
            raise RunError(f"--store: is needed with --output on {SCHEME}: a local file for lines and results")
        return path.with_name(path.name + ".store")

    def _check_output(self) -> None:
        path = self.output.path
        if isinstance(path, ObjectPath):
            if path in {file.path for file in self.files}:
                raise RunError(f"--output: {path} is an input, too")
            for folder in (given for given in self.args.input if given.startswith(SCHEME) and given.endswith("/")):
                if str(path).startswith(folder):
                    raise RunError(f"--output: {path} is in the input folder {folder}; it would become an input")
            (path / "check" if self.output.is_folder else path).check_writable()
            return
        for given in (Path(name) for name in self.args.input):
            if given.is_dir() and path.resolve().is_relative_to(given.resolve()):
                raise RunError(f"--output: {path} is in the input folder {given}; it would become an input")
        if any(isinstance(file.path, Path) and file.path.resolve() == path.resolve() for file in self.files):
            raise RunError(f"--output: {path} is an input, too")

    def run(self) -> int:
        if not self.store_path.exists() and _has_results(self.output):
            raise RunError(
                f"--output: {self.args.output} is there already, without the store that it came from"
                f" ({self.store_path}); remove it or choose another name"
            )
        limit_mib = self.args.store_limit_mib
        began_s = time.monotonic()
        # SQLite sorts on disk; a run's temporary files go where its store is.
        os.environ.setdefault("SQLITE_TMPDIR", str(self.store_path.absolute().parent))
        with BatchStore.open(self.store_path, None if limit_mib is None else int(limit_mib * (1 << 20))) as store:
            job = self.prepare(store)
            if done := job.succeeded + job.failed:
                print(f"going on: {done} of {counted(job.lines, 'line')} done ({job.failed} failed)", file=sys.stderr)
            if self.args.retry_failed:
                print(f"{counted(store.requeue_failed(job.id), 'failed line')} to send again", file=sys.stderr)
                job = store.job(job.id)
            is_finished = True
            if job.remaining:
                is_finished = uvloop.run(self._send(store, job))
            if not is_finished:
                self._summarise(store.job(job.id), time.monotonic() - began_s)
                raise KeyboardInterrupt
            exported = export(store, job.id, self.output)
            job = store.job(job.id)
        self._summarise(job, time.monotonic() - began_s)
        for path in exported.files:
            print(f"written: {path}")
        if self.output.format is OutputFormat.DISTILLKIT:
            section = distillkit_config(self.args.vocabulary, self.args.top_logprobs)
            print(f"logprob_compressor: {orjson.dumps(section).decode()}")
        if job.failed:
            failed = counted(job.failed, "line")
            print(f"{failed} failed, see {self.output.error_path}; --retry-failed sends them again")
        return SOME_FAILED if job.failed else OK

    # -- the job ------------------------------------------------------------------------------------------------------

    def prepare(self, store: BatchStore) -> Job:
        """The store's job, made of the input where there is none; refused where input or options have changed."""
        job = store.find_job(JOB_NAME)
        if job is None and store.jobs():
            raise RunError(f"--store: {self.store_path} is of something else")
        if job is not None and job.is_ready:
            self._check_unchanged(store, job)
            return job
        store.start_over()
        identities = [identify(file) for file in self.files]
        number = store.create_job(JOB_NAME, self._description(identities))
        findings = Findings()
        with ProgressReport.of_reading(lambda: store.job(number).lines):
            add_input(store, number, self.files, self.options, findings)
        changed = [
            file for file, identity in zip(self.files, identities, strict=True) if identify(file, identity) != identity
        ]
        if findings.count or changed:
            store.start_over()
            if changed:
                raise RunError(f"--input: {changed[0].path} changed while it was read")
            raise RunError(f"--input: {counted(findings.count, 'line')} cannot be sent; nothing was\n{findings.text}")
        return store.job(number)

    def _description(self, identities: list[FileIdentity]) -> dict[str, object]:
        return {
            "inputs": [identity._asdict() for identity in identities],
            "options": {
                "--mode": self.options.mode.value,
                "--model": self.options.model,
                "--top-logprobs": self.options.top_logprobs,
                "--defaults": dict(self.options.defaults),
                "--engine": self.args.engine,  # Ray keeps its results itself
            },
        }

    def _check_unchanged(self, store: BatchStore, job: Job) -> None:
        known = {described["name"]: FileIdentity(**described) for described in job.description["inputs"]}  # type: ignore[attr-defined]
        identities = [identify(file, known.get(file.name)) for file in self.files]
        described = self._description(identities)
        files = f"{self.store_path} and {self.args.output}"
        hint = f"this run began otherwise; put it back, or remove {files} to begin again"
        options = job.description["options"]
        assert isinstance(options, dict)
        assert isinstance(described["options"], dict)
        for name, value in described["options"].items():
            if options.get(name) != value:
                raise RunError(f"{name}: was {_shown(options.get(name))}, is {_shown(value)}; {hint}")
        for identity in identities:
            before = known.pop(identity.name, None)
            if before is None:
                raise RunError(f"--input: {identity.name} is new; {hint}")
            if (before.size_bytes, before.sha256) != (identity.size_bytes, identity.sha256):
                raise RunError(f"--input: {identity.name} has changed; {hint}")
        for name in known:
            raise RunError(f"--input: {name} is missing; {hint}")
        store.describe_job(job.id, described)

    async def check_key(self) -> None:
        """RunError when the endpoint refuses the API key, or the lack of one. The client must be open."""
        if not await self.client.is_key_accepted():
            raise RunError("--api-key: the endpoint refuses it" if api_key(self.args) else "--api-key: needed")

    async def _send(self, store: BatchStore, job: Job) -> bool:
        """Send what has no result; False when a signal stopped it."""
        async with self.client:
            await self.check_key()
            runner: JobRunner | None = None  # made inside, as it reports what happens
            with ProgressReport.of_sending(job, lambda: None if runner is None else runner.progress) as report:
                runner = JobRunner(
                    store,
                    self.client,
                    self.settings,
                    requests_limit=self.requests_limit,
                    tokens_limit=self.tokens_limit,
                    on_note=report.note,
                )
                runner.add_job(job.id, pack_scores if self.options.mode is Mode.SCORE else reply_body)
                loop = asyncio.get_running_loop()

                def stop() -> None:
                    report.note("stopping: waiting a moment for what is in flight; Ctrl-C once more drops it")
                    assert runner is not None
                    runner.stop()

                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, stop)
                try:
                    return await runner.run()
                finally:
                    for number in (signal.SIGINT, signal.SIGTERM):
                        loop.remove_signal_handler(number)

    def _summarise(self, job: Job, wall_s: float) -> None:
        tokens = job.prompt_tokens + job.completion_tokens
        print(
            f"{job.succeeded} of {counted(job.lines, 'line')} done, {job.failed} failed, {job.remaining} left; "
            f"{tokens} tokens ({job.prompt_tokens} of prompts); {wall_s:.1f} s; store: {self.store_path}"
        )


def _has_results(output: OutputOptions) -> bool:
    if output.is_folder:
        return output.path.is_dir() and any(output.path.glob("part-*.*"))
    return output.path.exists()


def _shown(value: object) -> str:
    return "not given" if value in (None, {}) else orjson.dumps(value).decode()
