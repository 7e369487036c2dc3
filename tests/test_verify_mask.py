"""The owner of the mask buffer: gates, layouts, capacity, and use inside a compiled graph."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from torchvm import (
    MaskSource,
    TreeMaskMode,
    VerifyMask,
    default_tree_mask_mode,
    mask_for_batch,
    mask_storage,
    maybe_create_verify_mask,
    tree_mask_numel,
)

FULL, QLEN, PACKED = TreeMaskMode


def _create(**changes: Any) -> VerifyMask | None:
    settings: dict[str, Any] = {
        "is_draft_runner": False,
        "skip_prefill": False,
        "max_bs": 8,
        "max_context_len": 100,
        "num_draft_tokens": 4,
        "device": "cpu",
        "is_read": True,
    }
    return maybe_create_verify_mask(**{**settings, **changes})


def _mask(**changes: Any) -> VerifyMask:
    mask = _create(**changes)
    assert mask is not None
    return mask


@pytest.mark.parametrize(
    "changes",
    [
        {"is_draft_runner": True},
        {"skip_prefill": True},
        {"num_draft_tokens": None},
        {"num_draft_tokens": 0},
    ],
)
def test_nothing_is_made_for_a_runner_that_never_verifies(changes: dict[str, Any]) -> None:
    assert _create(**changes) is None


@pytest.mark.parametrize(
    ("device", "is_read", "mode", "expected"),
    [
        ("cpu", True, None, QLEN),
        ("cpu", False, None, QLEN),
        ("meta", True, None, FULL),
        ("meta", False, None, QLEN),
        ("cpu", True, FULL, FULL),
        ("meta", True, PACKED, PACKED),
        ("meta", False, FULL, FULL),
    ],
)
def test_mode(device: str, is_read: bool, mode: int | None, expected: TreeMaskMode) -> None:
    mask = _mask(device=device, is_read=is_read, mode=mode)
    assert mask.mode is expected
    assert mask.is_read is is_read
    assert mask.buffer.device.type == device
    assert mask.buffer.numel() == mask_storage(expected, 8, 4, 100)[0]


def test_default_mode_by_device() -> None:
    assert default_tree_mask_mode("cpu") is QLEN
    assert default_tree_mask_mode(torch.device("cuda", 1)) is FULL


def test_dtype() -> None:
    assert _mask().buffer.dtype is torch.bool
    assert _mask(dtype=torch.uint8).buffer.dtype is torch.uint8
    assert _mask(mode=PACKED).buffer.dtype is torch.uint8
    with pytest.raises(ValueError, match=r"dtype must be torch.bool or torch.uint8 for"):
        _create(dtype=torch.float32)


def test_buffer_starts_zeroed() -> None:
    assert not _mask(mode=FULL).buffer.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_bs": 0}, "max_bs must be >= 1, got 0"),
        ({"num_draft_tokens": -2}, "num_draft_tokens must be >= 1, got -2"),
        ({"max_context_len": -1, "mode": 0}, "max_context_len must be >= 0, got -1"),
        ({"mode": 3}, "tree_mask_mode must be one of .* got 3"),
    ],
)
def test_bad_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _create(**changes)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_fits_in_every_mode(mode: TreeMaskMode) -> None:
    mask = _mask(mode=mode)
    assert mask.fits(8, 4)
    assert mask.fits(1, 4)
    assert mask.fits(0, 4)
    assert not mask.fits(9, 4)
    assert not mask.fits(48, 4)
    assert not mask.fits(9, 1)  # Small enough, but captured for eight requests.
    assert not mask.fits(8, 40)


def test_fits_counts_the_worst_case_of_the_context() -> None:
    mask = _mask(mode=FULL)
    assert mask.buffer.numel() == 8 * 4 * 104
    assert mask.fits(4, 7)
    assert not mask.fits(4, 8)


def test_a_batch_of_48_never_reuses_a_buffer_for_8() -> None:
    mask = _mask(max_bs=8, max_context_len=1 << 20, mode=FULL, device="meta")
    assert not mask.fits(48, 4)


def test_a_gib_mask_is_sized_without_being_allocated() -> None:
    assert tree_mask_numel(FULL, 256, 4, 1_048_576) == 1_073_745_920
    assert tree_mask_numel(QLEN, 256, 4, 1_048_576) == 4_096
    code = (
        "import resource, torchvm\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert torchvm.mask_storage(0, 256, 4, 1 << 20)[0] == 1_073_745_920\n"
        "mask = torchvm.maybe_create_verify_mask(is_draft_runner=False, skip_prefill=False,\n"
        "    max_bs=256, max_context_len=1 << 20, num_draft_tokens=4, device='meta',\n"
        "    is_read=True)\n"
        "assert mask.buffer.numel() == 1_073_745_920\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert after - before < 64 * 1024, after - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_frozen() -> None:
    mask = _mask()
    with pytest.raises(AttributeError):
        mask.max_bs = 9  # type: ignore[misc]
    assert mask != _mask()
    grown = msgspec.structs.replace(mask, max_bs=4)
    assert grown.max_bs == 4
    assert mask.max_bs == 8


@pytest.mark.parametrize("backend", ["aot_eager", "torchvm"])
def test_inside_a_compiled_function(backend: str) -> None:
    mask = _mask(max_bs=2, mode=QLEN)
    parents = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 2]])
    seq_lens = torch.tensor([5, 7])

    def step(parents: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        if not mask.fits(parents.shape[0], parents.shape[1]):
            return seq_lens
        positions: torch.Tensor = torch.ops.torchvm.build_tree_from_parents(
            parents, seq_lens, mask.buffer, mask.num_draft_tokens, int(mask.mode)
        )[0]
        return positions

    torch._dynamo.reset()
    with torch.no_grad():
        positions = torch.compile(step, backend=backend, fullgraph=True)(parents, seq_lens)
    assert positions.tolist() == [5, 6, 7, 6, 7, 8, 8, 9]
    block = mask.buffer.view(2, 4, 4).int().tolist()
    assert block[0] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert block[1] == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_a_worker_never_writes_past_a_mask() -> None:
    """No mask, one that fits, one that does not, and idle batches."""
    owner = maybe_create_verify_mask(
        is_draft_runner=False, skip_prefill=False, max_bs=8, max_context_len=16,
        num_draft_tokens=4, device="cpu", is_read=True, dtype=torch.uint8, mode=FULL,
    )  # fmt: skip
    assert owner is not None
    sizes: dict[str, Any] = {"num_draft_tokens": 4, "max_context_len": 16, "device": "cpu"}
    fits = mask_for_batch(owner, bs=8, **sizes)
    assert fits.buffer is owner.buffer
    assert (fits.mode, fits.source) == (FULL, MaskSource.owned)
    # Captured for 8, and then a batch of 48 came: in its own mode, and in memory of its own.
    large = mask_for_batch(owner, bs=48, **sizes)
    assert (large.mode, large.source) == (FULL, MaskSource.too_large)
    assert large.buffer.numel() == 48 * 4 * (16 + 4)
    assert large.buffer.dtype is torch.uint8
    wider = mask_for_batch(owner, bs=8, **sizes | {"num_draft_tokens": 5})
    assert wider.source is MaskSource.too_large
    for mode, layout, numel in ((None, QLEN, 48), (PACKED, PACKED, 12), (FULL, FULL, 240)):
        alone = mask_for_batch(None, bs=3, mode=mode, **sizes)
        assert (alone.mode, alone.source) == (layout, MaskSource.no_owner)
        assert alone.buffer.numel() == numel
    for held in (owner, None):
        idle = mask_for_batch(held, bs=0, **sizes)
        assert (idle.buffer.numel(), idle.source) == (0, MaskSource.idle)
