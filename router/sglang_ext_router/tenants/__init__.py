"""Tenants: whose key a request has, what it may use, and what it has used."""
