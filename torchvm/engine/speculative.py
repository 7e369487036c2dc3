"""Speculative decoding of a ragged batch in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.engine.batch import prompts_of
from torchvm.engine.decoders import SpeculativeDecoder
from torchvm.engine.transformers_target import as_target
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.backends.base import AttentionBackend, VerifyConfig
    from torchvm.engine.decoders import Generation
    from torchvm.engine.drafts import Drafter
    from torchvm.engine.target import TargetModel
    from torchvm.sampling import SamplingParams

__all__ = ["context_for", "generate"]

_LEAST_CONTEXT = 256


def generate(
    model: PreTrainedModel | TargetModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    drafter: Drafter,
    max_new_tokens: int,
    eos_token_id: int | Iterable[int] | None = None,
    max_context_len: int | None = None,
    mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
    backend: str | Callable[[VerifyConfig], AttentionBackend] | None = None,
    sampling: SamplingParams | None = None,
    inner: str = "inductor",
    on_step: Callable[[list[list[int]]], None] | None = None,
    stop_when: Callable[[int, Sequence[int]], bool] | None = None,
) -> Generation:
    """Decode prompts, verifying a tree of drafts per request and step.

    Each request gets the tokens that it would get alone; those that are sampled have the target's
    distribution, and follow from the seed and the request's place in the batch. The step is one
    graph, compiled at the first call with a model and these sizes: the batch size, n, `topk == 1`
    and the context.

    Args:
        model: a Llama-like causal LM of transformers on the CPU, in eval mode, or any
            `TargetModel`.
        input_ids: (B, P) int64.
        attention_mask: (B, P), 1 at the tokens of each prompt, padding on either side; None
            when no prompt is padded.
        drafter: `PromptLookupDrafter` or any `Drafter`.
        max_new_tokens: budget of each request.
        eos_token_id: a request ends with the first of these, which it keeps.
        max_context_len: most tokens of a request, prompt included; by default the least power of
            two that the longest prompt and its budget fit, up to the model's own limit.
        mask_mode: the layout that the mask is declared in; `torchvm.reports()` says what it
            became.
        backend: name of an attention back end, or what makes one from a config; it owns the
            mask, in the layout that a plan finds. None verifies with "cpu" and a mask that the
            step allocates.
        sampling: how tokens are sampled; None decodes greedily.
        inner: what compiles the step, "inductor" or "aot_eager".
        on_step: is given the new tokens of each request after every step.
        stop_when: is given a request's number and its new tokens, after each of them; True ends
            the request, which keeps the token.

    Raises:
        ValueError: when a prompt leaves no room for a token, a draft is malformed, or a shape or
            dtype does not fit.
    """
    prompts = prompts_of(input_ids, attention_mask)
    target = as_target(model)
    limit = target.max_position_embeddings
    if eos_token_id is None:
        eos_token_id = ()
    decoder = SpeculativeDecoder(
        target,
        drafter,
        batch_size=len(prompts),
        max_context_len=max_context_len or context_for(limit, prompts, max_new_tokens),
        inner=inner,
        mask_mode=mask_mode,
        backend=backend,
        sampling=sampling,
    )
    return decoder.decode(
        prompts,
        max_new_tokens=max_new_tokens,
        eos_token_ids=(eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id),
        on_step=on_step,
        stop_when=stop_when,
    )


def context_for(limit: int, prompts: list[list[int]], max_new_tokens: int) -> int:
    """Least power of two that the prompts and their budget fit, up to the model's limit.

    Few sizes mean few compiles.
    """
    needed = max(map(len, prompts), default=0) + max_new_tokens
    return min(limit, max(_LEAST_CONTEXT, 1 << (needed - 1).bit_length()))
