"""The handshake transfer manager as a KV transfer backend of SGLang."""
