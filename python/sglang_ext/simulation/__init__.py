"""Discrete-event simulator that runs the policy objects of the router and the engine on simulated time.

`event_loop.py` is the clock, `records.py` what goes in and comes out. Prefill stages: `cluster.py` (instances that
share a prompt, planned by `cluster_policies.py`), `replanning_cluster.py`, `idle_cluster.py`, and `instances.py` (one
instance per prompt, iteration by iteration, decided by `iteration_policies.py`). `decode.py` follows a prefill,
`run.py` puts them together.
"""
