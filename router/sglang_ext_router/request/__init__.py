"""The life of one request: read, count, admit, place, send, relay, account."""
