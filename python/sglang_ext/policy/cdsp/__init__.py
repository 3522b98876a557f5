"""Chunkwise dynamic sequence parallelism: in which chunks and on which groups of instances a prompt is prefilled.

`records.py` is what goes in and comes out, `planner.py` the planner, `fit.py` the cost model's fit to measurements,
`table1.py` a published set of them. The planner's core is C++ (`native/`) and the package is importable without it.
"""
