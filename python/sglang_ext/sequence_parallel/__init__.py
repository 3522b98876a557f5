"""Executing chunks of a long prompt on groups of instances: ring attention, KV rebalanced as groups grow."""
