"""Batches as a service: OpenAI's files and batches in front of any endpoint."""
