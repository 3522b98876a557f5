"""Decisions of offline runs: how much is in flight, and in which order requests leave."""
