"""Connections of clients: HTTP/1.1, access, replies, and the bridge to the control plane."""
