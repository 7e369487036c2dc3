"""Running verify steps in captured sizes: a bucket, padding, and a replay at stable addresses."""

from __future__ import annotations

import bisect
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.buffers import Fill, PhaseBuffers, Rows, Slot, ledger_row
from torchvm.engine.drafts import UNLINKED
from torchvm.engine.steps import RECOMPILE_LIMIT, verify_step
from torchvm.errors import CaptureError
from torchvm.ops.tree import DraftTree
from torchvm.passes.capture_check import CaptureCode
from torchvm.verify_mask import mask_for_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from torchvm.buffers import LedgerRow
    from torchvm.engine.target import TargetCache, TargetModel
    from torchvm.engine.verifier import Verifier

__all__ = ["Verified", "VerifiedStep", "VerifyRunner", "bucket_sizes", "checked_buckets"]

PHASE = "TARGET_VERIFY"
_MASK = "tree_mask"
_COINS = ("coins", "final_coins")


class Verified(NamedTuple):
    """What one step accepted, of the requests that were given, on the host."""

    tokens: list[list[int]]
    """Per request the token after each accepted node, the root's first."""
    paths: list[list[int]]
    """Per request the accepted nodes below the root."""
    hidden: Tensor | None = None
    """(bucket, n, hidden_size), the target's states of all nodes, where the step gives them. It
    lies where the step left it: the next run, on any bucket, may overwrite it."""


class VerifiedStep(NamedTuple):
    """What one step was given, and what it accepted."""

    tokens: Sequence[Sequence[int]]
    """(B, n), the root first."""
    parents: Sequence[Sequence[int]]
    """(B, n) node indices."""
    seq_lens: Sequence[int]
    slots: Sequence[int]
    """Where each request lies in the cache."""
    found: Verified


def bucket_sizes(max_bs: int) -> tuple[int, ...]:
    """Batch sizes that engines capture: 1, 2, 4, then multiples of 8, and the largest."""
    if max_bs < 1:
        raise ValueError(f"max_bs must be >= 1, got {max_bs}")
    sizes = {1, 2, 4, *range(8, max_bs, 8), max_bs}
    return tuple(sorted(size for size in sizes if size <= max_bs))


def checked_buckets(buckets: Sequence[int] | None, max_bs: int) -> tuple[int, ...]:
    """Return the batch sizes that are captured: `max_bs` alone where none are given.

    Raises:
        ValueError: unless they are ascending sizes in [1, max_bs].
    """
    sizes = (max_bs,) if buckets is None else tuple(buckets)
    if list(sizes) != sorted({b for b in sizes if 1 <= b <= max_bs}) or not sizes:
        raise ValueError(f"buckets must be ascending sizes in [1, {max_bs}], got {sizes}")
    return sizes


