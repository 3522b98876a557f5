"""Chunkwise dynamic sequence parallelism: groups of instances prefill the chunks of a long prompt."""
