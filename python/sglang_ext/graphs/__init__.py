"""Prefill graphs on a grid of length and batch size: the grid, and SGLang's runner of it."""
