"""What a graph has against its masks: broken contracts, copies of a whole mask, capture."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import torch
from torch._guards import detect_fake_mode

from torchvm.ops.contracts import MaskRead
from torchvm.passes.capture_check import CAPTURE_CODES, CaptureFinding
from torchvm.passes.clone_check import COPY_CODES, CopyCode, MaskCopy, verify_no_clone
from torchvm.passes.graph import source_line
from torchvm.passes.hoist_mask_readers import HoistMaskReaders
from torchvm.passes.keep_copies import KeepCopies
from torchvm.passes.liveness import find_builds
from torchvm.passes.report import REASONS, Reason, ReasonText
from torchvm.passes.requirements import batch_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import GraphModule, Node

    from torchvm.passes.liveness import Mask, Use

__all__ = ["Finding", "FindingKind", "clone_findings", "contract_findings", "from_capture"]


class FindingKind(StrEnum):
    """What a finding is about."""

    contract = "contract"
    clone = "clone"
    capture = "capture"


class Finding(msgspec.Struct, frozen=True):
    """One thing to be put right."""

    kind: FindingKind
    code: str
    """A `Reason` for contracts, a `CopyCode` for clones, or a `CaptureCode`."""
    node: str
    op: str
    source: str
    """The user's `file:line`, "" when unknown."""
    meaning: str
    remedy: str

    def __str__(self) -> str:
        """One line: kind, code, node, place, meaning, remedy."""
        place = f" at {self.source}" if self.source else ""
        what = f"{self.kind} {self.code}: {self.node} ({self.op}){place}"
        return f"{what}: {self.meaning}; {self.remedy}"


def contract_findings(masks: Sequence[Mask]) -> list[Finding]:
    """Find the uses of masks that no contract covers, or that disagree with what was built.

    Args:
        masks: of a functional graph, before the passes.
    """
    return [finding for mask in masks for finding in _of_mask(mask)]


def _of_mask(mask: Mask) -> Iterator[Finding]:
    for use in mask.uses:
        if use.reason is Reason.NO_CONTRACT:
            yield _broken(Reason.NO_CONTRACT, use.node, use.op)
        refusal = batch_refusal(use) if use.reads > MaskRead.NOTHING else None
        if refusal is not None:
            yield _broken(refusal, use.node, use.op)
    odd = next((use for use in mask.uses if _is_told_otherwise(use, mask)), None)
    if odd is not None:
        yield _broken(Reason.MODE_MISMATCH, odd.node, odd.op)
    elif any(build.mode is not mask.mode for build in mask.builds):
        build = next(b for b in mask.builds if b.mode is not mask.mode)
        yield _broken(Reason.MODE_MISMATCH, build.call.node, build.call.name)


def _is_told_otherwise(use: Use, mask: Mask) -> bool:
    """Whether a reader is told another layout than the mask has, as far as both are numbers."""
    knows = isinstance(use.told_mode, int) and (mask.alloc is not None or bool(mask.builds))
    return knows and use.told_mode != mask.mode


def _broken(reason: Reason, node: Node, op: str) -> Finding:
    text = REASONS[reason]
    return Finding(
        FindingKind.contract, str(reason), node.name, op, source_line(node), *_words(text)
    )


def _words(text: ReasonText) -> tuple[str, str]:
    return text.meaning, text.remedy


def from_capture(finding: CaptureFinding) -> Finding:
    """Write a finding of `check_capture` as one of these."""
    meaning = CAPTURE_CODES[finding.code].meaning
    return Finding(
        FindingKind.capture,
        str(finding.code),
        finding.node,
        finding.op,
        finding.source,
        meaning,
        finding.remedy,
    )


def clone_findings(module: GraphModule) -> list[Finding]:
    """Find the copies of whole masks in the graph that Inductor would run.

    Its passes up to the lowering run on the module, which is changed; nothing is compiled.

    Args:
        module: a functional graph that the mask passes have rewritten.
    """
    code = CopyCode.COPIED
    words = _words(COPY_CODES[code])
    return [
        Finding(FindingKind.clone, str(code), copy.copied, copy.build, copy.source, *words)
        for copy in _copies(module)
    ]


def _copies(module: GraphModule) -> list[MaskCopy]:
    if not find_builds(module.graph):
        return []
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    hooks = {
        "joint_custom_pre_pass": KeepCopies(),
        "post_grad_custom_pre_pass": HoistMaskReaders(),
        # Whether padding pays is measured on a device.
        "shape_padding": False,
    }
    with V.set_fake_mode(mode), config.patch(hooks), torch.no_grad():
        lowered = joint_graph_passes(module)
        view_to_reshape(lowered)
        post_grad_passes(lowered, True)
    return verify_no_clone(lowered.graph)
