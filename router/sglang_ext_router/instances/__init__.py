"""The instances that the router knows: registry, probes, discovery, load."""
