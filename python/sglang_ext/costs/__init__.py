"""Cost profiles: the files that `sglang-ext profile` writes, read by the coordinator, a planner and the simulator."""
