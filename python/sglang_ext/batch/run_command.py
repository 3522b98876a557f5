"""`sglang-ext batch run`: a file of requests through an endpoint, nothing lost, nothing written twice."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType

import orjson
import uvloop

from sglang_ext.batch.decide.in_flight_cap import CapSettings
from sglang_ext.batch.decide.rate_limit import RateLimit
from sglang_ext.batch.endpoint import REQUEST_TIMEOUT_S, EndpointClient
from sglang_ext.batch.inputs import FileIdentity, Findings, InputError, add_input, find_inputs, identify
from sglang_ext.batch.lines import MAX_TOP_LOGPROBS, LineOptions, Mode
from sglang_ext.batch.outputs import OutputError, OutputFormat, OutputOptions, choose_output, export
from sglang_ext.batch.progress import ProgressReport
from sglang_ext.batch.runner import JobRunner, RunnerSettings, reply_body
from sglang_ext.batch.scores import distillkit_config, pack_scores
from sglang_ext.batch.store import BatchStore, Job, StoreError, StoreFullError

API_KEY_VARIABLE = "SGLANG_EXT_API_KEY"
OK, USAGE, SOME_FAILED, STORE_FULL, INTERRUPTED = 0, 2, 3, 4, 130
SCORE_REPLY_BYTES = 24  # of a reply, for every log-probability
JOB_NAME = "run"  # a store of this command holds one job


class RunError(ValueError):
    """A run that cannot be made as asked; the text names the option or the file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-ext batch run` to `parser`."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE|GLOB|DIR",
        help="JSONL (.gz, .zst) or Parquet: OpenAI batch lines, plain prompts or messages, or sequences to score",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE|DIR", help=".jsonl (.gz, .zst), .parquet, or a folder"
    )
    parser.add_argument("--endpoint", required=True, metavar="URL", help="the router, or any OpenAI-compatible server")
    parser.add_argument("--api-key", metavar="KEY", help=f"of the endpoint (or from {API_KEY_VARIABLE})")
    parser.add_argument("--mode", choices=[one.value for one in Mode], default=Mode.GENERATE.value, help="what to ask")
    parser.add_argument("--top-logprobs", type=int, default=0, metavar="K", help=f"score: 0 to {MAX_TOP_LOGPROBS}")
    parser.add_argument("--model", metavar="NAME", help="for lines that name none")
    parser.add_argument("--defaults", metavar="JSON", help='fields for lines that lack them, as {"max_tokens": 64}')
    parser.add_argument("--format", choices=[one.value for one in OutputFormat], help="of the output (by its name)")
    parser.add_argument("--vocabulary", type=int, default=0, metavar="N", help="tokens of the model, for distillkit")
    parser.add_argument("--order", choices=["input", "done"], default="input", help="of the lines in the output")
    parser.add_argument("--engine", choices=["local", "ray"], default="local", help="this process, or Ray Data")
    parser.add_argument("--retry-failed", action="store_true", help="send lines again that have failed before")
    add_sending_arguments(parser)
    parser.add_argument("--store", type=Path, metavar="FILE", help="what the run knows (OUTPUT.store)")


def add_sending_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how lines are sent, which `sglang-ext batch serve` has, too."""
    parser.add_argument("--max-retries", type=int, default=5, metavar="N", help="of a line, after its first try")
    parser.add_argument("--max-in-flight", type=int, default=256, metavar="N", help="requests at a time, at most")
    parser.add_argument(
        "--online-wait-target-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="yield when online requests wait longer",
    )
    parser.add_argument("--limit-requests-per-s", type=float, metavar="N", help="requests sent per second, at most")
    parser.add_argument("--limit-tokens-per-s", type=float, metavar="N", help="prompt and new tokens, at most")
    parser.add_argument(
        "--request-timeout-s", type=float, default=REQUEST_TIMEOUT_S, metavar="S", help="of one request"
    )
    parser.add_argument("--store-limit-mib", type=float, metavar="N", help="what the store may take on the disk")


def run(args: argparse.Namespace) -> int:
    """Run the batch and return the exit status: 0 all done, 2 usage, 3 some lines failed, 4 store full, 130 stopped."""
    if args.engine == "ray":
        return int(import_module("sglang_ext.batch.ray_engine").run_on_ray(args))
    with _stopped_by_signals():
        try:
            return BatchRun(args).run()
        except (RunError, InputError, OutputError) as error:
            _complain(f"error: {error}")
            return USAGE
        except StoreFullError as error:
            _complain(f"error: {error}; make room, and the same command goes on")
            return STORE_FULL
        except StoreError as error:
            _complain(f"error: {error}")
            return USAGE
        except OSError as error:
            _complain(f"error: {error.filename or '--output'}: {error.strerror}; the same command goes on from here")
            return STORE_FULL
        except KeyboardInterrupt:
            _complain("stopped; the same command goes on from here")
            return INTERRUPTED


def api_key(args: argparse.Namespace) -> str | None:
    """The key given, or that of the environment."""
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or None


def line_options(args: argparse.Namespace) -> LineOptions:
    """What is added to every line. RunError names the option that cannot be."""
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


def runner_settings(args: argparse.Namespace) -> RunnerSettings:
    """How lines are sent. RunError names the option that cannot be."""
    for name, least in (("max_retries", 0), ("max_in_flight", 1)):
        if getattr(args, name) < least:
            raise RunError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    for name in ("online_wait_target_ms", "request_timeout_s", "store_limit_mib"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise RunError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    cap = CapSettings(most=args.max_in_flight, online_wait_target_s=args.online_wait_target_ms / 1000)
    is_scoring = getattr(args, "mode", None) == Mode.SCORE.value
    return RunnerSettings(cap, args.max_retries, SCORE_REPLY_BYTES * (1 + args.top_logprobs) if is_scoring else 0)


class BatchRun:
    """One run of the command. The constructor checks the options and touches nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.options = line_options(args)
        self.settings = runner_settings(args)
        self.requests_limit = rate_limit("--limit-requests-per-s", args.limit_requests_per_s)
        self.tokens_limit = rate_limit("--limit-tokens-per-s", args.limit_tokens_per_s)
        try:
            self.client = EndpointClient(args.endpoint, api_key=api_key(args), request_timeout_s=args.request_timeout_s)
        except ValueError as error:
            raise RunError(f"--endpoint: {error}") from None
        self.output: OutputOptions = choose_output(
            args.output,
            self.options.mode,
            None if args.format is None else OutputFormat(args.format),
            by_completion=args.order == "done",
            vocabulary=args.vocabulary,
        )
        self.files = find_inputs(args.input)
        self.store_path: Path = args.store or args.output.with_name(args.output.name + ".store")
        for given in (Path(one) for one in args.input):
            if given.is_dir() and args.output.resolve().is_relative_to(given.resolve()):
                raise RunError(f"--output: {args.output} is in the input folder {given}; it would become an input")
        if any(file.path.resolve() == args.output.resolve() for file in self.files):
            raise RunError(f"--output: {args.output} is an input, too")

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
                print(f"going on: {done} of {job.lines} lines are done ({job.failed} failed)", file=sys.stderr)
            if self.args.retry_failed:
                print(f"{store.requeue_failed(job.id)} failed lines are sent again", file=sys.stderr)
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
            print(f"{job.failed} lines failed, see {self.output.error_path}; --retry-failed sends them again")
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
        changed = [file for file, one in zip(self.files, identities, strict=True) if identify(file, one) != one]
        if findings.count or changed:
            store.start_over()
            if changed:
                raise RunError(f"--input: {changed[0].path} changed while it was read")
            raise RunError(f"--input: {findings.count} lines cannot be sent; nothing was\n{findings.text}")
        return store.job(number)

    def _description(self, identities: list[FileIdentity]) -> dict[str, object]:
        return {
            "inputs": [one._asdict() for one in identities],
            "options": {
                "--mode": self.options.mode.value,
                "--model": self.options.model,
                "--top-logprobs": self.options.top_logprobs,
                "--defaults": dict(self.options.defaults),
                "--engine": self.args.engine,  # Ray keeps its results itself
            },
        }

    def _check_unchanged(self, store: BatchStore, job: Job) -> None:
        known = {one["name"]: FileIdentity(**one) for one in job.description["inputs"]}  # type: ignore[attr-defined]
        identities = [identify(file, known.get(file.name)) for file in self.files]
        described = self._description(identities)
        hint = f"this run began otherwise; put it back, or start a new run with another --store than {self.store_path}"
        options = job.description["options"]
        assert isinstance(options, dict)
        assert isinstance(described["options"], dict)
        for name, value in described["options"].items():
            if options.get(name) != value:
                raise RunError(f"{name}: was {_shown(options.get(name))}, is {_shown(value)}; {hint}")
        for one in identities:
            before = known.pop(one.name, None)
            if before is None:
                raise RunError(f"--input: {one.name} is new; {hint}")
            if (before.size_bytes, before.sha256) != (one.size_bytes, one.sha256):
                raise RunError(f"--input: {one.name} has changed; {hint}")
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
            runner: JobRunner | None = None  # made inside, as it tells the report what happens
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
                    report.note("stopping: waiting a moment for what is in flight; once more to let it go")
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
            f"{job.succeeded} of {job.lines} lines done, {job.failed} failed, {job.remaining} left; "
            f"{tokens} tokens ({job.prompt_tokens} of prompts); {wall_s:.1f} s; store: {self.store_path}"
        )


def rate_limit(option: str, per_s: float | None) -> RateLimit:
    """The limit of an option. RunError names the option where it cannot be."""
    try:
        return RateLimit(per_s)
    except ValueError as error:
        raise RunError(f"{option} {error}") from None


def _has_results(output: OutputOptions) -> bool:
    if output.is_folder:
        return output.path.is_dir() and any(output.path.glob("part-*.*"))
    return output.path.exists()


def _shown(value: object) -> str:
    return "not given" if value in (None, {}) else orjson.dumps(value).decode()


def _complain(text: str) -> None:
    print(f"sglang-ext batch run: {text}", file=sys.stderr)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM ends what is not asynchronous as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
