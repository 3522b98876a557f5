"""Discrete-event simulator that runs the policy objects of the router and the engine on simulated time.

`events.py` is the clock and what happens by it, `workload.py` what is asked. Prefill stages: `long_pool.py` (instances
that share a prompt) and `instances.py` (one instance per prompt, iteration by iteration,
decided by `iteration_policies.py`). `decode.py` follows a prefill, `run.py` puts them together, `simulate.py` is
`sglang-ext simulate`.
"""
