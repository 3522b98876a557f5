"""The pools of prefill instances: how pressed each is, and one instance's move between them."""
