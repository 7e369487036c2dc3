"""Verify steps in captured sizes: buckets, padding, addresses, refusals, and long runs."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from tests.tiny_models import KnowingDrafter
from torchvm import SamplingParams, sampling_probs
from torchvm.backends.cpu import CPUBackend
from torchvm.backends.layers import LayerKind
from torchvm.backends.triton import TritonUnifiedBackend
from torchvm.backends.two_batch import TboAttnBackend
from torchvm.engine import Draft, PlainDecoder, SpeculativeDecoder, steps
from torchvm.engine.runner import VerifyRunner, bucket_sizes
from torchvm.engine.small_model import SmallConfig, SmallModel
from torchvm.errors import CaptureError
from torchvm.ops.layout import TreeMaskMode
from torchvm.passes.capture_check import CaptureCode, CaptureFinding

if TYPE_CHECKING:
    from torchvm.backends.base import VerifyConfig

CONTEXT, BS = 160, 8
KINDS = {
    "cpu": (LayerKind.grouped_query,),
    "hybrid-linear": (LayerKind.recurrent, LayerKind.grouped_query),
}


def small(kinds: Any = KINDS["cpu"]) -> SmallModel:
    return SmallModel(SmallConfig(kinds=kinds, hidden_size=32, num_heads=2, num_kv_heads=1))


def prompts(bs: int = BS, longest: int = 120) -> list[list[int]]:
    """Of lengths that fill the context at different steps."""
    generator = torch.Generator().manual_seed(2)
    lengths = [1 + b * longest // bs for b in range(bs)]
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]


def plain(model: SmallModel, rows: list[list[int]], new: int) -> list[list[int]]:
    """What each request says alone."""
    decoder = PlainDecoder(model, batch_size=1, max_context_len=CONTEXT, inner="aot_eager")
    return [decoder.decode([row], max_new_tokens=new).sequences[0] for row in rows]


def decoder_of(model: SmallModel, drafter: Any, bs: int, **options: Any) -> SpeculativeDecoder:
    settings: dict[str, Any] = {"backend": "cpu", "inner": "aot_eager"} | options
    return SpeculativeDecoder(model, drafter, batch_size=bs, max_context_len=CONTEXT, **settings)


class Silent:
    """Drafts nothing."""

    topk, num_draft_tokens = 2, 4

    def propose(self, sequences: Any, active: Any) -> list[Draft]:
        return [Draft((), ()) for _ in sequences]


def test_buckets() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(33) == (1, 2, 4, 8, 16, 24, 32, 33)
    with pytest.raises(ValueError, match="max_bs must be >= 1, got 0"):
        bucket_sizes(0)


@pytest.mark.parametrize("name", list(KINDS))
def test_requests_that_still_decode_run_on_smaller_buckets(name: str) -> None:
    model = small(KINDS[name])
    rows = prompts(5)
    truth = plain(model, rows, 200)
    assert len({len(row) for row in truth}) == 5
    answers = [p + row + [0] * 9 for p, row in zip(rows, truth, strict=True)]
    decoder = decoder_of(model, KnowingDrafter(answers), 5, backend=name, buckets=bucket_sizes(5))
    torch._dynamo.reset()
    counters.clear()
    decoder.warm_up()
    stats: Any = counters
    assert stats["stats"]["unique_graphs"] == len(bucket_sizes(5)) == 4
    used: list[int] = []
    replay = decoder.runner._replay
    decoder.runner._replay = lambda bucket: used.append(bucket) or replay(bucket)  # type: ignore[method-assign, func-returns-value]
    found = decoder.decode(rows, max_new_tokens=200)
    assert found.sequences == truth
    assert found.accepted_per_step > 1
    assert used == sorted(used, reverse=True)
    assert set(used) == {1, 2, 4, 5}
    assert stats["stats"]["unique_graphs"] == 4


def test_what_pads_a_batch_touches_no_request() -> None:
    """Three requests in slots 4, 0 and 2, others may live in 1 and 3: the spare slot pads."""
    model = small()
    decoder = decoder_of(model, Silent(), 5)
    cache = model.allocate(6, CONTEXT, 4)
    for layer in cache.layers:
        for buffer in layer.values():
            buffer.fill_(7.0)
    runner = decoder.runner
    runner.bind(cache)
    before = runner.buffers.addresses()
    with torch.inference_mode():
        verified = runner.run([[3, 4, 5, 6]] * 3, [[-1, 0, 1, 2]] * 3, [9, 2, 0], [4, 0, 2])
    held = runner.buffers
    assert held.view("positions", 3).view(3, 4).tolist() == [
        [start + i for i in range(4)] for start in (9, 2, 0)
    ]
    assert held.view("retrieve_next_token", 3).tolist() == [[1, 2, 3, -1]] * 3
    assert held.view("retrieve_next_sibling", 3).tolist() == [[-1] * 4] * 3
    assert held.view("retrieve_index", 3).flatten().tolist() == list(range(12))
    assert [len(row) for row in verified.tokens] == [len(p) + 1 for p in verified.paths]
    assert len(verified.tokens) == 3
    keys = cache.layers[0]["keys"]
    touched = [
        (slot, position)
        for slot in range(6)
        for position in range(keys.shape[1])
        if bool((keys[slot, position] != 7.0).any())
    ]
    starts = {4: 9, 0: 2, 2: 0, 5: 0}
    assert touched == sorted((s, p) for s, at in starts.items() for p in range(at, at + 4))
    assert runner.buffers.addresses() == before
    with torch.inference_mode():
        idle = runner.run([], [], [], [])
    assert idle == ([], [], None)


def test_more_requests_than_slots_and_shared_slots_are_refused() -> None:
    decoder = decoder_of(small(), Silent(), 2)
    runner = decoder.runner
    row: Any = [[1] * 4]
    with pytest.raises(ValueError, match="bind must name a cache before run, got none"):
        runner.run(row, row, [1], [0])
    runner.bind(decoder.target.allocate(3, CONTEXT, 4))
    with pytest.raises(ValueError, match=r"slots must be 3 different ones in \[0, 2\)"):
        runner.run(row * 3, row * 3, [1, 1, 1], [0, 1, 2])
    for slots in ([1, 1], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"slots must be 2 different ones in \[0, 2\), got"):
            runner.run(row * 2, row * 2, [1, 1], slots)
    with pytest.raises(ValueError, match=r"tokens must be 1 rows of 4, got \[3\]"):
        runner.run([[1] * 3], row, [1], [0])
    with pytest.raises(ValueError, match=r"parents must be 1 rows of 4, got \[4, 4\]"):
        runner.run(row, row * 2, [1], [0])
    for length in (-1, CONTEXT + 1):
        with pytest.raises(ValueError, match=r"seq_lens must be in \[0, 160\], got"):
            runner.run(row, row, [length], [0])
    for buckets, message in (
        ((2, 1), r"ascending sizes in \[1, 2\]"),
        ((1, 3), r"ascending sizes in \[1, 2\]"),
        ((), "ascending sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            VerifyRunner(runner.target, runner.verifier, runner._step, max_bs=2, buckets=buckets)


def test_a_bucket_that_is_asked_for_is_one_that_holds_the_batch() -> None:
    runner = decoder_of(small(), Silent(), 4, buckets=(1, 3)).runner
    runner.bind(runner.target.allocate(5, CONTEXT, 4))
    row: Any = [[1] * 4]
    for bs, bucket in ((1, 2), (2, 1), (4, 3)):
        message = rf"bucket must be one of \(1, 3\) that holds {bs} requests, got {bucket}"
        with pytest.raises(ValueError, match=message):
            runner.run(row * bs, row * bs, [1] * bs, list(range(bs)), bucket=bucket)


@pytest.mark.parametrize("name", ["cpu", "flashinfer", "hybrid-linear"])
def test_batches_above_the_largest_bucket_run_in_buffers_of_their_own(name: str) -> None:
    model, rows = small(KINDS.get(name, KINDS["cpu"])), prompts(5, 30)
    truth = plain(model, rows, 12)
    answers = [[*row, *new] for row, new in zip(rows, truth, strict=True)]
    decoder = decoder_of(model, KnowingDrafter(answers), 5, backend=name, buckets=(1, 2))
    mask = decoder.verifier.backend.verify_mask
    assert mask is not None
    assert mask.max_bs == 2
    torch._dynamo.reset()
    counters.clear()
    decoder.warm_up()
    before = decoder.runner.buffers.addresses()
    with pytest.warns(UserWarning, match="FRESH: TARGET_VERIFY was captured for 2") as warned:
        assert decoder.decode(rows, max_new_tokens=12).sequences == truth
    sizes = [re.findall(r"batch of (\d+)", str(warning.message))[0] for warning in warned]
    assert sizes[0] == "5"
    assert len(set(sizes)) == len(sizes), "a size is said once"
    assert decoder.runner.buffers.addresses() == before
    assert decoder.decode(rows[:2], max_new_tokens=12).sequences == truth[:2]
    stats: Any = counters
    assert stats["stats"]["unique_graphs"] == 2, "what is larger than the buckets is not compiled"


def test_only_a_back_ends_mask_can_be_made_anew() -> None:
    with pytest.raises(ValueError, match="last of buckets must be max_bs 2 where the step alloc"):
        decoder_of(small(), Silent(), 2, backend=None, buckets=(1,))


class Reading(CPUBackend):
    """Waits for a length in every forward."""

    def init_forward_metadata(self, batch: Any) -> Any:
        longest = batch.seq_lens.max().item()
        return batch._replace(seq_lens=batch.seq_lens.clamp(max=longest))


def test_a_step_that_waits_for_the_device_is_refused() -> None:
    drafter = Silent()
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(CaptureError, match=r"HOST_SYNC .*test_runner\.py:\d+: .*\n?"),
    ):
        decoder_of(small(), drafter, 2, backend=Reading)


def test_a_step_that_waits_to_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(logits: Any, **options: Any) -> Any:
        token = logits.argmax().item()
        return sampling_probs(logits.clamp(max=token), **options)

    options = {"sampling": SamplingParams()}
    decoder_of(small(), Silent(), 2, **options)
    monkeypatch.setattr(steps, "sampling_probs", waiting)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(CaptureError, match=r"HOST_SYNC .*test_runner\.py:\d+: .*\n?"),
    ):
        decoder_of(small(), Silent(), 2, **options)


def test_every_finding_but_written_inputs_is_a_refusal() -> None:
    decoder = decoder_of(small(), Silent(), 2)
    verifier = decoder.verifier
    assert verifier.plan is not None
    assert {f.code for f in verifier.plan.capture} == {CaptureCode.MUTATED_INPUT}
    for code in CaptureCode:
        finding = CaptureFinding(code, "node", "aten::op", "file.py:3", "do otherwise")
        plan = msgspec.structs.replace(verifier.plan, capture=(finding,))
        changed = verifier._replace(plan=plan)
        if code is CaptureCode.MUTATED_INPUT:
            VerifyRunner(decoder.target, changed, decoder.runner._step, max_bs=2)
            continue
        with pytest.raises(CaptureError, match=rf"{code} .* at file\.py:3: .*do otherwise"):
            VerifyRunner(decoder.target, changed, decoder.runner._step, max_bs=2)


def test_a_buffer_that_moved_is_noticed() -> None:
    decoder = decoder_of(small(), Silent(), 2)
    decoder.warm_up()
    held = decoder.runner.buffers._held
    held["tokens"] = held["tokens"]._replace(tensor=held["tokens"].tensor.clone())
    with pytest.raises(AssertionError, match="a captured buffer has moved"):
        decoder.decode([[1, 2], [3]], max_new_tokens=2)


def test_the_ledger_of_a_run() -> None:
    decoder = decoder_of(small(), Silent(), BS)
    rows = {row.name: row for row in decoder.runner.ledger()}
    assert {name: (row.owner, row.nbytes) for name, row in rows.items()} == {
        "tokens": ("runner", BS * 4 * 8),
        "parents": ("runner", BS * 4 * 8),
        "seq_lens": ("runner", BS * 8),
        "slots": ("runner", BS * 8),
        "positions": ("runner", BS * 4 * 8),
        "retrieve_index": ("runner", BS * 4 * 8),
        "retrieve_next_token": ("runner", BS * 4 * 8),
        "retrieve_next_sibling": ("runner", BS * 4 * 8),
        "tree_mask": ("cpu", BS * 4),
    }
    assert {row.phase for row in rows.values()} == {"TARGET_VERIFY"}
    mask = decoder.runner.buffers.view("tree_mask", BS)
    assert mask is decoder.verifier.buffer
    with pytest.warns(UserWarning, match="FRESH: TARGET_VERIFY was captured for 8"):
        fresh = decoder.runner.buffers.for_batch(9).view("tree_mask", 9)
    assert fresh.numel() == 9 * 4
    assert fresh.data_ptr() != mask.data_ptr()


def test_the_ledger_has_the_back_ends_other_buffers() -> None:
    kinds = KINDS["hybrid-linear"]
    decoder = decoder_of(small(kinds), Silent(), BS, backend="hybrid-linear")
    rows = {row.name: row for row in decoder.runner.ledger()}
    for name in ("linear.next_token", "linear.next_sibling"):
        assert (rows[name].owner, rows[name].nbytes) == ("hybrid-linear(cpu, linear)", BS * 4 * 8)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_five_hundred_steps_compile_nothing_and_keep_nothing() -> None:
    model = small()
    rows = prompts()
    truth = plain(model, rows, 200)
    decoder = decoder_of(model, Silent(), BS)
    decoder.warm_up()
    assert decoder.decode(rows, max_new_tokens=200).sequences == truth
    gc.collect()
    torch._dynamo.utils.counters.clear()
    before, steps = _resident_bytes(), 0
    while steps < 500:
        found = decoder.decode(rows, max_new_tokens=200)
        assert found.sequences == truth
        assert len(set(map(len, found.accepted))) == BS
        steps += found.steps
    gc.collect()
    assert _resident_bytes() - before < 16 << 20
    stats: Any = counters
    assert not stats["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", list(KINDS))
def test_a_decoder_begins_every_run_anew(name: str) -> None:
    model, rows = small(KINDS[name]), prompts(3, 30)
    decoder = decoder_of(model, Silent(), 3, backend=name)
    first = decoder.decode(rows, max_new_tokens=9).sequences
    decoder.decode([list(reversed(row)) for row in reversed(rows)], max_new_tokens=20)
    assert decoder.decode(rows, max_new_tokens=9).sequences == first == plain(model, rows, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk": 1}, r"backend must be made for .*topk=2.*, got 'cpu' for .*topk=1"),
        ({"num_draft_tokens": 5}, r"must be made for .*num_draft_tokens=4"),
        ({"max_context_len": 4}, r"must be made for .*max_context_len=160.*max_context_len=4"),
        ({"owns_mask": False}, "must own a verify mask, got 'cpu', which owns none"),
        (
            {"tree_mask_mode": TreeMaskMode.QLEN_ONLY},
            "must own a QLEN_ONLY_BITPACKING for 2 requests of 4 nodes, got 'cpu' with a QLEN",
        ),
    ],
)
def test_a_back_end_made_otherwise_is_refused(change: dict[str, Any], message: str) -> None:
    def make(config: VerifyConfig) -> CPUBackend:
        return CPUBackend(msgspec.structs.replace(config, **change))

    with pytest.raises(ValueError, match=message):
        decoder_of(small(), Silent(), 2, backend=make)


def test_a_full_mask_is_not_cut_in_a_compiled_step() -> None:
    def make(config: VerifyConfig) -> TboAttnBackend:
        child = msgspec.structs.replace(config, owns_mask=False)
        children = TritonUnifiedBackend(child), TritonUnifiedBackend(child)
        return TboAttnBackend(TritonUnifiedBackend(config), children)

    with pytest.raises(ValueError, match=r"compact mask to run 'two-batch\(triton-unified\)'"):
        decoder_of(small(), Silent(), 2, backend=make)


def test_a_config_of_ones_own_back_end_reaches_the_ledger() -> None:
    def make(config: VerifyConfig) -> CPUBackend:
        return CPUBackend(msgspec.structs.replace(config, max_context_len=CONTEXT + 9))

    decoder = decoder_of(small(), Silent(), 2, backend=make)
    mask = decoder.verifier.backend.verify_mask
    assert mask is not None
    assert mask.max_context_len == CONTEXT + 9
