"""Transports that move rows of KV cache between instances."""
