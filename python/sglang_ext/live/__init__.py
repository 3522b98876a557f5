"""The live page, and recordings of its stream."""
