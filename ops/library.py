"""Registration of operators in the `torchvm` namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NAMESPACE", "register_op"]

NAMESPACE = "torchvm"

# A Library drops what it registered when it is collected: they live as long as the process.
_libraries: list[torch.library.Library] = []


def register_op(
    schema: str,
    *,
    fake: Callable[..., Any],
    kernels: dict[str, Callable[..., Any]],
) -> torch._ops.OpOverload:
    """Define an op, its kernels and its fake, once per process.

    Args:
        schema: `"name(arguments) -> results"`, without the namespace.
        fake: computes output metadata from fake inputs.
        kernels: implementation by dispatch key: `"CPU"`, `"CUDA"` or, for factories,
            `"CompositeExplicitAutograd"`.

    Returns:
        The default overload, `torch.ops.torchvm.<name>.default`. A module that is imported a
        second time under another name gets the op that the first import defined.
    """
    name = schema.partition("(")[0]
    qualified = f"{NAMESPACE}::{name}"
    if not torch._C._dispatch_has_kernel(qualified):
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key, kernel in kernels.items():
            library.impl(name, kernel, key)
        torch.library.register_fake(qualified, fake, lib=library)
        _libraries.append(library)
    packet: torch._ops.OpOverloadPacket = getattr(getattr(torch.ops, NAMESPACE), name)
    return packet.default
