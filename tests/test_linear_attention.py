"""torchvm::gated_delta_tree against each node's whole path in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import maskless_reference
from tests.maskless_cases import Linear, draw_linear, draw_parents
from torchvm.ops.kernels.cpu_linear import parents_from_links
from torchvm.ops.linear_attention import GatedDeltaTree, gated_delta_tree
from torchvm.ops.tree import build_tree_from_parents

if TYPE_CHECKING:
    from collections.abc import Callable


def run(case: Linear) -> GatedDeltaTree:
    return gated_delta_tree(*case[:-1], scale=case.scale)


@pytest.mark.parametrize("n", [1, 2, 9, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_whole_paths_rounded_once(dtype: torch.dtype, n: int) -> None:
    parents = draw_parents(4, n, seed=n)
    case = draw_linear(parents, dtype=dtype, seed=n)
    found = run(case)
    assert (found.output.dtype, found.states.dtype) == (dtype, torch.float32)
    assert found.output.is_contiguous()
    assert found.states.is_contiguous()
    output, states = maskless_reference.gated_delta_tree(*case[:6], parents, case.scale)
    once = 0.51 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.output.double(), output, rtol=once, atol=1e-5)
    torch.testing.assert_close(found.states.double(), states, rtol=0, atol=1e-5)


def test_links_of_the_tree_builder() -> None:
    """Whose siblings and children are what the op follows."""
    parents = [[0, 0, 0, 1, 2, 2, 0, 4], [0, 0, 1, 2, 3, 4, 5, 6]]
    built = build_tree_from_parents(
        torch.tensor(parents), torch.tensor([3, 0]), torch.zeros(128, dtype=torch.bool),
        num_draft_tokens=8, tree_mask_mode=1,
    )  # fmt: skip
    case = draw_linear(parents)._replace(
        retrieve_next_token=built.retrieve_next_token,
        retrieve_next_sibling=built.retrieve_next_sibling,
    )
    above = [[-1, *row[1:]] for row in parents]
    want = maskless_reference.gated_delta_tree(*case[:6], above, case.scale)
    torch.testing.assert_close(run(case).states.double(), want[1], rtol=0, atol=1e-5)


def test_a_small_case_by_hand() -> None:
    """One number a state: 8, halved by every gate, moved towards the value by beta times k."""
    rows = {"gate": [0.5] * 3, "beta": [1.0, 0.5, 0.25], "value": [1.0, 1.0, 3.0]}
    gate, beta, value = (torch.tensor(row).view(1, 3, 1) for row in rows.values())
    keys = torch.tensor([1.0, 1.0, 2.0]).view(1, 3, 1, 1)
    # Both later nodes are the root's children.
    case = Linear(
        torch.full((1, 3, 1, 1), 2.0), keys, value[..., None], gate.log(), beta,
        torch.full((1, 1, 1, 1), 8.0), torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]]),
        10.0,
    )  # fmt: skip
    found = run(case)
    states = torch.tensor([1.0, 0.5 + 0.5 * 0.5, 0.5 + 2 * 0.25 * (3 - 2 * 0.5)])
    torch.testing.assert_close(found.states.flatten(), states)
    torch.testing.assert_close(found.output.flatten(), 20 * states)


@pytest.mark.parametrize(
    ("children", "siblings", "parents"),
    [
        ([-1], [-1], [-1]),
        ([1, 2, -1], [-1, -1, -1], [-1, 0, 1]),
        ([1, -1, -1, -1], [-1, 2, 3, -1], [-1, 0, 0, 0]),
        # Itself, an earlier node, no node.
        ([0, 0, 3, 4], [-1, 1, 0, 2**62], [-1, -1, -1, 2]),
        ([-(2**63), 2**62, 3, -1], [1, -1, -1, -1], [-1, -1, -1, 2]),
        # Of two links the first node's, and of one node's two the child's.
        ([2, 2, 3, 3], [-1, 3, -1, -1], [-1, -1, 0, -1]),
        ([1, 2, 3, -1], [-1, 2, -1, -1], [-1, 0, 1, 2]),
    ],
)
def test_parents_of_links(children: list[int], siblings: list[int], parents: list[int]) -> None:
    assert parents_from_links(children, siblings) == parents


def test_malformed_links_change_no_other_request() -> None:
    parents = draw_parents(3, 6, seed=1)
    case = draw_linear(parents)
    expected = run(case)
    case.retrieve_next_token[1] = torch.tensor([6, 2**62, -(2**63), 3, 1, 0])
    case.retrieve_next_sibling[1] = torch.tensor([-9, 1, 1, 2**40, 5, 6])
    found = run(case)
    for mine, want in zip(found, expected, strict=True):
        assert torch.equal(mine[::2], want[::2])
        assert mine.isfinite().all()


def test_inputs_may_be_strided() -> None:
    case = draw_linear(draw_parents(3, 6, seed=2))
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in case[:-1]]
    for mine, want in zip(gated_delta_tree(*turned, scale=case.scale), run(case), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("batch", [2, 0])
def test_opcheck(batch: int) -> None:
    case = draw_linear(draw_parents(batch, 3, seed=3))
    torch.library.opcheck(torch.ops.torchvm.gated_delta_tree.default, tuple(case))
    found = run(case)
    assert found.output.shape == (batch, 3, 2, 7)
    assert found.states.shape == (batch, 3, 2, 5, 7)


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def attend(*case: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, states = torch.ops.torchvm.gated_delta_tree(*case, 0.3)
        return output, states

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for batch, n, heads, key_width, value_width in ((4, 6, 2, 5, 7), (2, 9, 3, 4, 4)):
        case = draw_linear(
            draw_parents(batch, n, seed=4),
            heads=heads, key_width=key_width, value_width=value_width,
        )  # fmt: skip
        for mine, want in zip(compiled(*case[:-1]), run(case), strict=True):
            assert torch.equal(mine, want)
    assert len(graphs) == 1


def test_a_gate_of_zero_keeps_and_of_minus_infinity_forgets() -> None:
    case = draw_linear([[-1, 0, 1]])
    case = case._replace(beta=torch.zeros_like(case.beta))
    case.gate[:] = 0.0
    case.gate[:, 2] = -math.inf
    states = run(case).states
    assert torch.equal(states[:, 1], case.initial_state)
    assert torch.equal(states[:, 2], torch.zeros_like(case.initial_state))


ERRORS: list[tuple[Callable[[Linear], dict[str, Any]], str]] = [
    (lambda c: {"query": c.query[0]}, "query must be 4-D"),
    (lambda c: {"query": c.query.double()}, "query must be float32, float16 or bfloat16, got"),
    (lambda c: {"query": c.query[:, :0]}, "query must be of at least one draft token"),
    (lambda c: {"query": c.query[..., :0]}, "query must be of Dk >= 1"),
    (lambda c: {"key": c.key[..., :2]}, "key must be of shape"),
    (lambda c: {"value": c.value[:, :, 0]}, "value must be 4-D"),
    (lambda c: {"value": c.value.half()}, r"value must be torch\.float32, got torch\.float16"),
    (lambda c: {"gate": c.gate.half()}, r"gate must be torch\.float32, got torch\.float16"),
    (lambda c: {"beta": c.beta[:, :2]}, "beta must be of shape"),
    (lambda c: {"beta": c.beta.to("meta")}, "beta must be on cpu, got meta"),
    (lambda c: {"initial_state": c.initial_state.mT}, "initial_state must be of shape"),
    (lambda c: {"retrieve_next_token": c.retrieve_next_token.int()}, "retrieve_next_token must"),
    (lambda c: {"retrieve_next_sibling": c.retrieve_next_sibling[:1]}, "next_sibling must be of"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors_name_the_argument(
    change: Callable[[Linear], dict[str, Any]], message: str
) -> None:
    case = draw_linear(draw_parents(2, 4, seed=5))
    with pytest.raises(ValueError, match=message):
        run(case._replace(**change(case)))
