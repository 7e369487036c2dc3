"""Benchmarks behind `torchvm bench`; gpu, ahead and compile_share can also be run as modules."""
