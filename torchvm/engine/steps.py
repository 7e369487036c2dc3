"""The functions of a decoding run that are compiled: one verification, one plain step."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import torchvm.compilation
import torchvm.ops.mask
import torchvm.ops.tree
import torchvm.ops.verify  # noqa: F401 - these register ops and the backend
from torchvm.integrations.transformers import StepCache, VerifyInputs, cache_keyword
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.engine.cache import KVCache

__all__ = ["StepShape", "compiled_step", "plain_step", "prefill", "verify_step"]

# Every batch size and capacity is a compile of its own, so the default of 8 is soon used up.
RECOMPILE_LIMIT = 256
_PREFILL_TOKENS = 512


class StepShape(NamedTuple):
    """What is fixed for a run and so a constant of its graph."""

    num_draft_tokens: int
    """n, root included."""
    max_context_len: int
    """Most committed tokens a request may have."""
    tree_mask_mode: TreeMaskMode
    """The declared layout; the passes may choose a smaller one."""
    is_causal_chain: bool


def verify_step(
    model: PreTrainedModel,
    cache_name: str,
    kv_cache: KVCache,
    tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    shape: StepShape,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out one tree per request, run the model over it and accept greedily.

    Args:
        model: takes its attention from `tree_attention_of`.
        cache_name: the model's `cache_keyword`.
        kv_cache: gets the keys and values of all n nodes at positions L .. L+n-1.
        tokens: (B, n) int64, the root first.
        parents: (B, n) int64 node indices.
        seq_lens: (B,) int64, L.
        shape: constants of the run.

    Returns:
        predicts (B * n) int32, accept_index (B, n) int32 and accept_token_num (B,) int32, as
        `torchvm::verify_tree_greedy` gives them.
    """
    n = shape.num_draft_tokens
    mode = int(shape.tree_mask_mode)
    tree_mask = torch.ops.torchvm.alloc_verify_mask(
        tokens.shape[0], n, shape.max_context_len, mode, device=tokens.device
    )
    positions, *links = torch.ops.torchvm.build_tree_from_parents(
        parents, seq_lens, tree_mask, n, mode
    )
    verify = VerifyInputs(
        _contiguous_pages(seq_lens), seq_lens, tree_mask, mode, shape.is_causal_chain
    )
    out = _forward(model, cache_name, kv_cache, tokens, positions.view(tokens.shape), verify)
    predicts, accept_index, accept_num = torch.ops.torchvm.verify_tree_greedy(
        tokens, *links, out.logits.argmax(-1), n
    )
    return predicts, accept_index, accept_num


def plain_step(
    model: PreTrainedModel, cache_name: str, kv_cache: KVCache, tokens: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Decode one token per request, with neither tree nor mask: what speculation must equal.

    Args:
        model: takes its attention from `tree_attention_of`.
        cache_name: the model's `cache_keyword`.
        kv_cache: gets the token's keys and values at position L.
        tokens: (B, 1) int64, the last token of each request.
        seq_lens: (B,) int64, L.

    Returns:
        The next tokens (B, 1) int64 and the logits (B, 1, vocabulary) they are the largest of.
    """
    verify = VerifyInputs(
        _contiguous_pages(seq_lens), seq_lens, None, int(TreeMaskMode.QLEN_ONLY), True
    )
    out = _forward(model, cache_name, kv_cache, tokens, seq_lens.unsqueeze(1), verify)
    return out.logits.argmax(-1), out.logits


def prefill(model: PreTrainedModel, kv_cache: KVCache, prompts: list[list[int]]) -> None:
    """Run every token of the prompts but their last, which is the root of the first tree.

    Eager, in chunks of tokens; no logits are computed. Shorter prompts are padded: what that
    writes lies behind their committed tokens and is overwritten before it is read.
    """
    longest = max(map(len, prompts)) - 1
    device = kv_cache.keys[0].device
    for start in range(0, longest, _PREFILL_TOKENS):
        width = min(_PREFILL_TOKENS, longest - start)
        chunk = [prompt[:-1][start : start + width] for prompt in prompts]
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in chunk], device=device)
        seq_lens = torch.full((len(prompts),), start, device=device)
        positions = seq_lens.unsqueeze(1) + torch.arange(width, device=device)
        verify = VerifyInputs(
            _contiguous_pages(seq_lens), seq_lens, None, int(TreeMaskMode.QLEN_ONLY), True
        )
        _forward(model.base_model, cache_keyword(model), kv_cache, tokens, positions, verify)


def _forward(
    model: torch.nn.Module,
    cache_name: str,
    kv_cache: KVCache,
    tokens: Tensor,
    positions: Tensor,
    verify: VerifyInputs,
) -> Any:
    step_cache = StepCache(kv_cache.keys, kv_cache.values, verify.seq_lens, tokens.shape[1])
    named = {cache_name: step_cache}
    return model(input_ids=tokens, position_ids=positions, use_cache=True, verify=verify, **named)


def _contiguous_pages(seq_lens: Tensor) -> Tensor:
    """One page per request: (B, 1) int32."""
    rows = torch.arange(seq_lens.shape[0], dtype=torch.int32, device=seq_lens.device)
    return rows.unsqueeze(1)


@cache
def compiled_step(step: Callable[..., Any], inner: str) -> Callable[..., Any]:
    """Compile `step` into one static graph per shape, whose masks the passes lay out.

    Args:
        step: `verify_step` or `plain_step`.
        inner: "inductor" or "aot_eager".
    """
    return torch.compile(
        step, backend="torchvm", fullgraph=True, dynamic=False, options={"inner": inner}
    )
