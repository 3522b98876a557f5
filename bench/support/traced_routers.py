"""Describes what traces cost a router: the product against a copy of its sources without them, both compiled alike.

    with traced_routers(build_variants(folder), upstreams, ports, sink_url, folder) as routers:
        routers["off"].processor_time_s

The copy is the product's own sources without the branches of the request path that ask for a tracer.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

from support.routers import OURS, RunningRouter, Upstreams

ROOT = Path(__file__).resolve().parents[2]
BRANCHES = 2  # of the request path: where a request joins its trace, and where it has ended
VARIANTS = ("without", "off", "on")


def build_variants(folder: Path) -> dict[str, Path]:
    """Compile the product and the copy without a tracer, each in a folder of its own. AssertionError where the request
    path has other branches than are known here; CalledProcessError from the compiler."""
    tool = _compile_tool()
    removed: list[str] = []

    def strip(copy: Path) -> None:
        for module in tool.HOT_MODULES:
            if module.startswith("sglang_ext_router/") and not module.endswith("/services.py"):
                path = copy / module
                text, count = without_tracer(path.read_text(encoding="utf-8"))
                path.write_text(text, encoding="utf-8")
                removed.extend([module] * count)

    built = {}
    for name, change in (("product", lambda copy: None), ("without", strip)):
        built[name] = folder / name
        built[name].mkdir()
        tool.compile_in(built[name], change)
    assert len(removed) == BRANCHES, f"{len(removed)} branches of the request path ask for a tracer: {removed}"
    return built


def without_tracer(source: str) -> tuple[str, int]:
    """The source without the `if` statements that ask for a tracer, and how many these were."""
    lines = source.splitlines(keepends=True)
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and any(isinstance(part, ast.Attribute) and part.attr == "tracer" for part in ast.walk(node.test))
    ]
    for node in sorted(found, key=lambda one: -one.lineno):
        assert not node.orelse, f"line {node.lineno} has an else"
        del lines[node.lineno - 1 : node.end_lineno]
    text = "".join(lines)
    ast.parse(text)
    assert ".tracer" not in text
    return text, len(found)


def _compile_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_hot_path", ROOT / "tools/compile_hot_path.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def traced_routers(
    built: dict[str, Path], upstreams: Upstreams, ports: Sequence[int], sink_url: str, folder: Path
) -> Iterator[dict[str, RunningRouter]]:
    """All three at once, each at a port of its own: one is measured while the others have nothing to do."""
    with ExitStack() as stack:
        routers = {}
        for name, port in zip(VARIANTS, ports, strict=True):
            sources = built["without" if name == "without" else "product"]
            paths = [str(sources), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            options = ("--otlp-traces-endpoint", sink_url) if name == "on" else ()
            log = folder / f"{name}.log"
            router = RunningRouter(OURS, port, 0, upstreams, log, options=options, environment=environment)
            routers[name] = stack.enter_context(router)
        yield routers


@contextmanager
def trace_sink() -> Iterator[str]:
    """A collector that takes everything and keeps nothing; its URL."""

    class Sink(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            left = int(self.headers["content-length"])
            while left:
                left -= len(self.rfile.read(min(left, 1 << 16)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Sink) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
