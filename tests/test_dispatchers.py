"""Dispatchers: every member of the contract reaches a child, and masks are cut where they must."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any

import pytest
import torch

from torchvm.backends.base import AttentionBackend, VerifyBatch, VerifyConfig
from torchvm.backends.chain import CHAIN
from torchvm.backends.cpu import CPUBackend
from torchvm.backends.flash_attention import FlashAttentionBackend
from torchvm.backends.flashinfer import FlashInferBackend
from torchvm.backends.hybrid_attention import HybridAttnBackend
from torchvm.backends.hybrid_linear import HybridLinearAttnBackend
from torchvm.backends.layers import GroupedQuery, LayerKind, Recurrent, split_layer
from torchvm.backends.linear import LinearAttnBackend
from torchvm.backends.triton import TritonBackend, TritonUnifiedBackend
from torchvm.backends.two_batch import TboAttnBackend, split_batch
from torchvm.ops.layout import TreeMaskMode, mask_storage
from torchvm.ops.tree import DraftTree, build_tree_from_parents

FULL, QLEN, PACKED = TreeMaskMode
N, CONTEXT = 6, 24
MEMBERS = sorted(name for name in vars(AttentionBackend) if not name.startswith("_"))


def config(**options: Any) -> VerifyConfig:
    sizes: dict[str, Any] = {"num_draft_tokens": N, "max_context_len": CONTEXT, "topk": 3}
    return VerifyConfig(**(sizes | options))


def tree_of(bs: int, mode: TreeMaskMode = QLEN, seed: int = 0) -> tuple[DraftTree, VerifyBatch]:
    """Random trees, built into a mask of this layout."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, CONTEXT, (bs,), generator=generator)
    parents = torch.stack(
        [torch.randint(0, max(i, 1), (bs,), generator=generator) for i in range(N)], 1
    )
    numel, dtype = mask_storage(mode, bs, N, CONTEXT)
    mask = torch.zeros(int(numel), dtype=dtype)
    tree = build_tree_from_parents(parents, lengths, mask, num_draft_tokens=N, tree_mask_mode=mode)
    pages = torch.arange(bs, dtype=torch.int32).unsqueeze(1)
    batch = VerifyBatch(
        pages, CONTEXT + N, lengths, tree.positions.view(bs, N), mask, int(mode),
        tree.retrieve_next_token, tree.retrieve_next_sibling, lengths.tolist(),
    )  # fmt: skip
    return tree, batch


def grouped(bs: int, seed: int = 1) -> GroupedQuery:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(bs, N, 4, 8, generator=generator)
    sides = torch.randn(2, bs, CONTEXT + N, 2, 8, generator=generator)
    return GroupedQuery(query, sides[0], sides[1], 8**-0.5)


def recurrent(bs: int, seed: int = 2) -> Recurrent:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, bs, N, 2, 4, generator=generator)
    gate = -torch.rand(bs, N, 2, generator=generator)
    state = torch.randn(bs, 2, 4, 4, generator=generator)
    key = torch.nn.functional.normalize(key, dim=-1)
    return Recurrent(query, key, value, gate, gate.exp(), state, torch.zeros(bs, N, 2, 4, 4), 1.0)


class Log(list[str]):
    """Names of the members that were used, of one child."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = object()


def recorder(log: Log, kind: LayerKind = LayerKind.grouped_query) -> Any:
    """Make a child that has exactly the contract's members, present and future, and logs them."""
    answers: dict[str, Any] = {
        "name": "recorder", "layer_kinds": frozenset({kind}), "config": config(),
        "persistent_buffers": {"own": torch.zeros(2)},
    }  # fmt: skip
    body: dict[str, Any] = {}
    for name in MEMBERS:
        if isinstance(inspect.getattr_static(AttentionBackend, name), property):

            def get(self: Any, name: str = name) -> Any:
                self.log.append(name)
                own = {"verifier": self, "verify_mask": self.log.mask}
                return {**own, **answers}.get(name)

            body[name] = property(get)
        else:

            def call(self: Any, *arguments: Any, name: str = name) -> Any:
                self.log.append(name)
                return arguments[0].query if name == "forward_verify" else None

            body[name] = call
    return recorder_like(type("Recorder", (AttentionBackend,), body), log)


def recorder_like(kind: Any, log: Log) -> Any:
    """Make another child of a type."""
    made = kind()
    made.log = log
    return made


