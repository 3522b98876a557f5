"""The only package that touches SGLang: hooks, server arguments, the CPU platform, worker launch."""
