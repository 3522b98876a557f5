"""Addresses of instances as an operator writes them, in their one normal form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit


def normal_url(text: str, schemes: Sequence[str] = ("http", "https")) -> str:
    """Return `SCHEME://host:port` for a URL, or for HOST:PORT alone. Raise ValueError, one line, for other text."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} is not of the form http://HOST:PORT") from None
    if parts.scheme not in schemes:
        wanted = " or ".join(f"{scheme}://" for scheme in schemes)
        raise ValueError(f"{text!r} must be an {wanted} URL")
    extra = parts.query or parts.fragment or parts.username or parts.password
    if not parts.hostname or not port or parts.path not in {"", "/"} or extra or not is_host(parts.hostname):
        raise ValueError(f"{text!r} is not of the form http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def is_host(name: str) -> bool:
    """Return whether it can be a host's name or address."""
    return re.fullmatch(r"[A-Za-z0-9._:%-]+", name) is not None
