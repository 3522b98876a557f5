"""`python -m support.stand_in_server PORT [options]`: a program that is as healthy and as obedient as told.

Answers every GET with 200. Standard library only, so that it is up within a tenth of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time


class _Handler(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die-after-s", type=float, help="exit with status 3 after this time")
    parser.add_argument("--ignore-term", action="store_true", help="only SIGKILL ends it")
    parser.add_argument("--slow-term-s", type=float, default=0.0, help="time that SIGTERM takes")
    parser.add_argument("--unhealthy", action="store_true", help="answer 503")
    parser.add_argument(
        "--stop-when-exists", default="", help="stop as by SIGSTOP if this file exists, before anything else; once"
    )
    parser.add_argument("--child", action="store_true", help="have a child that overwrites its environment")
    parser.add_argument("--say", default="", help="print this line at the start")
    options = parser.parse_args()
    if options.stop_when_exists:
        with contextlib.suppress(FileNotFoundError):
            os.stat(options.stop_when_exists)
            os.unlink(options.stop_when_exists)  # once
            os.kill(os.getpid(), signal.SIGSTOP)
    if options.say:
        print(options.say, flush=True)

    def end(number: int, frame: object) -> None:
        time.sleep(options.slow_term_s)
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_term else end)
    if options.child:
        # Ignores SIGTERM and has none of the parent's environment: only its session tells where it belongs.
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], env={})
    if options.die_after_s is not None:
        threading.Timer(options.die_after_s, os._exit, [3]).start()
    _Handler.status = 503 if options.unhealthy else 200
    http.server.ThreadingHTTPServer(("127.0.0.1", options.port), _Handler).serve_forever()


if __name__ == "__main__":
    main()
