"""What torchvm generate prints, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from torchvm.engine.check import NEAR_TIE
from torchvm.ops.layout import TreeMaskMode, mask_storage
from torchvm.tools.messages import printable
from torchvm.tools.text_stream import cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchvm.buffers import LedgerRow
    from torchvm.engine.check import Divergence
    from torchvm.engine.decoders import Generation
    from torchvm.passes.report import MaskReport
    from torchvm.sampling import SamplingParams

__all__ = ["Outcome", "as_dict", "as_text"]

# The deployment that the paper figures are for.
_BATCH, _CONTEXT = 256, 1 << 20


class Outcome(NamedTuple):
    """Everything that one run of the command found out."""

    decode: Callable[[list[int]], str]
    """Text of tokens."""
    stop: tuple[str, ...]
    """Strings that end the text, and are no part of it."""
    prompt_tokens: list[int]
    """Of each prompt."""
    batch_size: int
    """Requests that decoded together."""
    drafting: tuple[int, int, int]
    """topk, depth and num_draft_tokens."""
    draft_layers: int | None
    """Layers of the model that drafted; None: by prompt lookup."""
    sampling: SamplingParams | None
    generation: Generation
    compile_seconds: float
    backend: str
    declares_read: bool | None
    """What the back end says of its mask; None when the step allocated the mask."""
    masks: tuple[MaskReport, ...]
    ledger: tuple[LedgerRow, ...]
    """Buffers of the verify phase."""
    plain: Generation | None
    """None when it was not asked for."""
    plain_compile_seconds: float
    divergences: list[Divergence | None]
    """Where each request's tokens first differ from those of plain decoding."""
    inner: str
    threads: int
    context: int

    @property
    def texts(self) -> list[str]:
        """What was generated for each prompt, up to a stop string."""
        return [self.text_of(tokens) for tokens in self.generation.sequences]

    def text_of(self, tokens: list[int]) -> str:
        """Text of a request's new tokens, up to a stop string."""
        return cut(self.decode(tokens), self.stop)

    @property
    def agrees(self) -> bool:
        """Whether plain decoding gave the same tokens, up to near-ties."""
        return all(found is None or found.is_near_tie for found in self.divergences)

    @property
    def speedup(self) -> float | None:
        """Tokens a second over those of plain decoding; None unless it gave the same tokens."""
        if self.plain is None or not self.agrees:
            return None
        return self.generation.tokens_per_second / self.plain.tokens_per_second


def as_text(outcome: Outcome, *, with_text: bool = True) -> str:
    """The generated texts, unless shown already; an empty line, and a table of facts."""
    rows = _facts(outcome)
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    return f"{_texts(outcome)}\n\n{table}" if with_text else f"\n{table}"


def as_dict(outcome: Outcome, *, listed: bool = False) -> dict[str, Any]:
    """The same facts as plain values.

    Args:
        outcome: of a run.
        listed: put what each request has under "requests"; else that of the only one stands
            beside the rest.
    """
    run, plain = outcome.generation, outcome.plain
    topk, depth, num_draft_tokens = outcome.drafting
    requests = [_request_dict(outcome, b) for b in range(len(run.sequences))]
    return {
        **({"requests": requests} if listed else requests[0]),
        "batch_size": outcome.batch_size,
        "topk": topk,
        "depth": depth,
        "num_draft_tokens": num_draft_tokens,
        "draft_layers": outcome.draft_layers,
        "sampling": outcome.sampling and msgspec.structs.asdict(outcome.sampling),
        "steps": run.steps,
        "accepted_per_step": run.accepted_per_step,
        "tokens_per_second": run.tokens_per_second,
        "plain_tokens_per_second": plain and plain.tokens_per_second,
        "speedup": outcome.speedup,
        "prefill_seconds": run.prefill_seconds,
        "compile_seconds": outcome.compile_seconds,
        "plain_compile_seconds": outcome.plain_compile_seconds if plain else None,
        "inner": outcome.inner,
        "threads": outcome.threads,
        "max_context_len": outcome.context,
        "backend": outcome.backend,
        "declares_read": outcome.declares_read,
        "masks": [_mask_dict(mask, num_draft_tokens) for mask in outcome.masks],
        "ledger": [msgspec.structs.asdict(row) for row in outcome.ledger],
    }


