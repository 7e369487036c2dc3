"""Contracts of other people's ops: the schemas are as written, and the facts are facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import torchvm
from torchvm import MaskRead, Reason
from torchvm.ops.contracts import mask_readers
from torchvm.ops.external_contracts import ATTENTION_MASKS

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT, N, BATCH = 8, 3, 2
KEYS = CONTEXT + N


@pytest.mark.parametrize("op", ATTENTION_MASKS)
def test_the_contract_names_an_argument_that_takes_a_tensor(op: str) -> None:
    (reader,) = mask_readers(op)
    assert reader.reads is MaskRead.FULL
    (schema,) = [s for s in torch._C._jit_get_schemas_for_operator(op) if not s.overload_name]
    (argument,) = [a for a in schema.arguments if a.name == ATTENTION_MASKS[op]]
    assert str(argument.type) == "Optional[Tensor]"


def _attend(op: str, mask: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, N, 8, generator=generator)
    key, value = torch.randn(2, 1, 1, KEYS, 8, generator=generator)
    packet = getattr(torch.ops.aten, op.removeprefix("aten::"))
    result = packet(query, key, value, attn_mask=mask)
    attended: Tensor = result[0] if isinstance(result, tuple) else result
    return attended


@pytest.mark.parametrize("op", [op for op, arg in ATTENTION_MASKS.items() if arg == "attn_mask"])
def test_every_cell_of_the_prefix_matters(op: str) -> None:
    full = torch.zeros(N, KEYS)
    expected = _attend(op, full)
    for column in range(CONTEXT):
        changed = full.clone()
        changed[0, column] = float("-inf")
        assert not torch.equal(_attend(op, changed), expected)


def test_flash_ops_take_no_mask() -> None:
    """Beside random bits for dropout they have no argument that a mask could go to."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
    assert tensors == ["query", "key", "value"]


def _built_mask(parents: Tensor, seq_lens: Tensor) -> Tensor:
    mask = torchvm.alloc_verify_mask(BATCH, N, CONTEXT, 0)
    torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, N, 0)
    return mask


def _compiled_reports(step: Any) -> list[Reason]:
    torch._dynamo.reset()
    torchvm.clear_reports()
    parents = torch.tensor([[0, 0, 1], [0, 0, 0]])
    args = (parents, torch.full((BATCH,), CONTEXT), *torch.randn(3, BATCH, 1, 16, 16))
    options: dict[str, Any] = {"inner": "aot_eager"}
    compiled: Any = torch.compile(step, backend="torchvm", fullgraph=True, options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), step(*args))
    torch._dynamo.reset()
    return [report.verdict for report in torchvm.reports()]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_over_a_mask_keeps_it() -> None:
    def step(parents: Tensor, seq_lens: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = _built_mask(parents, seq_lens)

        def score(
            score: Tensor, batch: Tensor, _head: Tensor, row: Tensor, column: Tensor
        ) -> Tensor:
            cell = (batch * N + row % N) * KEYS + column % KEYS
            return torch.where(mask[cell], score, score - 1)

        return flex_attention(q, k, v, score_mod=score)

    assert _compiled_reports(step) == [Reason.HIGHER_ORDER]


def test_sdpa_over_a_view_of_a_mask_keeps_it() -> None:
    def step(parents: Tensor, seq_lens: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = _built_mask(parents, seq_lens).view(BATCH, 1, N, KEYS)
        return torch.nn.functional.scaled_dot_product_attention(
            q[:, :, :N], k[:, :, :KEYS], v[:, :, :KEYS], attn_mask=mask
        )

    assert _compiled_reports(step) == [Reason.VIEWED]
