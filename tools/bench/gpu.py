"""Time the ops on a GPU: builds, the FULL mask beside a refill, verification, selection, a step.

    python -m torchvm.tools.bench.gpu [--json]

Each op is timed eagerly, launch included, and replayed from a CUDA graph, which is what an
engine runs. Rates are of bytes written; the ceiling is a measured copy on the same device. Last
stands a compiled step whose mask nobody reads, captured as declared and as the passes lay it out.
With no GPU it says so in one line and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.compilation import PASS_NAMES, reports
from torchvm.ops.candidates import select_draft_candidates
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, mask_storage
from torchvm.ops.mask import alloc_verify_mask
from torchvm.ops.tree import build_tree, build_tree_from_parents
from torchvm.ops.verify import verify_tree_greedy
from torchvm.passes.report import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Levels", "Row", "Sizes", "beam_search", "main", "rows"]

MIB = 1 << 20


class Sizes(NamedTuple):
    """What is timed."""

    batches: tuple[int, ...] = (1, 32, 256)
    trees: tuple[tuple[int, int, int], ...] = ((4, 2, 2), (16, 4, 3), (64, 8, 5))
    """(n, topk, depth)."""
    context: int = 4096
    large: tuple[int, int, int] = (256, 4, MIB)
    """(requests, n, context) of the mask that is compared with a refill."""


class Row(NamedTuple):
    """One line of the table."""

    op: str
    size: str
    written: int
    """Bytes that have to be written."""
    eager_us: float
    replay_us: float

    @property
    def gb_per_s(self) -> float:
        """Bytes written in a replay, per time."""
        return self.written / self.replay_us / 1e3


class Levels(NamedTuple):
    """What a draft's beam search hands over, one tensor a level."""

    scores: list[Tensor]
    tokens: list[Tensor]
    parents: list[Tensor]


# Microseconds of a call, eagerly and replayed.
Clock = Callable[[Callable[[], object]], tuple[float, float]]


