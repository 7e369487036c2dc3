"""Contracts of attention ops that are not torchvm's, each with the fact it rests on.

An op without a contract counts as reading everything, so a FULL contract frees nothing. It makes
the verdict say that a reader needs the prefix (FULL_READ) instead of that nobody knows.

Of the attention that engines use, this is visible in a graph:

* torch's scaled dot product attention. `attn_mask` (`attn_bias`, `bias`) is a mask over queries
  and all keys: an element is added to the score of its query and key, or for bool takes that key
  out. The committed tokens are keys as well, so the prefix columns are read: FULL. The argument
  names are those of torch 2.13's schemas.
* flex_attention is a higher-order op: the mask goes to a function that may index it anywhere, and
  counts as read in full (HIGHER_ORDER) with no contract.
* flash-attn's `flash_attn::_flash_attn_forward` and `_flash_attn_varlen_forward`, and the flash
  ops of torch: a causal flag, a window, and no argument that takes a mask.
* vLLM's `unified_attention` and its kin find metadata in a forward context and have no argument
  that takes a mask. A mask that they are to see leaves the graph, and is kept (RETURNED).
* FlashInfer's `maybe_custom_mask` belongs to ops whose names are put together from dtypes and
  head sizes when they are built; there is no name to register in advance. SGLang's
  `build_tree_kernel_efficient` builds a mask and reads none. What reads one there is the engine's
  to register, with `register_mask_reader`.
"""

from __future__ import annotations

from torchvm.ops.contracts import MaskRead, register_mask_reader

__all__ = ["ATTENTION_MASKS"]

ATTENTION_MASKS = {
    "aten::scaled_dot_product_attention": "attn_mask",
    "aten::_scaled_dot_product_attention_math": "attn_mask",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attn_mask",
    "aten::_scaled_dot_product_efficient_attention": "attn_bias",
    "aten::_scaled_dot_product_cudnn_attention": "attn_bias",
    "aten::_scaled_dot_product_fused_attention_overrideable": "attn_bias",
    "aten::_efficient_attention_forward": "bias",
}
"""The mask argument of every op of torch's that computes attention under a given mask."""

for _op, _arg in ATTENTION_MASKS.items():
    register_mask_reader(_op, arg=_arg, reads=MaskRead.FULL)
