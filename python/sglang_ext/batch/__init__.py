"""Offline runs: a file of requests through the pools, nothing lost, nothing written twice."""
