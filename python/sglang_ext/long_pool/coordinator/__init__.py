"""The coordinator of a long pool: its server, its protocol and what it remembers."""