def beam_search(batch: int, topk: int, depth: int, device: torch.device) -> Levels:
    """Draw the levels of a draft whose probabilities are random.

    Returns:
        scores (B, 1, k), then (B, k, k) float32; tokens (B, k), then (B, k * k) int64; parents
        (B, k + 1), then (B, k) int64; on `device`.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.rand(*size, topk, generator=generator).mul(3).softmax(-1)

    def vocabulary(width: int) -> Tensor:
        return torch.randint(32_000, (batch, width), generator=generator)

    scores, tokens = [draw(batch, 1)], [vocabulary(topk)]
    parents = [torch.arange(-1, topk).expand(batch, -1).contiguous()]
    beams = scores[0].flatten(1)
    for level in range(1, depth):
        scores.append(beams[:, :, None] * draw(batch, topk))
        tokens.append(vocabulary(topk * topk))
        best = scores[-1].flatten(1).sort(dim=1, descending=True, stable=True)
        beams = best.values[:, :topk]
        below = topk + topk * topk * (level - 1)
        if level < depth - 1:
            parents.append(best.indices[:, :topk] + below)
        else:
            parents.append(torch.zeros(batch, topk, dtype=torch.int64))
    return Levels(*([tensor.to(device) for tensor in part] for part in (scores, tokens, parents)))


def _builds(
    sizes: Sizes, batch: int, tree: tuple[int, int, int], clock: Clock, device: torch.device
) -> Iterator[Row]:
    n, topk, depth = tree
    size = f"{batch} x {n}"
    levels = beam_search(batch, topk, depth, device)
    picked = select_draft_candidates(*levels, num_draft_tokens=n)
    yield Row(
        "select_draft_candidates", size, picked.selected_index.nbytes + picked.draft_tokens.nbytes,
        *clock(lambda: select_draft_candidates(*levels, num_draft_tokens=n)),
    )  # fmt: skip
    seq_lens = torch.full((batch,), sizes.context, dtype=torch.int64, device=device)
    for mode, fill in (
        (TreeMaskMode.QLEN_ONLY_BITPACKING, False), (TreeMaskMode.QLEN_ONLY, False),
        (TreeMaskMode.FULL_MASK, False), (TreeMaskMode.FULL_MASK, True),
    ):  # fmt: skip
        numel, dtype = mask_storage(mode, batch, n, sizes.context)
        mask = torch.zeros(int(numel), dtype=dtype, device=device)

        def build(mode: int = mode, fill: bool = fill, mask: Tensor = mask) -> tuple[Tensor, ...]:
            return build_tree(
                picked.parent_list, picked.selected_index, seq_lens, mask, topk=topk, depth=depth,
                num_draft_tokens=n, tree_mask_mode=mode, fill_prefix=fill,
            )  # fmt: skip

        cells = int(live_mask_numel(mode, batch, n, batch * sizes.context * fill))
        written = cells + sum(output.nbytes for output in build())
        name = mode.name if mode != TreeMaskMode.FULL_MASK or fill else "FULL_MASK, tree only"
        yield Row(f"build_tree {name}", size, written, *clock(build))
    yield _verification(picked.draft_tokens, build(), size, depth, clock)


def _verification(
    drafts: Tensor, tree: tuple[Tensor, ...], size: str, depth: int, clock: Clock
) -> Row:
    candidates = torch.nn.functional.pad(drafts, (1, 0))
    _, index, token, sibling = tree
    # Every first child is accepted, so that the walk goes as deep as it can.
    target = candidates.gather(1, token.clamp(min=0))

    def verify() -> tuple[Tensor, ...]:
        return verify_tree_greedy(
            candidates, index, token, sibling, target, max_accept=depth + 1
        )  # fmt: skip

    written = sum(output.nbytes for output in verify())
    return Row("verify_tree_greedy", size, written, *clock(verify))


def _large(sizes: Sizes, clock: Clock, device: torch.device) -> Iterator[Row]:
    """The mask that spans whole contexts: its live cells, a refill, a copy."""
    batch, n, context = sizes.large
    size = f"{batch} x {n} x {context:,}"
    numel, _ = mask_storage(TreeMaskMode.FULL_MASK, batch, n, context)
    mask = torch.zeros(int(numel), dtype=torch.bool, device=device)
    parents = torch.arange(-1, n - 1, device=device).expand(batch, -1).contiguous()
    full = torch.full((batch,), context, dtype=torch.int64, device=device)
    one = torch.zeros(batch, dtype=torch.int64, device=device)
    one[0] = min(4096, context)
    for name, lengths in (("every cell live", full), ("one request of 4,096 live", one)):
        cells = int(live_mask_numel(TreeMaskMode.FULL_MASK, batch, n, int(lengths.sum())))

        def build(lengths: Tensor = lengths) -> tuple[Tensor, ...]:
            return build_tree_from_parents(
                parents, lengths, mask,
                num_draft_tokens=n, tree_mask_mode=TreeMaskMode.FULL_MASK,
            )  # fmt: skip

        yield Row(f"FULL_MASK, {name}", size, cells, *clock(build))
    yield Row("refill: mask.fill_(True)", size, mask.nbytes, *clock(lambda: mask.fill_(True)))
    other = torch.empty_like(mask)
    yield Row("copy of the mask", size, mask.nbytes, *clock(lambda: other.copy_(mask)))


def _steps(sizes: Sizes, clock: Clock, device: torch.device) -> Iterator[Row]:
    """Build and verification in one compiled step, with the mask kept FULL and elided.

    Raises:
        RuntimeError: when the two do not give the same results, or the mask was not elided.
    """
    batch, n, context = sizes.large

    def step(tokens: Tensor, parents: Tensor, seq_lens: Tensor, target: Tensor) -> tuple[Any, ...]:
        mask = alloc_verify_mask(batch, n, context, TreeMaskMode.FULL_MASK, device=device)
        positions, index, token, sibling = build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=n, tree_mask_mode=TreeMaskMode.FULL_MASK
        )
        return positions, *verify_tree_greedy(tokens, index, token, sibling, target, max_accept=n)

    tokens = torch.arange(batch * n, device=device).view(batch, n)
    parents = torch.arange(-1, n - 1, device=device).expand(batch, -1).contiguous()
    seq_lens = torch.full((batch,), context, dtype=torch.int64, device=device)
    inputs = (tokens, parents, seq_lens, tokens + 1)
    inner = "inductor" if device.type == "cuda" else "aot_eager"
    results, verdicts = [], []
    for name, passes in (("as declared", ()), ("as the passes lay it out", PASS_NAMES)):
        torch._dynamo.reset()
        options: dict[str, Any] = {"inner": inner, "passes": passes}
        compiled = torch.compile(
            step, backend="torchvm", fullgraph=True, dynamic=False, options=options
        )
        results.append(tuple(output.clone() for output in compiled(*inputs)))
        report = reports()[-1]
        verdicts.append(report.verdict)
        written = n * batch * n + int(passes == ()) * n * int(seq_lens.sum())
        written += sum(output.nbytes for output in results[0])
        size = f"{batch} x {n} x {context:,}"
        yield Row(f"step, mask {name}", size, written, *clock(partial(compiled, *inputs)))
    if not all(map(torch.equal, *results)) or verdicts != [Reason.PASS_OFF, Reason.ELIDED]:
        raise RuntimeError(f"the steps must agree and the second elide its mask, got {verdicts}")


def rows(sizes: Sizes, clock: Clock, device: torch.device) -> Iterator[Row]:
    """Every line of the table, as it is measured."""
    for tree in sizes.trees:
        for batch in sizes.batches:
            yield from _builds(sizes, batch, tree, clock, device)
    yield from _large(sizes, clock, device)
    yield from _steps(sizes, clock, device)


def _median_us(call: Callable[[], object], calls: int) -> float:
    """Device time of one of `calls` calls in a row, the median of several such rows."""
    times: list[float] = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / calls)
    return statistics.median(times)


def cuda_clock(call: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of an eager call and of the same call inside a replayed graph."""
    captured = 20
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    eager = _median_us(call, 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(captured):
            call()
    graph.replay()
    return eager, _median_us(graph.replay, 3) / captured


def _print(measured: Iterator[Row]) -> list[Row]:
    line = "{:<36} {:<20} {:>14} {:>10} {:>10} {:>8}"
    print(line.format("op", "size", "bytes written", "eager us", "replay us", "GB/s"))
    kept = []
    for row in measured:
        cells = (f"{row.written:,}", f"{row.eager_us:.1f}", f"{row.replay_us:.2f}")
        print(line.format(row.op, row.size, *cells, f"{row.gb_per_s:.1f}"), flush=True)
        kept.append(row)
    return kept


def _conclusion(measured: list[Row]) -> str:
    """How the FULL write stands beside the refill and the copy, which also reads; the steps."""
    live, _, refill, copy, kept, elided = measured[-6:]
    return (
        f"step {kept.size}: {kept.replay_us:.1f} us with the FULL mask, {elided.replay_us:.1f} us "
        f"without it, {kept.replay_us / elided.replay_us:.2f} x\n"
        f"FULL_MASK {live.size}: {live.gb_per_s / refill.gb_per_s:.2f} of the refill's rate; "
        f"a copy moves {2 * copy.gb_per_s:.0f} GB/s, read and written, "
        f"of which the FULL write reaches {live.gb_per_s / copy.gb_per_s / 2:.2f}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure on the current GPU; exit code 2 where there is none."""
    parser = argparse.ArgumentParser(prog="python -m torchvm.tools.bench.gpu")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    as_json = parser.parse_args(arguments).json
    if not torch.cuda.is_available():
        print("no GPU that this PyTorch build can use: nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    measured = rows(Sizes(), cuda_clock, device)
    if as_json:
        found = [row._asdict() | {"gb_per_s": row.gb_per_s} for row in measured]
        name = torch.cuda.get_device_name(device)
        print(json.dumps({"device": name, "torch": torch.__version__, "rows": found}, indent=1))
    else:
        print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
        print(_conclusion(_print(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
