"""The demonstration model."""
