"""The control plane: administration over HTTP, and the pool controller."""
