"""A small cluster on one machine: pools of SGLang instances and their router, started and kept as one."""
