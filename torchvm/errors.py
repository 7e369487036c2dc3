"""Exceptions of torchvm beyond ValueError and TypeError."""

from __future__ import annotations

__all__ = ["TorchvmError"]


class TorchvmError(Exception):
    """Base class of torchvm's own exceptions."""
