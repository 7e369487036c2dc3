"""Start of a verifier: its back end, what a plan finds that this one reads, and its mask."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from torchvm.backends.cpu import CPUBackend
from torchvm.backends.registry import make_backend
from torchvm.backends.two_batch import TboAttnBackend
from torchvm.engine.steps import StepShape, verify_step
from torchvm.ops.layout import TreeMaskMode
from torchvm.planning import MaskPlan, plan_verify_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from torchvm.backends.base import AttentionBackend, VerifyConfig
    from torchvm.engine.target import TargetModel
    from torchvm.sampling import SamplingParams

__all__ = ["Verifier", "plan_backend", "start_verifier", "step_inputs"]


class Verifier(NamedTuple):
    """What verifies a run's trees, and where they are built."""

    backend: AttentionBackend
    shape: StepShape
    buffer: Tensor | None
    """The back end's mask; None when the step allocates one."""
    plan: MaskPlan | None
    """Of the back end's mask; None when the step allocates one."""


def start_verifier(
    target: TargetModel,
    backend: str | Callable[[VerifyConfig], AttentionBackend] | None,
    *,
    config: VerifyConfig,
    max_bs: int,
    mask_mode: TreeMaskMode,
    sampling: SamplingParams | None = None,
    hidden_states: bool = False,
) -> Verifier:
    """Make a back end and its mask.

    Args:
        target: the model.
        backend: a name, what makes a back end, or None for "cpu" and a mask that the step
            allocates.
        config: what is fixed for the run.
        max_bs: most requests in a batch.
        mask_mode: the layout that is declared when the step allocates the mask.
        sampling: how drafts are accepted; None is greedily.
        hidden_states: whether the step also gives the target's states.

    Raises:
        MaskContractError: when the back end declares a mask unread that its kernels read.
        ValueError: when the back end is unknown, cannot verify this model or `topk`, was made for
            other trees than it was asked for, or owns no mask that fits.
    """
    if backend is None:
        made = CPUBackend(config)
        _check_kinds(target, made)
        shape = StepShape(
            config.num_draft_tokens, config.max_context_len, mask_mode, sampling, hidden_states
        )
        return Verifier(made, shape, None, None)
    make = partial(make_backend, backend) if isinstance(backend, str) else backend
    probe = make(config)
    _check_kinds(target, probe)
    _check_config(probe, config)
    plan = plan_backend(
        target,
        probe,
        config=config,
        max_bs=max_bs,
        sampling=sampling,
        hidden_states=hidden_states,
    )
    owner = make(msgspec.structs.replace(config, tree_mask_mode=plan.mode))
    owner.init_cuda_graph_state(max_bs)
    mask = owner.verify_mask
    _check_mask(owner, plan, max_bs, config)
    assert mask is not None
    shape = StepShape(
        config.num_draft_tokens, config.max_context_len, mask.mode, sampling, hidden_states
    )
    return Verifier(owner, shape, mask.buffer, plan)


def plan_backend(
    target: TargetModel,
    backend: AttentionBackend,
    *,
    config: VerifyConfig,
    max_bs: int,
    sampling: SamplingParams | None = None,
    hidden_states: bool = False,
) -> MaskPlan:
    """Trace the verify step of a model on a back end, and see what it reads of its mask.

    Args:
        target: the model.
        backend: what is traced is its verifier: a dispatcher that splits batches reads what the
            owner of its mask reads.
        config: sizes; the mask is a FULL_MASK of this capacity that is never allocated.
        max_bs: most requests in a batch.
        sampling: how drafts are accepted; None is greedily.
        hidden_states: whether the step also gives the target's states.

    Raises:
        MaskContractError: when the back end declares a mask unread that its kernels read.
    """
    n = config.num_draft_tokens
    mode = TreeMaskMode.FULL_MASK
    shape = StepShape(n, config.max_context_len, mode, sampling, hidden_states)

    def inputs(mask: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        verifier = Verifier(backend.verifier, shape, mask, None)
        return step_inputs(target, verifier, max_bs, mask.device), {}

    with torch.no_grad(), target.attending():
        return plan_verify_mask(
            verify_step,
            inputs,
            max_bs=max_bs,
            num_draft_tokens=n,
            max_context_len=config.max_context_len,
            device=config.device,
            dtype=backend.mask_dtype,
            declared_is_read=backend.is_read,
        )


def step_inputs(
    target: TargetModel, verifier: Verifier, max_bs: int, device: torch.device | str
) -> tuple[Any, ...]:
    """Arguments of `verify_step` for a full batch of zeros, to be traced under a fake mode.

    Args:
        target: the model.
        verifier: what verifies, and the buffer to build into or None.
        max_bs: B.
        device: of the batch.
    """
    n, context = verifier.shape.num_draft_tokens, verifier.shape.max_context_len
    rows = torch.zeros(max_bs, n, dtype=torch.int64, device=device)
    cache = target.allocate(max_bs, context, n)
    lengths = torch.zeros(max_bs, dtype=torch.int64, device=device)
    batch = (rows, rows.clone(), lengths.clone(), lengths, verifier.shape, verifier.buffer)
    coins = None if verifier.shape.sampling is None else (rows.float(), lengths.float())
    return (target, cache, verifier.backend, *batch, coins)


def _check_config(backend: AttentionBackend, config: VerifyConfig) -> None:
    """Require a back end that was made for these trees and this context, or a longer one."""
    made = backend.config
    asked, got = ((c.topk, c.num_draft_tokens) for c in (config, made))
    if asked != got or made.max_context_len < config.max_context_len:
        raise ValueError(f"backend must be made for {config}, got {backend.name!r} for {made}")


def _check_mask(
    owner: AttentionBackend, plan: MaskPlan, max_bs: int, config: VerifyConfig
) -> None:
    """Require a mask in the planned layout that every batch fits, and that nobody has to cut."""
    mask = owner.verify_mask
    if mask is None:
        raise ValueError(f"backend must own a verify mask, got {owner.name!r}, which owns none")
    if mask.mode is not plan.mode or not mask.fits(max_bs, config.num_draft_tokens):
        raise ValueError(
            f"backend must own a {plan.mode.name} for {max_bs} requests of "
            f"{config.num_draft_tokens} nodes, got {owner.name!r} with a {mask.mode.name} of "
            f"{mask.buffer.numel()} elements"
        )
    if isinstance(owner, TboAttnBackend) and mask.mode is TreeMaskMode.FULL_MASK:
        raise ValueError(
            f"backend must read a compact mask to run {owner.name!r} in a compiled step: a "
            "FULL_MASK is cut at lengths that only the host knows"
        )


def _check_kinds(target: TargetModel, backend: AttentionBackend) -> None:
    needed, held = (", ".join(sorted(x.layer_kinds)) for x in (target, backend))
    if target.layer_kinds - backend.layer_kinds:
        raise ValueError(
            f"backend must attend in {needed} layers for this model, got {backend.name!r}, "
            f"which attends in {held}"
        )
