"""Everything that `import torchvm` offers."""

from torchvm.compilation import clear_reports, inductor_options, reports, torchvm_backend
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mask_numel
from torchvm.ops.mask import alloc_verify_mask
from torchvm.passes.report import MaskReport, Reason
from torchvm.verify_mask import VerifyMask, default_tree_mask_mode, maybe_create_verify_mask

__all__ = [
    "MaskRead",
    "MaskReport",
    "Reason",
    "TreeMaskMode",
    "VerifyMask",
    "alloc_verify_mask",
    "clear_reports",
    "default_tree_mask_mode",
    "inductor_options",
    "mask_storage",
    "maybe_create_verify_mask",
    "register_mask_reader",
    "reports",
    "torchvm_backend",
    "tree_mask_numel",
]
