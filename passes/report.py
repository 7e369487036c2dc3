"""What the passes say of every mask they find: a verdict with a stable reason code."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode

__all__ = ["REASONS", "MaskReport", "ReaderReport", "Reason", "ReasonText"]


class Reason(StrEnum):
    """Why a mask has the layout it has. Codes are stable: tools and tests may rely on them."""

    ELIDED = "ELIDED"
    COMPACTED = "COMPACTED"
    CAUSAL_CHAIN = "CAUSAL_CHAIN"
    PREFIX_SKIPPED = "PREFIX_SKIPPED"
    ALREADY_COMPACT = "ALREADY_COMPACT"
    FULL_READ = "FULL_READ"
    NO_CONTRACT = "NO_CONTRACT"
    VIEWED = "VIEWED"
    RETURNED = "RETURNED"
    HIGHER_ORDER = "HIGHER_ORDER"
    OTHER_WRITE = "OTHER_WRITE"
    SHAPE_READ = "SHAPE_READ"
    NO_MODE_ARG = "NO_MODE_ARG"
    MODE_NOT_TAKEN = "MODE_NOT_TAKEN"
    MODE_SHARED = "MODE_SHARED"
    TREE_BLOCK_READ = "TREE_BLOCK_READ"
    NO_CHAIN = "NO_CHAIN"
    GRAPH_INPUT = "GRAPH_INPUT"
    NOT_AN_ALLOC = "NOT_AN_ALLOC"
    BUILT_THROUGH_VIEW = "BUILT_THROUGH_VIEW"
    NOT_FUNCTIONAL = "NOT_FUNCTIONAL"
    MODE_MISMATCH = "MODE_MISMATCH"
    CAPACITY = "CAPACITY"
    BUILDS_DIFFER = "BUILDS_DIFFER"
    LENGTHS_DIFFER = "LENGTHS_DIFFER"
    NODES_DIFFER = "NODES_DIFFER"
    DISABLED = "DISABLED"
    PASS_OFF = "PASS_OFF"  # noqa: S105 - a code, not a password


class ReasonText(msgspec.Struct, frozen=True):
    """What a reason code means and what a user can do about it."""

    meaning: str
    remedy: str


REASONS: dict[Reason, ReasonText] = {
    Reason.ELIDED: ReasonText(
        "nothing reads the mask: the allocation and every build of it are QLEN_ONLY", "none needed"
    ),
    Reason.COMPACTED: ReasonText(
        "every reader reads the tree block alone and was told the compact mode", "none needed"
    ),
    Reason.CAUSAL_CHAIN: ReasonText(
        "every tree has topk = 1: readers were told that it is a chain and take no mask. It is "
        "one if the drafts are well-formed, which is assumed",
        "leave CausalChains out of the passes if drafts may be malformed",
    ),
    Reason.PREFIX_SKIPPED: ReasonText(
        "the mask stays FULL_MASK and nobody reads its prefix columns: builds do not fill them",
        "give the reader that only takes FULL_MASK a mode argument",
    ),
    Reason.ALREADY_COMPACT: ReasonText(
        "the mask was declared in a compact mode; only FULL_MASK is shrunk", "none needed"
    ),
    Reason.FULL_READ: ReasonText(
        "a reader's contract says that it reads the prefix columns",
        "use a reader of the tree block, or keep the full mask",
    ),
    Reason.NO_CONTRACT: ReasonText(
        "an op without a contract uses the mask, so all of it counts as read",
        "register_mask_reader says what an op reads",
    ),
    Reason.VIEWED: ReasonText(
        "an aten op takes the mask (a view, a copy, a sum, ...), so all of it counts as read",
        "give the mask itself to readers that have a contract, and to nothing else",
    ),
    Reason.RETURNED: ReasonText(
        "the mask leaves the graph, as a result or over a graph break",
        "keep allocation, build and readers inside one graph (fullgraph=True); where layers are "
        "compiled one by one, plan_verify_mask finds the layout: create the buffer in that",
    ),
    Reason.HIGHER_ORDER: ReasonText(
        "the mask goes into a higher-order op (cond, scan, ...) whose body may read it",
        "allocate, build and read the mask inside one branch, or outside",
    ),
    Reason.OTHER_WRITE: ReasonText(
        "an op other than a build writes the mask in place", "let only builds write the mask"
    ),
    Reason.SHAPE_READ: ReasonText(
        "an op takes its size from the mask (zeros_like and the like)",
        "give the size as numbers",
    ),
    Reason.NO_MODE_ARG: ReasonText(
        "a reader of the tree block has no mode argument, so it only understands FULL_MASK",
        "give the op a mode argument and name it in its contract (mode_arg)",
    ),
    Reason.MODE_NOT_TAKEN: ReasonText(
        "a reader's contract does not list the compact mode",
        "list the modes the op takes in its contract (modes)",
    ),
    Reason.MODE_SHARED: ReasonText(
        "one mode argument of a reader speaks for several masks, which may differ",
        "give the op a mode argument for each mask",
    ),
    Reason.TREE_BLOCK_READ: ReasonText(
        "the tree block is read, and the pass that compacts such masks is not selected",
        "select CompactTreeBlockReaders",
    ),
    Reason.NO_CHAIN: ReasonText(
        "no reader with a causal argument takes a mask built with topk = 1", "none needed"
    ),
    Reason.GRAPH_INPUT: ReasonText(
        "the mask is an input of the graph: its buffer exists already",
        "plan_verify_mask finds the layout that its readers need: create the buffer in that",
    ),
    Reason.NOT_AN_ALLOC: ReasonText(
        "the first build writes a tensor that alloc_verify_mask did not make, or that was "
        "changed before the build",
        "allocate with alloc_verify_mask and build right into it",
    ),
    Reason.BUILT_THROUGH_VIEW: ReasonText(
        "a build writes a slice or another view of the mask",
        "give the build the whole buffer; it need not be full",
    ),
    Reason.NOT_FUNCTIONAL: ReasonText(
        "the build mutates the mask in place in this graph, so its readers cannot be told apart",
        "run the passes on a functional graph, as backend='torchvm' does",
    ),
    Reason.MODE_MISMATCH: ReasonText(
        "the allocation, the builds and the readers do not name the same mode",
        "pass one mode everywhere",
    ),
    Reason.CAPACITY: ReasonText(
        "the allocation's bs or num_draft_tokens is not provably as large as a build's, "
        "so the compact buffer could be too small",
        "allocate for the batch and the draft tokens that are built",
    ),
    Reason.BUILDS_DIFFER: ReasonText(
        "the mask is read and its builds differ in batch or num_draft_tokens, so what is left "
        "of an earlier build lies elsewhere in another layout",
        "use one mask per batch",
    ),
    Reason.LENGTHS_DIFFER: ReasonText(
        "a reader of the tree block is given other seq_lens than the build, so it looks at "
        "other cells in FULL_MASK than in a compact layout",
        "give build and reader the same seq_lens",
    ),
    Reason.NODES_DIFFER: ReasonText(
        "a reader of the tree block is given another num_draft_tokens than the build, so it "
        "looks at other cells in FULL_MASK than in a compact layout",
        "give build and reader the same num_draft_tokens",
    ),
    Reason.DISABLED: ReasonText(
        "TORCHVM_DISABLE is set: nothing was rewritten", "unset TORCHVM_DISABLE"
    ),
    Reason.PASS_OFF: ReasonText(
        "no selected pass applies to this mask", "select the pass that does"
    ),
}


class ReaderReport(msgspec.Struct, frozen=True):
    """One use of a mask: the op, how much it reads, the user's `file:line`, and the node."""

    op: str
    reads: MaskRead
    source: str
    node: str = ""


