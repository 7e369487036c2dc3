"""How many programs a launch has, and on which device it runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

__all__ = ["OPTIONS", "device_of", "num_programs"]

# Products and sums of floats may be fused; Triton 3.9 warns where this is left to its default.
OPTIONS = {"enable_fp_fusion": True}

PROGRAMS_PER_SM = 4
# Triton's interpreter runs programs one after another: few, but enough for them to share work.
INTERPRETED_PROGRAMS = 3


@cache
def num_programs(device: torch.device) -> int:
    """Programs of a launch whose work depends on lengths: the device's number, never theirs."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device current for a launch: Triton launches on the current one."""
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()
