"""Benchmarks, each a module to run: `python -m torchvm.tools.bench.<name>`."""
