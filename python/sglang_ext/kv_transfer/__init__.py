"""Drivers and transports that move KV cache between instances."""
