"""What the router decides for a request: admission, pool, instances, and the prefill-decode protocol."""
