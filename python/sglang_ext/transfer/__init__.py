"""The handshake transfer manager: KV cache moves from prefill to decode instances."""
