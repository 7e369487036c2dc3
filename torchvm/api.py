"""Everything that `import torchvm` offers."""

from torchvm.compilation import clear_reports, inductor_options, reports
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mask_numel
from torchvm.ops.mask import alloc_verify_mask
from torchvm.passes.report import MaskReport, Reason

__all__ = [
    "MaskRead",
    "MaskReport",
    "Reason",
    "TreeMaskMode",
    "alloc_verify_mask",
    "clear_reports",
    "inductor_options",
    "mask_storage",
    "register_mask_reader",
    "reports",
    "tree_mask_numel",
]
