"""Passes over functional graphs that give every verify mask the smallest layout it may have."""
