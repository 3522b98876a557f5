"""Implementations of the hooks; `hook_table` says where each one goes."""
