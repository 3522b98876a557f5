"""Prefill disaggregation by prompt length for SGLang."""

__version__ = "0.2.0"
