"""Capture and replay of prefill graphs on a length x batch grid."""
