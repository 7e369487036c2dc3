"""torchvm::copy_value: a copy that a compiler cannot take for one that nobody needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["COPY_VALUE"]

_SCHEMA = "copy_value(Tensor value) -> Tensor"


def _copy(value: Tensor) -> Tensor:
    """Fake and kernel alike: values and strides of the input, memory of its own."""
    return value.clone()


COPY_VALUE = register_op(_SCHEMA, fake=_copy, kernels={"CompositeExplicitAutograd": _copy})
"""For graphs after autograd: it has no derivative."""
