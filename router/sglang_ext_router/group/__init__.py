"""Several router processes and several routers as one."""
