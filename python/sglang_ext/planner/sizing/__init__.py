"""`sglang-ext size`: the cheapest pools that hold their objectives under a trace.

`load_trial.py` simulates one layout under a load and judges it, `search.py` finds the cheapest layouts by such trials,
`deployment.py` writes a layout down for Helm and for `sglang-ext up`, `size.py` is the command.
"""
