"""The router's HTTP server.

`client_ports` listens. Each connection (`http1`) drives a parser without I/O (`request_parser`), which asks a gate
about every head (`access`, `api_keys`). `replies` builds the router's own replies, `unread_replies` finds clients
that do not read them, `asgi_bridge` runs paths of the control plane, and `tls` makes the TLS contexts.
"""
