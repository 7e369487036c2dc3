"""Back ends by name: what the command line and the engine can make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchvm.backends.cpu import CPUBackend
from torchvm.backends.deepseek_v4 import DeepSeekV4Backend
from torchvm.backends.flash_attention import FlashAttentionBackend
from torchvm.backends.flashinfer import FlashInferBackend
from torchvm.backends.hybrid_attention import HybridAttnBackend
from torchvm.backends.hybrid_linear import HybridLinearAttnBackend
from torchvm.backends.linear import LinearAttnBackend
from torchvm.backends.mla import FlashMLABackend, TRTLLMMLABackend
from torchvm.backends.triton import TritonBackend, TritonUnifiedBackend
from torchvm.backends.two_batch import TboAttnBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchvm.backends.base import AttentionBackend, VerifyConfig
    from torchvm.backends.leaf import LeafBackend

__all__ = ["BACKENDS", "LEAVES", "make_backend", "tree_backends"]

LEAVES: tuple[type[LeafBackend], ...] = (
    CPUBackend,
    TritonBackend,
    TritonUnifiedBackend,
    FlashAttentionBackend,
    FlashInferBackend,
    FlashMLABackend,
    TRTLLMMLABackend,
    DeepSeekV4Backend,
    LinearAttnBackend,
)
"""Every back end with kernels of its own."""


def _hybrid_attention(config: VerifyConfig) -> AttentionBackend:
    prefill = FlashAttentionBackend(msgspec.structs.replace(config, owns_mask=False))
    return HybridAttnBackend(prefill, TritonBackend(config), speculative_attention_mode="decode")


def _two_batch(config: VerifyConfig) -> AttentionBackend:
    of_child = msgspec.structs.replace(config, owns_mask=False)
    return TboAttnBackend(CPUBackend(config), (CPUBackend(of_child), CPUBackend(of_child)))


def _hybrid_linear(config: VerifyConfig) -> AttentionBackend:
    return HybridLinearAttnBackend(CPUBackend(config), LinearAttnBackend(config))


BACKENDS: dict[str, Callable[[VerifyConfig], AttentionBackend]] = {
    **{leaf.label: leaf for leaf in LEAVES if leaf is not LinearAttnBackend},
    "hybrid-attention": _hybrid_attention,
    "hybrid-linear": _hybrid_linear,
    "two-batch": _two_batch,
}
"""What makes each back end; dispatchers come with typical children."""


def make_backend(name: str, config: VerifyConfig) -> AttentionBackend:
    """Make a back end by name.

    Raises:
        ValueError: for an unknown name, or a topk that it cannot verify.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name](config)


def tree_backends() -> list[str]:
    """Names of the back ends that verify trees, attention with a mask alone."""
    return [leaf.label for leaf in LEAVES if leaf.takes_trees and leaf is not LinearAttnBackend]