def dispatchers() -> dict[str, tuple[AttentionBackend, list[Log], list[Log], list[Log]]]:
    """Each with the logs of who must be asked, who may be asked, and who must not be."""
    logs = [Log() for _ in range(9)]
    kinds = [LayerKind.grouped_query] * 8 + [LayerKind.recurrent]
    made = [recorder(log, kind) for log, kind in zip(logs, kinds, strict=True)]
    # Children of two-batch overlap own no mask.
    logs[5].mask = logs[6].mask = None
    decode = HybridAttnBackend(made[0], made[1], speculative_attention_mode="decode")
    prefill = HybridAttnBackend(made[2], made[3], speculative_attention_mode="prefill")
    alike = type(made[4])
    halves = [recorder_like(alike, logs[i]) for i in (5, 6)]
    return {
        "decode": (decode, [logs[1]], [], [logs[0]]),
        "prefill": (prefill, [logs[2]], [], [logs[3]]),
        "two-batch": (TboAttnBackend(made[4], (halves[0], halves[1])), [logs[4]], logs[5:7], []),
        "hybrid-linear": (HybridLinearAttnBackend(made[7], made[8]), [logs[7]], [logs[8]], []),
    }


# Members that two-batch overlap asks of its children, and others of both of theirs.
OF_CHILDREN = {
    "init_forward_metadata", "forward_verify", "update_verify_buffers_to_fill_after_draft",
    "init_cuda_graph_state", "persistent_buffers",
}  # fmt: skip
OF_CHILDREN_ALONE = {"init_forward_metadata", "forward_verify"}


BUFFERS = {
    "decode": ["own"], "prefill": ["own"], "hybrid-linear": ["full.own", "linear.own"],
    "two-batch": ["first.own", "primary.own", "second.own"],
}  # fmt: skip


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("which", ["decode", "prefill", "two-batch", "hybrid-linear"])
def test_every_member_reaches_the_child(which: str, member: str) -> None:
    """Members are taken from the contract, so one that is added later is tested too."""
    assert member in AttentionBackend.__abstractmethods__, "an answer that children would lose"
    dispatcher, asked, may_be, never = dispatchers()[which]
    tree, batch = tree_of(4)
    metadata = dispatcher.init_forward_metadata(batch)
    for log in (*asked, *may_be, *never):
        log.clear()
    static = inspect.getattr_static(AttentionBackend, member)
    if isinstance(static, property):
        answer = getattr(dispatcher, member)
        if member == "verify_mask":
            assert answer is asked[0].mask is not None
        if member == "persistent_buffers":
            assert sorted(answer) == BUFFERS[which]
    else:
        known: dict[str, Any] = {
            "max_bs": 4, "batch": batch, "tree": tree, "layer": grouped(4), "metadata": metadata,
        }  # fmt: skip
        names = list(inspect.signature(static).parameters)[1:]
        assert set(names) <= set(known), f"give {member} an example of {names}"
        getattr(dispatcher, member)(*(known[name] for name in names))
    if which == "two-batch" and member in OF_CHILDREN:
        assert all(member in log for log in may_be)
    if which == "hybrid-linear" and member in OF_CHILDREN - {"forward_verify"}:
        assert member in may_be[0]
    if not (which == "two-batch" and member in OF_CHILDREN_ALONE):
        assert member in asked[0]
    assert not [name for log in never for name in log if name != "name"]


def test_a_dispatcher_that_forgets_a_member_cannot_be_made() -> None:
    class Grown(AttentionBackend):
        @property
        @abstractmethod
        def later(self) -> int: ...

    class Behind(HybridAttnBackend, Grown):
        pass

    with pytest.raises(TypeError, match=r"abstract .*later"):
        Behind(CPUBackend(config()), CPUBackend(config()), speculative_attention_mode="decode")  # type: ignore[abstract]


def test_delegating_by_getattr_loses_a_member_that_a_base_class_answers() -> None:
    """Why the contract has no answers of its own: this is how a mask was lost."""

    class WithAnswers:
        @property
        def verify_mask(self) -> Any:
            return None

    class ByGetattr(WithAnswers):
        def __init__(self, primary: Any) -> None:
            self.primary = primary

        def __getattr__(self, name: str) -> Any:
            return getattr(self.primary, name)

    primary = CPUBackend(config())
    primary.init_cuda_graph_state(4)
    assert primary.verify_mask is not None
    assert ByGetattr(primary).verify_mask is None
    assert TboAttnBackend(primary, (primary, primary)).verify_mask is primary.verify_mask


@pytest.mark.parametrize(("mode", "verifying"), [("decode", "triton"), ("prefill", "cpu")])
def test_hybrid_attention_has_the_buffer_of_the_child_that_verifies(
    mode: Any, verifying: str
) -> None:
    """The flag alone was forwarded once, and so every step made a mask of its own."""
    prefill, decode = CPUBackend(config()), TritonBackend(config())
    hybrid = HybridAttnBackend(prefill, decode, speculative_attention_mode=mode)
    hybrid.init_cuda_graph_state(4)
    child, other = (decode, prefill) if mode == "decode" else (prefill, decode)
    assert child.name == verifying
    assert other.verify_mask is None
    assert hybrid.verify_mask is not None
    assert hybrid.verify_mask is child.verify_mask
    assert hybrid.verify_mask.buffer.dtype is child.mask_dtype
    assert hybrid.verifier is child
    assert f"{verifying}*" in hybrid.name