def _request_dict(outcome: Outcome, b: int) -> dict[str, Any]:
    """What one request has of its own."""
    tokens, divergence = outcome.generation.sequences[b], outcome.divergences[b]
    return {
        "text": outcome.text_of(tokens),
        "tokens": tokens,
        "prompt_tokens": outcome.prompt_tokens[b],
        "new_tokens": len(tokens),
        "accepted": outcome.generation.accepted[b],
        "equals_plain": None if outcome.plain is None else divergence is None,
        "divergence": _divergence_dict(divergence),
    }


def _texts(outcome: Outcome) -> str:
    """The only text as it is; of several, each below a line with its number."""
    texts = [printable(text) for text in outcome.texts]
    if len(texts) == 1:
        return texts[0]
    parts = [f"--- {b} of {len(texts)} ---\n{text}" for b, text in enumerate(texts, start=1)]
    return "\n\n".join(parts)


def _facts(outcome: Outcome) -> list[tuple[str, str]]:
    run, plain = outcome.generation, outcome.plain
    topk, depth, num_draft_tokens = outcome.drafting
    threads = f"{outcome.threads} thread{'s' if outcome.threads > 1 else ''}"
    layers = outcome.draft_layers
    by = "prompt lookup" if layers is None else f"the first {layers} layer{'s' * (layers > 1)}"
    rows = [
        ("tokens", _token_counts(outcome)),
        ("drafts", f"{by}: topk {topk}, depth {depth}, {num_draft_tokens} nodes a tree"),
        ("steps", f"{run.steps}, accepting {run.accepted_per_step:.2f} drafts each on average"),
        ("speed", f"{run.tokens_per_second:.1f} tokens/s on {threads} ({outcome.inner})"),
    ]
    if plain is not None:
        ratio = outcome.speedup
        beside = "the tokens differ" if ratio is None else f"speculation is {ratio:.2f} x that"
        rows.append(("plain decoding", f"{plain.tokens_per_second:.1f} tokens/s; {beside}"))
    compiling = f"{outcome.compile_seconds:.1f} s for verification"
    if plain is not None:
        compiling += f", {outcome.plain_compile_seconds:.1f} s for plain decoding"
    rows.append(("compiling", f"{compiling}; once, and not in the speeds"))
    if outcome.declares_read is not None:
        claim = "reads its mask" if outcome.declares_read else "does not read its mask"
        rows.append(("back end", f"{outcome.backend}, which declares that it {claim}"))
    if (chosen := outcome.sampling) is not None:
        limits = f"top-p {chosen.top_p:g}, top-k {chosen.top_k}, seed {chosen.seed}"
        rows.insert(1, ("sampling", f"temperature {chosen.temperature:g}, {limits}"))
    for mask in outcome.masks:
        rows += _mask_rows(mask, num_draft_tokens)
    rows.append(("buffers", _ledger(outcome.ledger)))
    if plain is not None:
        rows += [("check", verdict) for verdict in _verdicts(outcome)]
    return rows


def _token_counts(outcome: Outcome) -> str:
    new = sum(map(len, outcome.generation.sequences))
    counts = outcome.prompt_tokens
    if len(counts) == 1:
        return f"{counts[0]} in the prompt, {new} generated"
    return (
        f"{sum(counts)} in {len(counts)} prompts, {new} generated, "
        f"{outcome.batch_size} requests at a time"
    )


