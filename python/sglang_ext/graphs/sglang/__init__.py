"""Prefill graphs by length and batch size, inside SGLang's model runner."""
