"""Cost profiles: the files that the router's planner, the coordinator and the simulator read."""