def _ledger(ledger: tuple[LedgerRow, ...]) -> str:
    """Bytes of each owner, with the names of what it has where they are few."""
    owned: dict[str, list[LedgerRow]] = {}
    for row in ledger:
        owned.setdefault(row.owner, []).append(row)
    parts = []
    for owner, rows in owned.items():
        names = ", ".join(row.name for row in rows) if len(rows) <= 3 else f"{len(rows)} slots"
        parts.append(f"{owner} {sum(row.nbytes for row in rows):,} ({names})")
    total = _bytes(sum(row.nbytes for row in ledger))
    return f"{ledger[0].phase}, {total}: {', '.join(parts)}"


def _mask_rows(mask: MaskReport, num_draft_tokens: int) -> list[tuple[str, str]]:
    declared, final = _paper_bytes(mask, num_draft_tokens)
    readers = Counter((reader.op, reader.reads.name) for reader in mask.readers)
    read_by = ", ".join(f"{op} x {n} ({reads})" for (op, reads), n in readers.items())
    before = f"{mask.declared_mode.name}, {_bytes(mask.declared_bytes)}"
    after = f"{mask.final_mode.name}, {_bytes(mask.final_bytes)}"
    paper = f"{_BATCH} requests x 1 Mi context: {_bytes(declared)} -> {_bytes(final)}"
    return [
        ("verify mask", f"declared {before} -> {after} ({mask.verdict})"),
        ("mask read by", read_by or "nothing"),
        ("on paper", paper),
    ]


def _paper_bytes(mask: MaskReport, num_draft_tokens: int) -> tuple[int, int]:
    """Bytes of the declared and the final layout in the deployment of the paper figures."""

    def size(mode: TreeMaskMode) -> int:
        # Every mask dtype is one byte wide.
        numel, _ = mask_storage(mode, _BATCH, num_draft_tokens, _CONTEXT)
        return int(numel)

    return size(mask.declared_mode), size(mask.final_mode)


def _mask_dict(mask: MaskReport, num_draft_tokens: int) -> dict[str, Any]:
    declared, final = _paper_bytes(mask, num_draft_tokens)
    return {
        "name": mask.name,
        "source": mask.source,
        "declared_mode": mask.declared_mode.name,
        "declared_bytes": mask.declared_bytes,
        "final_mode": mask.final_mode.name,
        "final_bytes": mask.final_bytes,
        "verdict": str(mask.verdict),
        "readers": [
            {"op": reader.op, "reads": reader.reads.name, "source": reader.source}
            for reader in mask.readers
        ],
        "on_paper": {
            "requests": _BATCH,
            "max_context_len": _CONTEXT,
            "declared_bytes": declared,
            "final_bytes": final,
        },
    }


def _verdicts(outcome: Outcome) -> list[str]:
    """One line if all is equal, else one for each difference."""
    found = [difference for difference in outcome.divergences if difference is not None]
    if not found:
        return ["the tokens equal those of plain decoding"]
    several = len(outcome.divergences) > 1
    lines = []
    for b, difference in enumerate(outcome.divergences, start=1):
        if difference is not None:
            lines.append(f"{f'prompt {b}: ' * several}{_verdict(outcome, difference)}")
    return lines


def _verdict(outcome: Outcome, found: Divergence) -> str:
    names = [
        "the end" if token is None else f"{token} {outcome.decode([token])!r}"
        for token in (found.token, found.plain_token)
    ]
    kind = (
        f"a near-tie, below {NEAR_TIE:g}"
        if found.is_near_tie
        else f"NOT a near-tie, which is below {NEAR_TIE:g}"
    )
    return (
        f"first difference at token {found.position}: {names[0]}, plain decoding {names[1]}; "
        f"logit gap {found.gap:.4g}, {kind}"
    )


def _divergence_dict(found: Divergence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "position": found.position,
        "token": found.token,
        "plain_token": found.plain_token,
        "logit_gap": found.gap if found.gap < float("inf") else None,
        "is_near_tie": found.is_near_tie,
    }


def _bytes(count: int | str) -> str:
    """Grouped digits, or the expression that stands for a dynamic size."""
    return f"{count:,} bytes" if isinstance(count, int) else f"{count} bytes"