class VerifyRunner:
    """Runs the compiled verify step on the smallest bucket that holds the batch.

    On CUDA a bucket is a captured graph; on the CPU it is the compiled function. Both read the
    same buffers, whose addresses are asserted before every replay, and compile nothing more.

    A batch above the largest bucket runs eagerly in buffers of its own, its mask among them, and a
    warning says so once for each such size.

    Args:
        target: the model.
        verifier: its back end, and a mask for the largest bucket.
        step: the compiled `verify_step`.
        max_bs: most requests. The cache has a slot for each, and one more that requests which pad
            a batch write into.
        buckets: batch sizes that are captured; by default `max_bs` alone.

    Raises:
        CaptureError: when the traced step could not be captured: the plan's findings.
        ValueError: for buckets that are not ascending sizes up to `max_bs`, or end below it where
            the step allocates its mask: only a compiled step does so in a small layout.
    """

    def __init__(
        self,
        target: TargetModel,
        verifier: Verifier,
        step: Callable[..., Any],
        *,
        max_bs: int,
        buckets: Sequence[int] | None = None,
    ) -> None:
        buckets = checked_buckets(buckets, max_bs)
        if verifier.buffer is None and buckets[-1] != max_bs:
            raise ValueError(
                f"the last of buckets must be max_bs {max_bs} where the step allocates its mask, "
                f"got {buckets[-1]}"
            )
        _refuse_what_cannot_be_captured(verifier)
        self.target = target
        self.verifier = verifier
        self.max_bs = max_bs
        self.buckets = buckets
        self.buffers = _phase_buffers(verifier, max_bs, buckets[-1], target.device)
        self.on_verified: Callable[[VerifiedStep], None] | None = None
        self._step = step
        self._captured: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
        self._pool: Any = None
        self._addresses = self.buffers.addresses()
        self._cache: TargetCache | None = None
        self._generators = [torch.Generator() for _ in range(max_bs)]
        self.seed()

    def bind(self, cache: TargetCache) -> None:
        """Run on this cache from now on; what was captured on another is forgotten."""
        if cache is not self._cache:
            self._cache = cache
            if self.target.device.type == "cuda":
                self._captured.clear()
                self._pool = None

    def warmup(self) -> None:
        """Compile, and on CUDA capture, every bucket, largest first."""
        for bucket in reversed(self.buckets):
            self.run([], [], [], [], bucket=bucket)

    def ledger(self) -> tuple[LedgerRow, ...]:
        """Who owns how many bytes of the phase, the back end's other buffers included."""
        backend = self.verifier.backend
        held = backend.persistent_buffers.items()
        return (
            *self.buffers.ledger(),
            *(ledger_row(PHASE, name, backend.name, tensor) for name, tensor in held),
        )

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        slots: Sequence[int],
        *,
        bucket: int | None = None,
    ) -> Verified:
        """Verify one tree for each of the given requests.

        Args:
            tokens: (B, n), the root first.
            parents: (B, n) node indices.
            seq_lens: L of each request.
            slots: where each lies in the cache, all different.
            bucket: run on this one rather than the smallest that holds them.

        Raises:
            ValueError: when slots repeat or are none of the cache's, rows are not of n, lengths
                leave the context, or there is no such bucket or too many requests for it.

        Warns:
            UserWarning: once for each batch size above the largest bucket.
        """
        bs = len(seq_lens)
        if self._cache is None:
            raise ValueError("bind must name a cache before run, got none")
        if len(set(slots)) != bs or not set(slots) <= set(range(self.max_bs)):
            raise ValueError(
                f"slots must be {bs} different ones in [0, {self.max_bs}), got {list(slots)}"
            )
        n = self.verifier.shape.num_draft_tokens
        for name, rows in (("tokens", tokens), ("parents", parents)):
            if [len(row) for row in rows] != [n] * bs:
                raise ValueError(f"{name} must be {bs} rows of {n}, got {list(map(len, rows))}")
        limit = self.verifier.shape.max_context_len
        if not all(0 <= length <= limit for length in seq_lens):
            raise ValueError(f"seq_lens must be in [0, {limit}], got {list(seq_lens)}")
        if bucket is not None and (bucket not in self.buckets or bucket < bs):
            raise ValueError(
                f"bucket must be one of {self.buckets} that holds {bs} requests, got {bucket}"
            )
        buffers = self.buffers.for_batch(bs)
        if buffers is not self.buffers:
            bucket = bs
        elif bucket is None:
            bucket = self.buckets[bisect.bisect_left(self.buckets, max(bs, 1))]
        buffers.fill(
            bs,
            bucket,
            tokens=torch.tensor(tokens, dtype=torch.int64).reshape(bs, n),
            parents=torch.tensor(parents, dtype=torch.int64).reshape(bs, n),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            **self._flip_coins(slots),
        )
        if buffers is self.buffers:
            assert buffers.addresses() == self._addresses, "a captured buffer has moved"
            outputs = self._replay(bucket)
        else:
            outputs = self._call(verify_step, buffers, bs)
        predicts, accept_index, accept_num = (output.tolist() for output in outputs[:3])
        found = Verified([], [], *outputs[3:])
        for b in range(bs):
            nodes = accept_index[b][: accept_num[b] + 1]
            found.tokens.append([predicts[node] for node in nodes])
            found.paths.append([node - b * n for node in nodes[1:]])
        if self.on_verified is not None:
            self.on_verified(VerifiedStep(tokens, parents, seq_lens, slots, found))
        return found

    def seed(self, first_request: int = 0) -> None:
        """Begin the coins of a run anew: each slot has its own, whoever is in the others.

        Args:
            first_request: number of the request in slot 0, in all runs of this seed.
        """
        sampling = self.verifier.shape.sampling
        if sampling is not None:
            of_all = torch.Generator().manual_seed(sampling.seed)
            count = first_request + self.max_bs
            seeds = torch.randint(1 << 62, (count,), generator=of_all)[first_request:].tolist()
            for generator, seed in zip(self._generators, seeds, strict=True):
                generator.manual_seed(seed)

    def _flip_coins(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """Uniform numbers, one for each node and one for each request's last token."""
        shape = self.verifier.shape
        if shape.sampling is None:
            return {}
        coins = torch.empty(len(slots), shape.num_draft_tokens + 1)
        for row, slot in zip(coins, slots, strict=True):
            row.uniform_(generator=self._generators[slot])
        return dict(zip(_COINS, (coins[:, 1:], coins[:, 0]), strict=True))

    def _replay(self, bucket: int) -> tuple[Tensor, ...]:
        if bucket not in self._captured:
            with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
                self._captured[bucket], outputs = self._capture(bucket)
            return outputs
        with torch.compiler.set_stance("fail_on_recompile"):
            return self._captured[bucket]()

    def _call(
        self, step: Callable[..., Any], buffers: PhaseBuffers, bs: int
    ) -> tuple[Tensor, ...]:
        """Run a step on the first rows of some buffers."""
        views = {name: buffers.view(name, bs) for name in buffers.addresses()}
        coins = tuple(views[name] for name in _COINS) if _COINS[0] in views else None
        outputs: tuple[Tensor, ...] = step(
            self.target, self._cache, self.verifier.backend, views["tokens"], views["parents"],
            views["slots"], views["seq_lens"], self.verifier.shape, views.get(_MASK), coins,
            DraftTree(*(views[name] for name in DraftTree._fields)),
        )  # fmt: skip
        return outputs

    def _capture(self, bucket: int) -> tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """Return what replays a bucket, and the outputs of its first run."""
        call = partial(self._call, self._step, self.buffers, bucket)
        outputs = call()
        if self.target.device.type != "cuda":
            return call, outputs
        torch.cuda.synchronize(self.target.device)
        graph = torch.cuda.CUDAGraph()
        # Buckets never run side by side: one pool holds what any of them computes.
        with torch.cuda.graph(graph, pool=self._pool):
            captured = call()
        self._pool = graph.pool()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return captured

        return replay, replay()


def _refuse_what_cannot_be_captured(verifier: Verifier) -> None:
    """Raise with the plan's findings, but for written inputs: the runner's never move."""
    if verifier.plan is None:
        return
    findings = [f for f in verifier.plan.capture if f.code is not CaptureCode.MUTATED_INPUT]
    if findings:
        lines = "\n".join(f"  {finding}" for finding in findings)
        raise CaptureError(f"the verify step must be capturable, got\n{lines}")


def _phase_buffers(
    verifier: Verifier, max_bs: int, captured_bs: int, device: torch.device
) -> PhaseBuffers:
    """What a step of up to `captured_bs` requests reads; `max_bs` is the spare slot."""
    n = verifier.shape.num_draft_tokens
    buffers = PhaseBuffers(PHASE, max_bs=captured_bs, num_draft_tokens=n, device=device)
    rows = {
        "tokens": ((n,), 0), "parents": ((n,), UNLINKED), "seq_lens": ((), 0),
        "slots": ((), max_bs),
    }  # fmt: skip
    for name, (trailing, padding) in rows.items():
        buffers.register(
            Slot(
                name=name, owner="runner", rows=Rows.request, dtype=torch.int64,
                trailing=trailing, padding=padding,
            )
        )  # fmt: skip
    for name in DraftTree._fields:
        flat = name == "positions"
        buffers.register(
            Slot(
                name=name, owner="runner", rows=Rows.token if flat else Rows.request,
                dtype=torch.int64, trailing=() if flat else (n,), padding=-1, fill=Fill.in_place,
            )
        )  # fmt: skip
    if verifier.shape.sampling is not None:
        for name, trailing in zip(_COINS, ((n,), ()), strict=True):
            buffers.register(
                Slot(
                    name=name, owner="runner", rows=Rows.request, dtype=torch.float32,
                    trailing=trailing,
                )
            )  # fmt: skip
    buffer = verifier.buffer
    if buffer is not None:
        buffers.register(
            Slot(
                name=_MASK, owner=verifier.backend.name, rows=Rows.token,
                dtype=buffer.dtype, fill=Fill.in_place, make=partial(_mask_of, verifier),
            )
        )  # fmt: skip
    return buffers


def _mask_of(verifier: Verifier, bs: int) -> Tensor:
    """The back end's mask, or one of its layout for more requests."""
    owner, shape = verifier.backend.verify_mask, verifier.shape
    assert owner is not None
    return mask_for_batch(
        owner,
        bs=bs,
        num_draft_tokens=shape.num_draft_tokens,
        max_context_len=shape.max_context_len,
        device=owner.buffer.device,
    ).buffer