def test_hybrid_attention_refuses_another_mode() -> None:
    child = CPUBackend(config())
    with pytest.raises(ValueError, match="must be 'decode' or 'prefill', got 'verify'"):
        HybridAttnBackend(child, child, speculative_attention_mode="verify")  # type: ignore[arg-type]


def test_a_mask_is_cut_at_the_offset_of_its_layout() -> None:
    n, lengths = 3, [10, 15]
    seq_lens = torch.tensor(lengths)
    pages = torch.zeros(2, 1, dtype=torch.int32)
    cells = torch.arange(99, dtype=torch.uint8)
    for mode, sizes in ((FULL, (39, 54)), (QLEN, (9, 9)), (PACKED, (3, 3))):
        batch = VerifyBatch(
            pages, 64, seq_lens, torch.zeros(2, n), cells, int(mode), seq_lens_cpu=lengths
        )
        first, second = split_batch(batch, 1)
        assert first.tree_mask is not None
        assert second.tree_mask is not None
        assert (first.tree_mask.numel(), second.tree_mask.numel()) == sizes
        assert first.tree_mask.tolist() == list(range(sizes[0]))
        assert second.tree_mask.tolist() == list(range(sizes[0], sum(sizes)))
        assert second.tree_mask.data_ptr() == cells.data_ptr() + sizes[0]
        assert (first.seq_lens.tolist(), second.seq_lens_cpu) == ([10], [15])
    with pytest.raises(ValueError, match=r"seq_lens_cpu must be the lengths on the host.*None"):
        split_batch(batch._replace(tree_mask_mode=int(FULL), seq_lens_cpu=None), 1)
    with pytest.raises(ValueError, match=r"tree_mask must be of at least 93 elements .* got 92"):
        split_batch(batch._replace(tree_mask_mode=int(FULL), tree_mask=cells[:92]), 1)


@pytest.mark.parametrize("bs", [1, 2, 5])
@pytest.mark.parametrize(
    ("leaf", "modes"),
    [
        (CPUBackend, (FULL, QLEN, PACKED)),
        (FlashAttentionBackend, (FULL, QLEN, PACKED)),
        (TritonUnifiedBackend, (FULL,)),
        (FlashInferBackend, (FULL,)),
    ],
)
def test_two_halves_attend_as_one_batch(leaf: type[Any], modes: Any, bs: int) -> None:
    child = config(owns_mask=False)
    whole, layer = leaf(config()), grouped(bs)
    two = TboAttnBackend(leaf(config()), (leaf(child), leaf(child)))
    answers = []
    for mode in modes:
        _, batch = tree_of(bs, mode)
        for backend in (whole, two):
            metadata = backend.init_forward_metadata(batch)
            answers.append(backend.forward_verify(layer, metadata))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-5, atol=1e-5)
    # Another mask gives another answer.
    assert batch.tree_mask is not None
    cleared = batch._replace(tree_mask=torch.zeros_like(batch.tree_mask))
    metadata = two.init_forward_metadata(cleared)
    assert not torch.allclose(two.forward_verify(layer, metadata), answers[0])


def test_back_ends_that_are_no_pair_are_refused() -> None:
    cpu, triton = CPUBackend(config()), TritonBackend(config())
    message = r"children must be two 'cpu' back ends made like the primary .*, got .*"
    with pytest.raises(ValueError, match=message + "'triton'"):
        TboAttnBackend(cpu, (cpu, triton))
    chain = CPUBackend(config(topk=1))
    with pytest.raises(ValueError, match=message):
        TboAttnBackend(cpu, (chain, chain))

    class Other(CPUBackend):
        pass

    with pytest.raises(ValueError, match=message):
        TboAttnBackend(cpu, (Other(config()), cpu))
    owning = TboAttnBackend(cpu, (CPUBackend(config()), CPUBackend(config())))
    with pytest.raises(ValueError, match="children must own no mask"):
        owning.init_cuda_graph_state(2)


