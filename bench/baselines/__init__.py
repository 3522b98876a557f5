"""Policies that exist only to be compared with: other systems' decisions, behind the interfaces of ours."""
