"""TLS contexts of the router: its own certificate for clients, and the certificates it trusts of instances."""

from __future__ import annotations

import ssl
from functools import cache

from sglang_ext_router.config import RouterConfig, RouterConfigError


def client_context(config: RouterConfig) -> ssl.SSLContext | None:
    """Return the context for clients, or None for plain HTTP. Raise RouterConfigError for files that cannot be used."""
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
    """Return the context for `https://` instances: it trusts `--worker-ca-file`, or what this machine trusts."""
    return _trusting(config.worker_ca_file)


@cache  # reading the certificates that a machine trusts takes a while
def _trusting(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise RouterConfigError(f"--worker-ca-file {ca_file}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"must hold a certificate and its key in PEM ({error.reason or 'unreadable'})"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _no_password() -> str:
    """Refuse a key with a password, which OpenSSL would ask for at the terminal."""
    raise ValueError("the key is protected by a password")
