"""Decide the layout of a mask that is a graph input: from the graph, before it is allocated."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torchvm.errors import MaskContractError
from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode, mask_storage
from torchvm.passes.capture_check import CaptureFinding, check_capture
from torchvm.passes.liveness import Mask, follow_mask
from torchvm.passes.report import MaskReport, ReaderReport, Reason
from torchvm.passes.requirements import smallest_mode
from torchvm.tracing import TracedModule, fake_mode, trace
from torchvm.verify_mask import VerifyMask, maybe_create_verify_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["MaskPlan", "plan_verify_mask"]


class MaskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that a traced forward allows, and the buffer's capacity.

    It speaks for the graphs that were traced. Every other user of the buffer, an eager one or a
    second model, has to be planned too, and the larger layout of the two taken.
    """

    mode: TreeMaskMode
    """What the buffer may be; give the same mode to the forward's readers and to builds."""
    is_read: bool
    nbytes: int
    verdict: Reason
    """ELIDED, COMPACTED, or why the mask stays FULL_MASK."""
    readers: tuple[ReaderReport, ...]
    max_bs: int
    num_draft_tokens: int
    max_context_len: int
    device: torch.device
    dtype: torch.dtype
    capture: tuple[CaptureFinding, ...] = ()
    """What in the traced graphs stands against a CUDA graph. Inputs that a graph writes are among
    it unless somebody promises that they stay where they are."""

    def create(self) -> VerifyMask:
        """Allocate the buffer as planned."""
        mask = maybe_create_verify_mask(
            is_draft_runner=False,
            skip_prefill=False,
            max_bs=self.max_bs,
            max_context_len=self.max_context_len,
            num_draft_tokens=self.num_draft_tokens,
            device=self.device,
            is_read=self.is_read,
            dtype=self.dtype,
            mode=self.mode,
        )
        assert mask is not None
        return mask

    def report(self) -> MaskReport:
        """The plan as the report of a mask that was declared FULL_MASK."""
        declared, _ = mask_storage(
            TreeMaskMode.FULL_MASK, self.max_bs, self.num_draft_tokens, self.max_context_len
        )
        return MaskReport(
            name="verify_mask",
            source="",
            declared_mode=TreeMaskMode.FULL_MASK,
            final_mode=self.mode,
            declared_bytes=int(declared),
            final_bytes=self.nbytes,
            verdict=self.verdict,
            readers=self.readers,
        )

    def __str__(self) -> str:
        """One line: mode, bytes, verdict, readers."""
        readers = ", ".join(f"{r.op} ({r.reads.name})" for r in self.readers) or "none"
        return f"{self.mode.name} {self.nbytes} B: {self.verdict} (readers: {readers})"


def plan_verify_mask(
    forward: Callable[..., Any],
    make_inputs: Callable[[Tensor], tuple[Sequence[Any], dict[str, Any]]],
    *,
    max_bs: int,
    num_draft_tokens: int,
    max_context_len: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bool,
    declared_is_read: bool | None = None,
) -> MaskPlan:
    """Trace a forward with a FULL_MASK that is never allocated, and see who reads it.

    Args:
        forward: the target model's verify forward; it must compile to one graph.
        make_inputs: is called once, under the fake mode, with the 1-D fake mask of
            `max_bs * n * (max_context_len + n)` elements, and returns (args, kwargs). Tensors
            that it makes cost nothing.
        max_bs: most requests in a batch, padding included.
        num_draft_tokens: n, draft tokens per request, root included.
        max_context_len: most committed tokens of a request.
        device: where the buffer will live. A build of torch without CUDA traces with CPU fakes,
            whatever this says.
        dtype: torch.bool or torch.uint8.
        declared_is_read: what the back end says of itself, to be checked.

    Raises:
        MaskContractError: when `declared_is_read` is False and the graph reads the mask.
        ValueError: for sizes or a dtype that no mask can have.

    Warns:
        UserWarning: when `declared_is_read` is True and nothing reads the mask.
    """
    for name, size, least in (
        ("max_bs", max_bs, 1),
        ("num_draft_tokens", num_draft_tokens, 1),
        ("max_context_len", max_context_len, 0),
    ):
        if size < least:
            raise ValueError(f"{name} must be >= {least}, got {size}")
    target = torch.device(device)
    traced_device = target if target.type == "cpu" or torch.version.cuda else torch.device("cpu")
    numel, dtype = mask_storage(
        TreeMaskMode.FULL_MASK, max_bs, num_draft_tokens, max_context_len, dtype
    )
    mode = fake_mode()
    with mode:
        mask = torch.empty(numel, dtype=dtype, device=traced_device)
        args, kwargs = make_inputs(mask)
    traced = trace(forward, args, kwargs, mode=mode, fullgraph=True)
    masks = [found for module in traced for found in _uses_of(mask, module)]
    readers = tuple(reader for found in masks for reader in found.readers())
    plan_mode, verdict = smallest_mode(masks, max_bs, num_draft_tokens)
    nbytes, _ = mask_storage(plan_mode, max_bs, num_draft_tokens, max_context_len)
    plan = MaskPlan(
        mode=plan_mode,
        is_read=any(reader.reads > MaskRead.NOTHING for reader in readers),
        nbytes=int(nbytes),
        verdict=verdict,
        readers=readers,
        max_bs=max_bs,
        num_draft_tokens=num_draft_tokens,
        max_context_len=max_context_len,
        device=target,
        dtype=dtype,
        capture=tuple(finding for module in traced for finding in check_capture(module.module)),
    )
    if declared_is_read is not None:
        _check_declaration(plan, int(numel), declared=declared_is_read)
    return plan


def _uses_of(mask: Tensor, traced: TracedModule) -> list[Mask]:
    """Follow the mask from every input of a graph that may be it."""
    graph = traced.module.graph
    placeholders = graph.find_nodes(op="placeholder")
    named = [node for node, tensor in traced.inputs.items() if tensor is mask]
    if traced.inputs or not placeholders:
        return [follow_mask(graph, node) for node in named]
    alike = [n for n in placeholders if _looks_like(n.meta.get("val"), mask)]
    return [follow_mask(graph, node) for node in alike]


def _looks_like(value: Any, mask: Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.shape == mask.shape and value.dtype == mask.dtype
    )


def _check_declaration(plan: MaskPlan, full_bytes: int, *, declared: bool) -> None:
    if plan.is_read and not declared:
        reader = next(r for r in plan.readers if r.reads > MaskRead.NOTHING)
        place = f" at {reader.source}" if reader.source else ""
        raise MaskContractError(
            f"is_read must be True: it is declared False, and {reader.op} "
            f"(node {reader.node}){place} reads the mask ({reader.reads.name})"
        )
    if declared and not plan.is_read:
        warnings.warn(
            f"is_read is declared True and nothing in the graph reads the mask: declaring it "
            f"False saves {full_bytes - plan.nbytes} bytes of a FULL_MASK",
            UserWarning,
            stacklevel=3,
        )
