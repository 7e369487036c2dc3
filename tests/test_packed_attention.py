"""torchvm::packed_attention: the bits of pack_mask_bits, read as unified_attention reads cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.prefix_reference import SCALE, Batch, attend, bits, draw_batch, full_mask
from torchvm import pack_mask_bits, packed_attention, unified_attention
from torchvm.ops.contracts import mask_readers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OP = torch.ops.torchvm.packed_attention


def _bits(batch: Batch, gap: int = 3) -> tuple[Tensor, Tensor]:
    """The batch's bits and offsets, with garbage before every request and behind the last."""
    octets, offsets = bits(batch, gap)
    return torch.tensor([*octets, 0xFF], dtype=torch.uint8), torch.tensor(offsets)


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1, 0.0), (6, 0.0), (400, 3.0)])
@pytest.mark.parametrize(("page_size", "n"), [(1, 7), (4, 1), (16, 8), (300, 19)])
def test_equals_the_reference(page_size: int, n: int, window: int, cap: float) -> None:
    batch = draw_batch([0, 37, 1, 16, 50], n, page_size=page_size, seed=n)
    found = packed_attention(
        *batch.tensors, *_bits(batch), scale=SCALE, sliding_window=window, logit_cap=cap
    )
    assert found.is_contiguous()
    expected = attend(batch, window, cap)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_the_reader_of_cells_on_what_is_packed(dtype: torch.dtype) -> None:
    for seed in range(6):
        batch = draw_batch([11, 0, 30], 5, dtype=dtype, seed=seed)
        mask = full_mask(batch)
        packed = pack_mask_bits(mask, batch.seq_lens, num_draft_tokens=5, max_context_len=33)
        options: dict[str, Any] = {"scale": SCALE, "sliding_window": seed, "logit_cap": 1.5}
        found = packed_attention(*batch.tensors, *packed, **options)
        assert found.dtype is dtype
        assert torch.equal(found, unified_attention(*batch.tensors, mask, **options))


def test_bits_may_stand_in_any_order_and_be_shared() -> None:
    batch = draw_batch([4, 4, 9], 3)
    batch.cells[1] = batch.cells[0]
    octets, offsets = bits(batch._replace(cells=[batch.cells[2], batch.cells[0]]))
    first, second = offsets[0], offsets[1]
    indptr = torch.tensor([second, second, first, -99])
    found = packed_attention(
        *batch.tensors, torch.tensor(octets, dtype=torch.uint8), indptr, scale=SCALE
    )
    np.testing.assert_allclose(found.double().numpy(), attend(batch), rtol=0, atol=2e-6)


def test_a_node_that_sees_nothing_gives_zeros() -> None:
    batch = draw_batch([4, 0], 3)
    for rows in batch.cells:
        rows[1] = [0] * len(rows[1])
    found = packed_attention(*batch.tensors, *_bits(batch), scale=SCALE)
    assert torch.equal(found[:, 1], torch.zeros_like(found[:, 1]))
    assert found[:, 0].abs().min() > 0


@pytest.mark.parametrize("lengths", [[3, 0], [2], []])
def test_opcheck(lengths: list[int]) -> None:
    batch = draw_batch(lengths, 3, page_size=2)
    torch.library.opcheck(OP.default, (*batch.tensors, *_bits(batch), SCALE, 2, 1.5))


def test_strided_inputs() -> None:
    batch = draw_batch([3, 0], 3)
    tensors = (*batch.tensors, *_bits(batch))
    strided = [torch.stack([t, t], -1)[..., 0] for t in tensors]
    torch.library.opcheck(OP.default, (*strided, SCALE))
    assert torch.equal(OP(*strided, SCALE), OP(*tensors, SCALE))


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def run(*tensors: Tensor) -> Tensor:
        out: Tensor = OP(*tensors, SCALE)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for lengths, n in (([3, 9, 40], 9), ([2, 8, 5, 4, 0], 7), ([20] * 4, 11)):
        batch = draw_batch(lengths, n, page_size=5)
        tensors = (*batch.tensors, *_bits(batch))
        assert torch.equal(compiled(*tensors), run(*tensors))
    assert len(graphs) == 1


def test_its_bits_are_no_verify_mask() -> None:
    """No contract, so that passing it a mask of any TreeMaskMode keeps that mask as it is."""
    assert mask_readers("torchvm::packed_attention") == ()


ERRORS: list[tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, Any], str]] = [
    ({"query": lambda t: t.double()}, {}, "query must be one of float32, float16"),
    ({"page_table": lambda t: t[:, :1]}, {}, "page_table must be of at least 4 columns"),
    ({"seq_lens": lambda t: t - 5}, {}, r"seq_lens must be >= 0, got \[0, -2\]"),
    ({}, {"sliding_window": -1}, "sliding_window must be >= 0"),
    ({}, {"logit_cap": -1.0}, "logit_cap must be >= 0"),
    ({"bits": lambda t: t > 0}, {}, "packed_mask must be torch.uint8, got torch.bool"),
    ({"bits": lambda t: t.view(1, -1)}, {}, "packed_mask must be 1-D"),
    ({"bits": lambda t: t[:11]}, {}, r"leave request 1 its 3 bytes of packed_mask's 11, got 9"),
    ({"indptr": lambda t: t.float()}, {}, "mask_indptr must be torch.int64, got torch.float32"),
    ({"indptr": lambda t: t[:2]}, {}, r"mask_indptr must be of shape \[3\], got \[2\]"),
    ({"indptr": lambda t: t - 4}, {}, "mask_indptr must be of offsets that leave request 0 .*-1"),
    ({"indptr": lambda t: t + 9}, {}, "leave request 0 its 3 bytes of packed_mask's 13, got 12"),
]


@pytest.mark.parametrize(("changes", "options", "message"), ERRORS)
def test_errors_say_what_was_expected_and_what_came(
    changes: dict[str, Callable[[Tensor], Tensor]], options: dict[str, Any], message: str
) -> None:
    batch = draw_batch([5, 3], 3, page_size=2)
    names = ("query", "k_cache", "v_cache", "page_table", "seq_lens", "bits", "indptr")
    tensors = dict(zip(names, (*batch.tensors, *_bits(batch)), strict=True))
    changed = [changes[name](t) if name in changes else t for name, t in tensors.items()]
    with pytest.raises(ValueError, match=message):
        packed_attention(*changed, **({"scale": SCALE} | options))


def test_int32_is_converted_by_the_function_and_refused_by_the_op() -> None:
    batch = draw_batch([5, 3], 3)
    packed, indptr = _bits(batch)
    expected = packed_attention(*batch.tensors, packed, indptr, scale=SCALE)
    narrow = (*batch.tensors[:4], batch.seq_lens.int())
    found = packed_attention(*narrow, packed, indptr.int(), scale=SCALE)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"mask_indptr must be torch\.int64, got torch\.int32"):
        OP(*batch.tensors, packed, indptr.int(), SCALE)
