"""Point-to-point communication between the members of a group."""
