"""Decisions of the live page: rows of a bounded stream, and what they are made of."""
