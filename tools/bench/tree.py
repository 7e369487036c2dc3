"""The tree ops on one CPU thread, beside plain C loops and Python loops over requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.candidates import DraftCandidates, select_draft_candidates
from torchvm.ops.layout import TreeMaskMode, live_mask_numel
from torchvm.ops.tree import DraftTree, build_tree
from torchvm.ops.verify import Verification, verify_tree_greedy
from torchvm.tools.bench import loops
from torchvm.tools.bench.floor import FloorCall, has_compiler
from torchvm.tools.bench.gpu import beam_search
from torchvm.tools.bench.measure import Case, Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["TITLE", "Batch", "Sizes", "build_floor", "cases", "make_batch"]

TITLE = "tree: draft trees built, selected and verified; sizes are requests x n"
NOTES = (
    "C loop: cc -O3 -march=native, timed inside C, inputs joined and outputs allocated before"
    if has_compiler()
    else "the C loops are left out: there is no C compiler (cc)",
    "Python loop: one request after another; its results are the reference",
)
MODES = (TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK)
_CPU = torch.device("cpu")


class Sizes(NamedTuple):
    """What is timed."""

    batches: tuple[int, ...] = (1, 32, 256)
    trees: tuple[tuple[int, int, int], ...] = ((4, 2, 2), (16, 4, 3), (64, 8, 5))
    """(n, topk, depth)."""
    context: int = 4096


SIZES = Sizes()
QUICK = Sizes((2,), ((4, 2, 2), (16, 4, 3)), 40)


class Batch(NamedTuple):
    """Drafts of some requests, and a mask for their trees."""

    mode: TreeMaskMode
    n: int
    topk: int
    depth: int
    drafts: DraftCandidates
    seq_lens: Tensor
    """(B,) int64."""
    mask: Tensor
    """1-D bool."""

    def build(self) -> DraftTree:
        """Call the Python function."""
        return build_tree(
            self.drafts.parent_list, self.drafts.selected_index, self.seq_lens, self.mask,
            topk=self.topk, depth=self.depth, num_draft_tokens=self.n, tree_mask_mode=self.mode,
        )  # fmt: skip

    def op(self) -> tuple[Tensor, ...]:
        """Call the op."""
        found: tuple[Tensor, ...] = torch.ops.torchvm.build_tree.default(
            self.drafts.parent_list, self.drafts.selected_index, self.seq_lens, self.mask,
            self.topk, self.depth, self.n, int(self.mode),
        )  # fmt: skip
        return found

    def python_loop(self) -> DraftTree:
        """Call the Python loop."""
        drafts, full = self.drafts, self.mode is TreeMaskMode.FULL_MASK
        return loops.build(
            drafts.parent_list, drafts.selected_index, self.seq_lens, self.mask,
            topk=self.topk, num_draft_tokens=self.n, full=full,
        )  # fmt: skip

    def poisoned(self) -> Batch:
        """The same with a mask that no tree can leave as it is."""
        mask = torch.full_like(self.mask, fill_value=2, dtype=torch.uint8)
        return self._replace(mask=mask.view(torch.bool))


def make_batch(mode: TreeMaskMode, batch: int, tree: tuple[int, int, int], context: int) -> Batch:
    """Draw drafts whose probabilities are random, and a mask of just their size."""
    n, topk, depth = tree
    levels = beam_search(batch, topk, depth, _CPU)
    drafts = select_draft_candidates(*levels, num_draft_tokens=n)
    seq_lens = torch.full((batch,), context, dtype=torch.int64)
    mask = torch.zeros(int(live_mask_numel(mode, batch, n, batch * context)), dtype=torch.bool)
    return Batch(mode, n, topk, depth, drafts, seq_lens, mask)


def build_floor(batch: Batch) -> tuple[FloorCall, DraftTree]:
    """Make a call of the C loop, and the outputs that it writes beside the mask."""
    outputs = DraftTree(*(torch.full_like(part, -7) for part in batch.build()))
    sizes = (batch.mask.numel(), batch.seq_lens.shape[0], batch.n, batch.topk, batch.depth)
    return FloorCall(
        "build", batch.drafts.parent_list, batch.drafts.selected_index, batch.seq_lens, batch.mask,
        *sizes, int(batch.mode is TreeMaskMode.FULL_MASK), *outputs,
    ), outputs  # fmt: skip


def cases(sizes: Sizes = SIZES) -> Iterator[Case]:
    """Every op in every size."""
    each = [(batch, tree) for tree in sizes.trees for batch in sizes.batches]
    for mode in MODES:
        for batch, tree in each:
            yield build_case(make_batch(mode, batch, tree, sizes.context))
    for make in (select_case, verify_case):
        for batch, tree in each:
            yield make(batch, tree)


def build_case(batch: Batch) -> Case:
    """Compare outputs and masks, and time builds into one mask."""

    def results(call: Callable[[Batch], Any]) -> Callable[[], Any]:
        def find() -> Any:
            own = batch.poisoned()
            return [*call(own), own.mask.view(torch.uint8)]

        return find

    def floor_results(own: Batch) -> DraftTree:
        call, outputs = build_floor(own)
        own.mask.view(torch.uint8).fill_(2)
        call()
        return outputs

    contenders = [
        Contender("op", batch.op, results(Batch.op)),
        Contender("function", batch.build, results(Batch.build)),
        Contender("Python loop", batch.python_loop, results(Batch.python_loop)),
    ]
    if has_compiler():
        floor, _ = build_floor(batch)
        contenders.append(Contender("C loop", floor, results(floor_results), floor.sample_us))
    return Case(
        f"build_tree {batch.mode.name}", f"{batch.seq_lens.shape[0]} x {batch.n}",
        tuple(contenders), results(Batch.python_loop), "the Python loop",
    )  # fmt: skip


def select_case(batch: int, tree: tuple[int, int, int]) -> Case:
    """The selection beside topk and sort of joined scores, which leave the order of ties open."""
    n, topk, depth = tree
    levels = beam_search(batch, topk, depth, _CPU)
    scores = torch.cat([level.flatten(1) for level in levels.scores], dim=1)
    tokens = torch.cat(levels.tokens, dim=1)

    def select() -> tuple[Tensor, Tensor]:
        found = select_draft_candidates(*levels, num_draft_tokens=n)
        return found.selected_index, found.draft_tokens

    def sort() -> tuple[Tensor, Tensor]:
        ids = torch.topk(scores, n - 1, dim=1).indices.sort(dim=1).values
        return ids, tokens.gather(1, ids)

    def python_loop() -> tuple[Tensor, Tensor]:
        return loops.select(scores, tokens, n - 1)

    contenders = [
        Contender("function", select, select),
        Contender("topk + sort", sort, sort),
        Contender("Python loop", python_loop, python_loop),
    ]
    if has_compiler():
        contenders.append(_select_floor(scores, tokens, n - 1))
    return Case(
        "select_draft_candidates", f"{batch} x {n}", tuple(contenders), python_loop,
        "the Python loop",
    )  # fmt: skip


def _select_floor(scores: Tensor, tokens: Tensor, count: int) -> Contender:
    batch, candidates = scores.shape
    outputs = [tokens.new_full((batch, count), -7) for _ in range(2)]
    call = FloorCall("select_best", scores, tokens, batch, candidates, count, *outputs)

    def results() -> list[Tensor]:
        call()
        return outputs

    return Contender("C loop", call, results, call.sample_us)


def verify_case(batch: int, tree: tuple[int, int, int]) -> Case:
    """Verify drafts of which the target agrees with the first child of every node."""
    n, _, depth = tree
    built = make_batch(TreeMaskMode.QLEN_ONLY, batch, tree, 0)
    _, index, token, sibling = built.build()
    candidates = torch.nn.functional.pad(built.drafts.draft_tokens, (1, 0))
    target = candidates.gather(1, token.clamp(min=0))
    inputs = (candidates, index, token, sibling, target)

    def function() -> Verification:
        return verify_tree_greedy(*inputs, max_accept=depth + 1)

    def op() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.torchvm.verify_tree_greedy.default(
            *inputs, depth + 1
        )
        return found

    def python_loop() -> Verification:
        return loops.verify(*inputs, max_accept=depth + 1)

    contenders = [
        Contender("op", op, op),
        Contender("function", function, function),
        Contender("Python loop", python_loop, python_loop),
    ]
    if has_compiler():
        outputs = [torch.full_like(part, -7) for part in function()]
        call = FloorCall("verify", *inputs, batch, n, depth + 1, *outputs)

        def results() -> list[Tensor]:
            call()
            return outputs

        contenders.append(Contender("C loop", call, results, call.sample_us))
    return Case(
        "verify_tree_greedy", f"{batch} x {n}", tuple(contenders), python_loop, "the Python loop"
    )
