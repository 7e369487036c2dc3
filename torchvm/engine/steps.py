"""The functions of a decoding run that are compiled: one verification, one plain step."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

import torchvm.compilation
import torchvm.ops.mask
import torchvm.ops.sampling
import torchvm.ops.tree
import torchvm.ops.verify  # noqa: F401 - these register ops and the backend
from torchvm.backends.base import VerifyBatch
from torchvm.backends.chain import CHAIN
from torchvm.engine.target import PROMPT_TOKENS, HiddenTarget
from torchvm.engine.transformers_target import as_target
from torchvm.ops.layout import TreeMaskMode
from torchvm.sampling import SamplingParams, sampling_probs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.backends.base import AttentionBackend
    from torchvm.engine.drafts import HiddenDrafter
    from torchvm.engine.target import TargetCache, TargetModel
    from torchvm.ops.tree import DraftTree

__all__ = ["StepShape", "compiled_step", "plain_step", "prefill", "states_of", "verify_step"]

# Every batch size, capacity and back end compiles anew: the default of 8 is soon used up.
RECOMPILE_LIMIT = 256


class StepShape(NamedTuple):
    """What is fixed for a run and so a constant of its graph."""

    num_draft_tokens: int
    """n, root included."""
    max_context_len: int
    """Most committed tokens a request may have."""
    tree_mask_mode: TreeMaskMode
    """The mask's layout; of a mask that the graph allocates the passes may choose a smaller."""
    sampling: SamplingParams | None = None
    """None accepts greedily."""
    hidden_states: bool = False
    """Whether the step also gives the target's states."""


def verify_step(
    target: TargetModel,
    cache: TargetCache,
    backend: AttentionBackend,
    tokens: Tensor,
    parents: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    shape: StepShape,
    tree_mask: Tensor | None = None,
    coins: tuple[Tensor, Tensor] | None = None,
    layout: DraftTree | None = None,
) -> tuple[Tensor, ...]:
    """Lay out one tree per request, run the model over it and accept.

    Args:
        target: the model.
        cache: gets what the layers keep of all n nodes.
        backend: verifies.
        tokens: (B, n) int64, the root first.
        parents: (B, n) int64 node indices.
        slots: (B,) int64, where each request lies in the cache.
        seq_lens: (B,) int64, L.
        shape: constants of the run.
        tree_mask: the buffer to build into; None allocates one in the graph.
        coins: uniform numbers (B, n) and (B,) float32, where `shape` samples.
        layout: buffers of a phase that get the positions and links of the trees; None where
            nobody else looks at them.

    Returns:
        predicts (B * n) int32, accept_index (B, n) int32 and accept_token_num (B,) int32, as
        `torchvm::verify_tree_greedy` and `torchvm::verify_tree_sampling` give them; then, where
        `shape` asks for them, the states (B, n, hidden_size) of all nodes.
    """
    n = shape.num_draft_tokens
    mode = int(shape.tree_mask_mode)
    if tree_mask is None:
        tree_mask = torch.ops.torchvm.alloc_verify_mask(
            tokens.shape[0], n, shape.max_context_len, mode, device=tokens.device
        )
    flat, *links = torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, tree_mask, n, mode)
    if layout is not None:
        for kept, made in zip(layout, (flat, *links), strict=True):
            kept.copy_(made)
    positions = flat.view(tokens.shape)
    batch = VerifyBatch(
        _pages(slots), cache.page_size, seq_lens, positions, tree_mask, mode,
        links[1], links[2],
    )  # fmt: skip
    metadata = backend.init_forward_metadata(batch)
    inputs = (cache, tokens, positions, slots, seq_lens, backend, metadata)
    if not shape.hidden_states:
        logits = target.forward(*inputs)
        assert logits is not None
        return _accept(tokens, links, logits, shape, coins)
    source = cast("HiddenTarget", target)
    hidden = source.hidden_states(*inputs)
    return *_accept(tokens, links, source.logits_of(hidden), shape, coins), hidden


