"""Chunkwise dynamic sequence parallelism: in which chunks and on which groups of instances a prompt is prefilled.

`plan.py` is what goes in and comes out, `planner.py` the planner, `sp_cost.py` the cost model with its fit to
measurements, `table1.py` a published set of them; `coordinator.py` decides over the instances of a long pool. The
planner's core is C++ (`native/`) and the package is importable without it.
"""
