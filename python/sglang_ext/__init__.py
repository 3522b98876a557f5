"""Prefill disaggregation by prompt length for SGLang."""

__version__ = "0.1.0"
