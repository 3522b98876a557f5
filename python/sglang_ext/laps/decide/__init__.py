"""One prefill instance's scheduling (LAPS): short batches on captured graphs, long chunks between them."""