def test_links_that_come_after_the_metadata_reach_the_linear_child() -> None:
    """With a plan stream metadata is made while the draft runs: links must be copied after."""
    bs, layer = 4, recurrent(4)
    hybrid = HybridLinearAttnBackend(CPUBackend(config()), LinearAttnBackend(config()))
    hybrid.init_cuda_graph_state(bs)
    stale, old = tree_of(bs, seed=3)
    fresh, batch = tree_of(bs, seed=4)
    hybrid.update_verify_buffers_to_fill_after_draft(stale)
    planned = batch._replace(retrieve_next_token=None, retrieve_next_sibling=None)
    metadata = hybrid.init_forward_metadata(planned)
    expected = hybrid.forward_verify(layer, hybrid.init_forward_metadata(batch))
    of_stale = hybrid.forward_verify(layer, hybrid.init_forward_metadata(old))
    assert not torch.allclose(expected, of_stale)
    # Without the hook, which a dispatcher once dropped, the last step's links are used.
    assert torch.equal(hybrid.forward_verify(layer, metadata), of_stale)
    addresses = [links.data_ptr() for links in metadata.linear]
    hybrid.update_verify_buffers_to_fill_after_draft(fresh)
    assert torch.equal(hybrid.forward_verify(layer, metadata), expected)
    assert [links.data_ptr() for links in metadata.linear] == addresses


def test_the_hook_goes_through_dispatchers_of_dispatchers() -> None:
    def make(**options: Any) -> HybridLinearAttnBackend:
        return HybridLinearAttnBackend(
            CPUBackend(config(**options)), LinearAttnBackend(config(**options))
        )

    two = TboAttnBackend(make(), (make(owns_mask=False), make(owns_mask=False)))
    both = HybridAttnBackend(make(owns_mask=False), two, speculative_attention_mode="decode")
    both.init_cuda_graph_state(5)
    tree, batch = tree_of(5)
    metadata = both.init_forward_metadata(
        batch._replace(retrieve_next_token=None, retrieve_next_sibling=None)
    )
    both.update_verify_buffers_to_fill_after_draft(tree)
    whole = make()
    for layer in (recurrent(5), grouped(5)):
        expected = whole.forward_verify(layer, whole.init_forward_metadata(batch))
        torch.testing.assert_close(both.forward_verify(layer, metadata), expected)
    assert both.verify_mask is two.primary.verify_mask
    assert both.verify_mask is not None


@pytest.mark.parametrize(("real", "padded"), [(5, 8), (1, 2), (1, 4), (3, 3)])
def test_links_of_a_padded_batch_are_cut_where_its_metadata_is(real: int, padded: int) -> None:
    """Metadata is made for the padded batch, and the draft ends with the real one."""
    options = {"owns_mask": False}
    linear = LinearAttnBackend(config())
    two = TboAttnBackend(
        linear, (LinearAttnBackend(config(**options)), LinearAttnBackend(config(**options)))
    )
    two.init_cuda_graph_state(padded)
    _, batch = tree_of(padded, seed=5)
    tree, fresh = tree_of(real, seed=6)
    metadata = two.init_forward_metadata(
        batch._replace(retrieve_next_token=None, retrieve_next_sibling=None)
    )
    two.update_verify_buffers_to_fill_after_draft(tree)
    layer = recurrent(padded)
    found = two.forward_verify(layer, metadata)[:real]
    alone, _ = split_layer(layer, real)
    expected = linear.forward_verify(alone, linear.init_forward_metadata(fresh))
    torch.testing.assert_close(found, expected)


def test_links_need_their_buffer() -> None:
    tree, batch = tree_of(4)
    backend = LinearAttnBackend(config())
    without = batch._replace(retrieve_next_token=None)
    with pytest.raises(ValueError, match=r"called for at least 4 requests .*, got 0"):
        backend.init_forward_metadata(without)
    backend.update_verify_buffers_to_fill_after_draft(tree)
    backend.init_cuda_graph_state(3)
    with pytest.raises(ValueError, match=r"called for at least 4 requests .*, got 3"):
        backend.update_verify_buffers_to_fill_after_draft(tree)
    backend.init_cuda_graph_state(4)
    backend.update_verify_buffers_to_fill_after_draft(tree)
    kept = backend.init_forward_metadata(without)
    assert torch.equal(kept.next_token, tree.retrieve_next_token)
    backend.init_cuda_graph_state(2)
    assert backend.init_forward_metadata(without).next_token.data_ptr() == kept[0].data_ptr()


def test_children_of_other_kinds_are_refused() -> None:
    cpu, linear = CPUBackend(config()), LinearAttnBackend(config())
    with pytest.raises(ValueError, match="full must attend with a cache, got 'linear'"):
        HybridLinearAttnBackend(linear, linear)
    with pytest.raises(ValueError, match="linear must be a back end of linear layers, got 'cpu'"):
        HybridLinearAttnBackend(cpu, cpu)
    with pytest.raises(ValueError, match=r"same topk and num_draft_tokens, got \[\(3, 6\), "):
        HybridLinearAttnBackend(cpu, CHAIN)
