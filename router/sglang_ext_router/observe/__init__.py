"""Metrics, access log, traces and the live page."""
