"""Asks a coordinator for its status over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

_TIMEOUT_S = 10.0


class StatusUnavailableError(RuntimeError):
    """The coordinator does not answer; the text is one line for the user."""


def read_status(url: str) -> Any:
    """The coordinator's /status, parsed. StatusUnavailableError."""
    address = url if "://" in url else f"http://{url}"
    if not address.startswith("http://"):
        raise StatusUnavailableError("is not an http:// address")
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/status", timeout=_TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        error.close()
        raise StatusUnavailableError(f"/status answered {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise StatusUnavailableError(f"does not answer ({reason})") from None
    except ValueError:
        raise StatusUnavailableError("/status is not JSON") from None
