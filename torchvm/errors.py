"""Exceptions of torchvm beyond ValueError and TypeError."""

from __future__ import annotations

__all__ = ["CaptureError", "MaskContractError", "TorchvmError"]


class TorchvmError(Exception):
    """Base class of torchvm's own exceptions."""


class MaskContractError(TorchvmError):
    """What a back end or an op declares about a mask is not what it does."""


class CaptureError(TorchvmError):
    """A step cannot be captured in a CUDA graph."""
