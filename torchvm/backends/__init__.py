"""Attention back ends and dispatchers: who owns the verify mask, and who reads it."""
