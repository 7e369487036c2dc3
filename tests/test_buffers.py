"""Phase-level buffers: addresses, padding, room, and who owns what."""

from __future__ import annotations

import warnings

import pytest
import torch

from torchvm.backends.base import VerifyConfig
from torchvm.backends.cpu import CPUBackend
from torchvm.buffers import Fill, PhaseBuffers, Room, Rows, Slot

N = 4


def buffers(max_bs: int = 24) -> PhaseBuffers:
    made = PhaseBuffers("TARGET_VERIFY", max_bs=max_bs, num_draft_tokens=N, device="cpu")
    made.register(Slot(name="tokens", owner="runner", rows=Rows.token, dtype=torch.int64))
    made.register(
        Slot(name="lens", owner="runner", rows=Rows.request, dtype=torch.int32, padding=-5)
    )
    made.register(
        Slot(
            name="links", owner="draft", rows=Rows.request, dtype=torch.int64, trailing=(N,),
            padding=-1, fill=Fill.in_place,
        )
    )  # fmt: skip
    return made


def values(bs: int) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.arange(1, bs * N + 1),
        "lens": torch.arange(1, bs + 1, dtype=torch.int32),
    }


def test_seventeen_requests_are_padded_to_twenty_four() -> None:
    made = buffers()
    before = made.addresses()
    for bs in (24, 17, 0, 1):
        views = made.fill(bs, 24, **values(bs))
        assert views["tokens"].tolist() == [*range(1, bs * N + 1), *[0] * (24 - bs) * N]
        assert views["lens"].tolist() == [*range(1, bs + 1), *[-5] * (24 - bs)]
        assert views["tokens"].data_ptr() == before["tokens"]
    assert made.addresses() == before
    smaller = made.fill(2, 3, **values(2))
    assert [len(smaller[name]) for name in ("tokens", "lens")] == [12, 3]
    # Rows behind the padding are nobody's business.
    assert made.view("lens", 24)[3:].tolist() == [-5] * 21


def test_slots_begin_as_padding() -> None:
    made = buffers()
    assert made.view("links", 2).tolist() == [[-1] * N] * 2
    assert made.view("lens", 24).unique().tolist() == [-5]
    assert made.view("tokens", 0).shape == (0,)


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    made = buffers(4)
    made.fill(4, 4, **values(4))
    kept = made.view("tokens", 4).clone()
    good = values(2)
    for arguments, message in (
        ((2, 5, good), r"bs must be in \[0, 4\] in these buffers, got 5"),
        ((3, 2, values(3)), r"bs must be in \[0, 2\], got 3"),
        ((-1, 2, good), r"bs must be in \[0, 2\], got -1"),
        ((2, 2, {"tokens": good["tokens"]}), r"values must be of \['lens', 'tokens'\], got"),
        ((2, 2, good | {"links": good["lens"]}), r"values must be of .*, got \['lens', 'links'"),
        ((2, 2, values(3)), r"tokens must be of shape \[8\] and torch.int64, got \[12\]"),
        ((2, 2, good | {"lens": good["lens"].long()}), r"lens must be .* got \[2\] and torch.int"),
    ):
        bs, padded, given = arguments
        with pytest.raises(ValueError, match=message):
            made.fill(bs, padded, **given)
        assert torch.equal(made.view("tokens", 4), kept)
    with pytest.raises(ValueError, match=r"name must be one of .*'tokens'\], got 'mask'"):
        made.view("mask", 1)
    with pytest.raises(ValueError, match="'tokens' must be registered once, and 'runner' did"):
        made.register(Slot(name="tokens", owner="x", rows=Rows.token, dtype=torch.int64))
    with pytest.raises(ValueError, match="max_bs must be >= 1, got 0"):
        buffers(0)


def test_a_larger_batch_gets_fresh_buffers_and_that_is_said_once() -> None:
    made = buffers(4)
    assert (made.room(4), made.room(5)) == (Room.captured, Room.fresh)
    assert made.for_batch(4) is made
    with pytest.warns(UserWarning, match="FRESH: TARGET_VERIFY was captured for 4 .* of 5 runs"):
        fresh = made.for_batch(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = made.for_batch(5)
    assert (fresh.max_bs, again.max_bs) == (5, 5)
    assert len(fresh.fill(5, 5, **values(5))["tokens"]) == 20
    assert not set(fresh.addresses().values()) & set(made.addresses().values())
    with pytest.warns(UserWarning, match="of 6 runs"):
        made.for_batch(6)


def test_the_mask_of_a_back_end_is_a_slot_of_the_phase() -> None:
    config = VerifyConfig(num_draft_tokens=N, max_context_len=32, topk=2)

    def make(max_bs: int) -> torch.Tensor:
        backend = CPUBackend(config)
        backend.init_cuda_graph_state(max_bs)
        assert backend.verify_mask is not None
        return backend.verify_mask.buffer

    made = buffers(4)
    mask = made.register(
        Slot(
            name="tree_mask", owner="cpu", rows=Rows.token, dtype=torch.bool,
            fill=Fill.in_place, make=make,
        )
    )  # fmt: skip
    assert made.view("tree_mask", 2) is mask
    with pytest.warns(UserWarning, match="FRESH"):
        fresh = made.for_batch(9)
    assert fresh.view("tree_mask", 9).numel() == 9 * N * N
    rows = {row.name: row for row in made.ledger()}
    assert list(rows) == ["tokens", "lens", "links", "tree_mask"]
    assert [rows[name].nbytes for name in rows] == [4 * N * 8, 4 * 4, 4 * N * 8, 4 * N * N]
    assert (rows["tree_mask"].owner, rows["links"].owner) == ("cpu", "draft")
    assert rows["lens"].shape == (4,)
    assert rows["lens"].dtype == "int32"
    with pytest.raises(ValueError, match=r"'other' must be .* on meta .* got in-place, cpu"):
        PhaseBuffers("P", max_bs=1, num_draft_tokens=1, device="meta").register(
            Slot(
                name="other", owner="x", rows=Rows.token, dtype=torch.bool, make=make,
                fill=Fill.in_place,
            )
        )  # fmt: skip
    for options in ({"dtype": torch.int64, "fill": Fill.in_place}, {"dtype": torch.bool}):
        with pytest.raises(ValueError, match="'other' must be written in place"):
            buffers(4).register(
                Slot(name="other", owner="x", rows=Rows.token, make=make, **options)
            )
