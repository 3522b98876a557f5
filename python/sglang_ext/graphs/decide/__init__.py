"""Decides which shapes of length and batch size are captured, and which batch fits which."""
