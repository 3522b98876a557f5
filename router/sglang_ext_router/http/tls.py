"""TLS of the router: its own certificate for clients, and whom it trusts among the instances."""

from __future__ import annotations

import ssl
from functools import cache

from sglang_ext_router.config import RouterConfig, RouterConfigError


def client_context(config: RouterConfig) -> ssl.SSLContext | None:
    """What clients are served with; None for plain HTTP. RouterConfigError for files that cannot be used."""
    if not config.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None, password=_no_password)
    except (OSError, ValueError) as error:
        files = f"--ssl-certfile {config.ssl_certfile}"
        if config.ssl_keyfile:
            files += f" --ssl-keyfile {config.ssl_keyfile}"
        raise RouterConfigError(f"{files}: {_reason(error)}") from None
    return context


def worker_context(config: RouterConfig) -> ssl.SSLContext:
    """How `https://` instances are checked: by `--worker-ca-file`, or by what this machine trusts."""
    return _trusting(config.worker_ca_file)


@cache  # reading what a machine trusts takes a while
def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise RouterConfigError(f"--worker-ca-file {ca_file}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no certificate and key in PEM that belong together ({error.reason or 'unreadable'})"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the key is protected by a password")