class MaskReport(msgspec.Struct, frozen=True):
    """What became of one mask of one compiled graph.

    Bytes are numbers, or expressions over the graph's symbols where sizes are dynamic.
    """

    name: str
    """Name of the node that makes the mask."""
    source: str
    """The user's `file:line` that made it, "" when unknown."""
    declared_mode: TreeMaskMode
    final_mode: TreeMaskMode
    declared_bytes: int | str
    final_bytes: int | str
    verdict: Reason
    readers: tuple[ReaderReport, ...]
    copied: bool | None = None
    """Whether a build of the graph that runs writes into a copy of the whole mask; None where
    that graph was not looked at."""

    @property
    def change(self) -> str:
        """Mode and bytes as declared, and as they became if that differs."""
        declared = f"{self.declared_mode.name} {self.declared_bytes} B"
        final = f"{self.final_mode.name} {self.final_bytes} B"
        return declared if declared == final else f"{declared} -> {final}"

    def __str__(self) -> str:
        """One line: name, place, layouts, bytes, verdict, readers."""
        readers = ", ".join(f"{r.op} ({r.reads.name})" for r in self.readers) or "none"
        place = f" at {self.source}" if self.source else ""
        copied = ", copied before a build" if self.copied else ""
        return f"{self.name}{place}: {self.change}: {self.verdict} (readers: {readers}){copied}"
