"""Measuring an engine and fitting its cost model, so that planner, policies and simulator know what a prefill costs.

`profile_engine.py` is `sglang-ext profile`: `points.py` says what is measured, `instance.py` asks the running
instance, `measurement.py` repeats, `measured_points.py` keeps what was measured through an interruption, `fit.py` fits;
`costs/engine_profile.py` is the file that comes out.
"""
