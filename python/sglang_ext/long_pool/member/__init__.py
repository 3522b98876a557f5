"""One instance of a long pool: its turns, its shard of the KV cache, ring attention."""
