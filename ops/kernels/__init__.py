"""Kernels behind the ops: one launcher each, numba for the CPU and Triton for GPUs."""
