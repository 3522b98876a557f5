"""Measuring an engine and fitting its cost model, so that planner, policies and simulator know what a prefill costs.

`engine_command.py` is `sglang-ext profile engine`: `points.py` says what is measured, `instance.py` asks the running
instance, `measurement.py` repeats and takes notes that survive an interruption (`notes.py`), `fit.py` fits, and
`profile_file.py` is the file that comes out. `rates_command.py` is `sglang-ext profile rates`, improvement rates by
simulation: `rates.py` searches, `rates_notes.py` survives an interruption, `rates_output.py` and `rates_file.py` write
and read the table.
"""
