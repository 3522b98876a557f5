"""The handshake that grants prefill instances the right to write KV into a decode instance, without I/O."""
