"""Everything that `import torchvm` offers."""

import torchvm.ops.external_contracts  # noqa: F401 - registers the contracts
from torchvm import testing
from torchvm.compilation import clear_reports, inductor_options, reports, torchvm_backend
from torchvm.errors import CaptureError, MaskContractError, TorchvmError
from torchvm.explanation import Explanation, MaskExplanation, explain
from torchvm.exporting import compact
from torchvm.ops.attention import tree_attention
from torchvm.ops.candidates import DraftCandidates, select_draft_candidates
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mask_numel
from torchvm.ops.linear_attention import GatedDeltaTree, gated_delta_tree
from torchvm.ops.mask import alloc_verify_mask, mask_convert
from torchvm.ops.mla_attention import mla_attention
from torchvm.ops.packed_attention import packed_attention
from torchvm.ops.packed_mask import PackedMask, pack_mask_bits
from torchvm.ops.paged_attention import merge_attention, paged_attention
from torchvm.ops.sampling import verify_tree_sampling
from torchvm.ops.sparse_attention import sparse_window_attention
from torchvm.ops.tree import DraftTree, build_tree, build_tree_from_parents
from torchvm.ops.tree_pages import expand_tree_pages
from torchvm.ops.unified_attention import unified_attention
from torchvm.ops.verify import Verification, verify_tree_greedy
from torchvm.passes.capture_check import CaptureCode, CaptureFinding, check_capture
from torchvm.passes.report import MaskReport, Reason
from torchvm.planning import MaskPlan, plan_verify_mask
from torchvm.sampling import SamplingParams, sampling_probs
from torchvm.verify_mask import (
    BatchMask,
    MaskSource,
    VerifyMask,
    default_tree_mask_mode,
    mask_for_batch,
    maybe_create_verify_mask,
)

__all__ = [
    "BatchMask",
    "CaptureCode",
    "CaptureError",
    "CaptureFinding",
    "DraftCandidates",
    "DraftTree",
    "Explanation",
    "GatedDeltaTree",
    "MaskContractError",
    "MaskExplanation",
    "MaskPlan",
    "MaskRead",
    "MaskReport",
    "MaskSource",
    "PackedMask",
    "Reason",
    "SamplingParams",
    "TorchvmError",
    "TreeMaskMode",
    "Verification",
    "VerifyMask",
    "alloc_verify_mask",
    "build_tree",
    "build_tree_from_parents",
    "check_capture",
    "clear_reports",
    "compact",
    "default_tree_mask_mode",
    "expand_tree_pages",
    "explain",
    "gated_delta_tree",
    "inductor_options",
    "mask_convert",
    "mask_for_batch",
    "mask_storage",
    "maybe_create_verify_mask",
    "merge_attention",
    "mla_attention",
    "pack_mask_bits",
    "packed_attention",
    "paged_attention",
    "plan_verify_mask",
    "register_mask_reader",
    "reports",
    "sampling_probs",
    "select_draft_candidates",
    "sparse_window_attention",
    "testing",
    "torchvm_backend",
    "tree_attention",
    "tree_mask_numel",
    "unified_attention",
    "verify_tree_greedy",
    "verify_tree_sampling",
]