def _accept(
    tokens: Tensor,
    links: list[Tensor],
    logits: Tensor,
    shape: StepShape,
    coins: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the trees, greedily or by coins."""
    n, sampling = shape.num_draft_tokens, shape.sampling
    if sampling is None:
        predicts, index, num = torch.ops.torchvm.verify_tree_greedy(
            tokens, *links, logits.argmax(-1), n
        )
        return predicts, index, num
    assert coins is not None
    probs = sampling_probs(
        logits, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
    )
    predicts, index, num = torch.ops.torchvm.verify_tree_sampling(
        tokens, *links, probs, *coins, n, sampling.threshold_single, sampling.threshold_acc
    )
    return predicts, index, num


def plain_step(
    target: TargetModel, cache: TargetCache, tokens: Tensor, slots: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Decode one token per request, with neither tree nor mask: what speculation must equal.

    Args:
        target: the model.
        cache: gets what the layers keep of the token.
        tokens: (B, 1) int64, the last token of each request.
        slots: (B,) int64, where each request lies in the cache.
        seq_lens: (B,) int64, L.

    Returns:
        The next tokens (B, 1) int64 and the logits (B, 1, vocabulary) they are the largest of.
    """
    logits = target.forward(*_chain(cache, tokens, slots, seq_lens))
    assert logits is not None
    return logits.argmax(-1), logits


def prefill(
    target: TargetModel,
    cache: TargetCache,
    prompts: list[list[int]],
    drafter: HiddenDrafter | None = None,
) -> None:
    """Run every token of the prompts but their last, which is the root of the first tree.

    Eager, in chunks of tokens; no logits are computed. Shorter prompts are padded: what that
    writes lies behind their committed tokens and is overwritten before it is read.

    Args:
        target: the model, a `HiddenTarget` where a drafter observes.
        cache: gets what the layers keep.
        prompts: tokens of each request.
        drafter: is given the states of the tokens.
    """
    longest = max(map(len, prompts)) - 1
    slots = list(range(len(prompts)))
    for start in range(0, longest, PROMPT_TOKENS):
        width = min(PROMPT_TOKENS, longest - start)
        chunk = [prompt[:-1][start : start + width] for prompt in prompts]
        rows = [row + [0] * (width - len(row)) for row in chunk]
        tokens = torch.tensor(rows, device=target.device)
        seq_lens = torch.full((len(prompts),), start, device=target.device)
        places = torch.tensor(slots, device=target.device)
        inputs = _chain(cache, tokens, places, seq_lens)
        starts = [start] * len(prompts)
        if drafter is None:
            target.forward(*inputs, logits=False)
        else:
            nodes = [range(len(row)) for row in chunk]
            hidden = cast("HiddenTarget", target).hidden_states(*inputs)
            drafter.observe(hidden, requests=slots, starts=starts, nodes=nodes)
        paths = [range(1, len(row)) if row else None for row in chunk]
        cache.compact(slots, starts, paths)


def states_of(model: PreTrainedModel | HiddenTarget, tokens: Tensor) -> Tensor:
    """Run whole sequences with nothing before them: what a draft head learns from.

    Args:
        model: the one that verifies.
        tokens: (B, T) int64, T from 1 to the model's limit.

    Returns:
        (B, T, hidden_size).

    Raises:
        TypeError: for a model that is no `HiddenTarget`.
        ValueError: for tokens of another shape or dtype.
    """
    target = as_target(model)
    if not isinstance(target, HiddenTarget):
        raise TypeError(f"model must be a HiddenTarget, got {type(target).__name__}")
    limit, shape = target.max_position_embeddings, list(tokens.shape)
    if len(shape) != 2 or not 1 <= shape[1] <= limit or tokens.dtype != torch.int64:
        raise ValueError(
            f"tokens must be (B, T) int64 with T in [1, {limit}], got {shape} {tokens.dtype}"
        )
    batch_size, length = shape
    with torch.inference_mode(), target.attending():
        cache = target.allocate(batch_size, length, 1)
        slots = torch.arange(batch_size, device=tokens.device)
        hidden = target.hidden_states(*_chain(cache, tokens, slots, torch.zeros_like(slots)))
    # Of inference mode, autograd would keep none.
    return hidden.clone()


def _chain(
    cache: TargetCache, tokens: Tensor, slots: Tensor, seq_lens: Tensor
) -> tuple[TargetCache, Tensor, Tensor, Tensor, Tensor, AttentionBackend, Any]:
    """Inputs of a forward over tokens that follow one another."""
    positions = seq_lens.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
    batch = VerifyBatch(
        _pages(slots), cache.page_size, seq_lens, positions, None,
        int(TreeMaskMode.QLEN_ONLY),
    )  # fmt: skip
    metadata = CHAIN.init_forward_metadata(batch)
    return cache, tokens, positions, slots, seq_lens, CHAIN, metadata


def _pages(slots: Tensor) -> Tensor:
    """One page per request: (B, 1) int32."""
    return slots.int().unsqueeze(1)


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
