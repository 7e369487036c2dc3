"""Who reads a verify mask: exact on a functional graph, where every write makes a new value.

A mask is followed from its builds back to the tensor the first build writes, then forward
through every build to every use. Whatever is not understood counts as a FULL read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchvm.ops.contracts import BUILDERS, MaskRead, MaskReader, mask_readers
from torchvm.ops.layout import TreeMaskMode, tree_mode
from torchvm.ops.library import NAMESPACE
from torchvm.passes.graph import OpCall, Written, called_op, op_call, source_line, symbolic_value
from torchvm.passes.report import ReaderReport, Reason

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = ["Build", "Mask", "Use", "find_builds", "find_masks", "follow_mask"]

ALLOC = f"{NAMESPACE}::alloc_verify_mask"
ATTENTION = f"{NAMESPACE}::tree_attention"

_aten = torch.ops.aten
# Results that depend on the mask's dtype and device alone: their size is an argument.
_METADATA_OPS = frozenset(
    {
        _aten.new_empty.default,
        _aten.new_zeros.default,
        _aten.new_ones.default,
        _aten.new_full.default,
        _aten.new_empty_strided.default,
    }
)
_SIZE_OPS = frozenset({_aten.sym_size.int, _aten.sym_numel.default})
_LIKE_OPS = frozenset(
    {
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.rand_like.default,
        _aten.randn_like.default,
        _aten.sym_size.default,
        _aten.sym_stride.int,
        _aten.sym_stride.default,
        _aten.sym_storage_offset.default,
    }
)


class Build(NamedTuple):
    """A tree build that writes a mask."""

    call: OpCall
    written: Written
    mode_arg: str
    mode: TreeMaskMode | None
    bs: int | torch.SymInt
    num_draft_tokens: int | torch.SymInt
    seq_lens: object


class Use(NamedTuple):
    """A use of a mask's cells, as far as the graph and the contracts tell."""

    node: Node
    op: str
    reads: MaskRead
    reason: Reason | None
    """Why it counts as FULL where no contract says so; None where one speaks."""
    call: OpCall | None = None
    reader: MaskReader | None = None
    build: Build | None = None
    """The build that wrote what is read; None before the first."""

    @property
    def told_mode(self) -> object:
        """What the reader is given as the mask's mode; None where its contract names none."""
        if self.call is None or self.reader is None or self.reader.mode_arg is None:
            return None
        return self.call.arguments[self.reader.mode_arg]

    @property
    def seq_lens(self) -> Node | None:
        """The lengths that the op is given; None where no argument has that name."""
        given = self.call.arguments.get("seq_lens") if self.call is not None else None
        return given if isinstance(given, Node) else None

    @property
    def num_draft_tokens(self) -> int | torch.SymInt | None:
        """The n that the op works with, by the argument of that name; None where there is none."""
        if self.call is None:
            return None
        if self.call.name == ATTENTION:
            n = symbolic_value(self.call.arguments["query"]).shape[1]
        else:
            n = symbolic_value(self.call.arguments.get("num_draft_tokens"))
        return n if isinstance(n, int | torch.SymInt) else None

    def is_shared(self, argument: str | None) -> bool:
        """Whether an argument of the call also says something of another mask of the call."""
        if self.call is None or self.reader is None or argument is None:
            return False
        given = {**self.call.arguments, **self.call.written}
        others = [c for c in mask_readers(self.call.op) if c.arg != self.reader.arg]
        return any(
            argument in (c.mode_arg, c.causal_arg) and given.get(c.arg) is not None for c in others
        )


class Mask(NamedTuple):
    """One mask buffer of a graph and everything that happens to it."""

    root: Node
    """What the first build writes: an `alloc_verify_mask` unless `obstacle` says otherwise."""
    alloc: OpCall | None
    builds: list[Build]
    uses: list[Use]
    sizes: list[Node]
    """Nodes that compute a number from the mask's size."""
    metadata: list[Node]
    """Nodes that take dtype and device of the mask, and nothing else."""
    versions: dict[Node, Build | None]
    """Every value of the whole buffer and the build that wrote it, the root first."""
    obstacle: Reason | None
    """What forbids any other mode, whoever reads."""

    @property
    def mode(self) -> TreeMaskMode:
        """The mode that the allocation declares, or the first build where there is none."""
        declared = _mode(self.alloc.arguments["tree_mask_mode"]) if self.alloc else None
        modes = (declared, *(build.mode for build in self.builds))
        return next((mode for mode in modes if mode is not None), TreeMaskMode.FULL_MASK)

    @property
    def origin(self) -> Node:
        """The tensor behind the root: itself, or what it is a view of."""
        node = self.root
        while _is_view(node):
            node = node.all_input_nodes[0]
        return node

    @property
    def reads(self) -> MaskRead:
        """The largest read of all uses."""
        return max((use.reads for use in self.uses), default=MaskRead.NOTHING)

    def batches(self) -> list[tuple[int | torch.SymInt, int | torch.SymInt]]:
        """(bs, n) of every build and of every reader that is told the mode: it may check the size.

        Zeros where a reader does not say.
        """
        sizes = [(build.bs, build.num_draft_tokens) for build in self.builds]
        for use in self.uses:
            if use.told_mode is not None:
                lengths = symbolic_value(use.seq_lens)
                rows = lengths.shape[0] if lengths is not None and lengths.dim() else 0
                sizes.append((rows, use.num_draft_tokens or 0))
        return sizes

    def readers(self) -> tuple[ReaderReport, ...]:
        """Every use, for a report."""
        return tuple(
            ReaderReport(u.op, u.reads, source_line(u.node), u.node.name) for u in self.uses
        )


def find_masks(graph: Graph) -> list[Mask]:
    """Find every mask that a build in this graph writes, in the order of their roots.

    Args:
        graph: a functional graph; nested graphs (branches of cond and so on) are not entered.
    """
    builds = find_builds(graph)
    version_builds = {v: build for build in builds.values() for v in build.written.versions}
    roots: dict[Node, Node] = {}
    for build in builds.values():
        base = build.written.base
        producer = version_builds.get(base)
        roots[build.call.node] = roots[producer.call.node] if producer else base
    return [_follow(root, builds) for root in dict.fromkeys(roots.values())]


def find_builds(graph: Graph) -> dict[Node, Build]:
    """Return every build of a graph by its node, in graph order."""
    found = ((node, _build(node)) for node in graph.nodes)
    return {node: build for node, build in found if build is not None}


def _build(node: Node) -> Build | None:
    op = called_op(node)
    builder = BUILDERS.get(str(op.name())) if op is not None else None
    call = op_call(node) if builder is not None else None
    if call is None or builder is None:
        return None
    written = call.written.get(builder.mask_arg)
    if written is None:  # A bare call mutates its argument, and what follows is not SSA.
        written = Written(call.arguments[builder.mask_arg], True, (), -1)
    seq_lens = call.arguments[builder.batch_arg]
    return Build(
        call,
        written,
        builder.mode_arg,
        _mode(call.arguments[builder.mode_arg]),
        symbolic_value(seq_lens).shape[0],
        symbolic_value(call.arguments[builder.num_draft_tokens_arg]),
        seq_lens,
    )


def follow_mask(graph: Graph, root: Node) -> Mask:
    """Collect what happens to the mask that begins at a node, built in this graph or not."""
    return _follow(root, find_builds(graph))


def _follow(root: Node, builds: dict[Node, Build]) -> Mask:
    """Collect what happens to the mask that begins at `root`."""
    call = op_call(root)
    alloc = call if call is not None and call.name == ALLOC else None
    mask = Mask(root, alloc, [], [], [], [], {root: None}, None)
    pending = [root]
    for version in pending:  # Grows while it is walked: chains can be long.
        for user in version.users:
            pending.extend(_use(mask, version, user, builds))
    return mask._replace(obstacle=_obstacle(mask))


def _use(mask: Mask, version: Node, user: Node, builds: dict[Node, Build]) -> tuple[Node, ...]:
    """Sort one use of one version into the mask's lists; return the versions it makes."""
    build = builds.get(user)
    if build is not None and build.written.base is version:
        mask.builds.append(build)
        mask.versions.update(dict.fromkeys(build.written.versions, build))
        return build.written.versions
    if user.target in _SIZE_OPS:
        mask.sizes.append(user)
    elif user.target in _METADATA_OPS:
        mask.metadata.append(user)
    elif not _writes_input_back(mask, user, version):
        mask.uses.append(_read(version, user)._replace(build=mask.versions[version]))
    return ()


def _writes_input_back(mask: Mask, user: Node, version: Node) -> bool:
    """Whether this is the copy that ends a graph which mutates its own input.

    It is a user of both the input, which it overwrites, and the last version.
    """
    if user.target is not _aten.copy_.default or user.users or user.args[0] is not mask.root:
        return False
    return version in user.args[:2] and user.args[1] is not mask.root


def _read(version: Node, user: Node) -> Use:
    if user.op == "output":
        return Use(user, "output", MaskRead.FULL, Reason.RETURNED)
    call = op_call(user)
    if call is None:
        name = str(getattr(user.target, "__name__", user.target))
        higher = isinstance(user.target, torch._ops.HigherOrderOperator)
        reason = Reason.HIGHER_ORDER if higher else Reason.NO_CONTRACT
        return Use(user, name, MaskRead.FULL, reason)
    if any(written.base is version for written in call.written.values()):
        return Use(user, call.name, MaskRead.FULL, Reason.OTHER_WRITE)
    names = call.argument_names(version)
    reader = next((c for c in mask_readers(call.op) if [c.arg] == names), None)
    if reader is None or call.arguments[reader.arg] is not version:
        if call.op in _LIKE_OPS:
            return Use(user, call.name, MaskRead.FULL, Reason.SHAPE_READ)
        reason = Reason.VIEWED if call.op.namespace == "aten" else Reason.NO_CONTRACT
        return Use(user, call.name, MaskRead.FULL, reason)
    return Use(user, call.name, reader.read(call.constants), None, call, reader)


def _obstacle(mask: Mask) -> Reason | None:
    """Say what forbids another mode for this mask whoever reads it, if anything does."""
    builds = mask.builds
    if any(not build.call.written for build in builds):
        return Reason.NOT_FUNCTIONAL
    if mask.root.op == "placeholder":
        return Reason.GRAPH_INPUT
    if any(not build.written.whole for build in builds) or _is_view(mask.root):
        return Reason.BUILT_THROUGH_VIEW
    told = [use.told_mode for use in mask.uses if use.told_mode is not None]
    modes = {mask.mode, *(build.mode for build in builds), *map(_mode, told)}
    if len(modes) > 1:
        return Reason.MODE_MISMATCH
    if mask.alloc is None:
        return Reason.NOT_AN_ALLOC
    if mask.mode is not TreeMaskMode.FULL_MASK:
        return Reason.ALREADY_COMPACT
    return None if _holds_every_batch(mask) else Reason.CAPACITY


def _is_view(root: Node) -> bool:
    """Whether the root is a view of an allocation (v1 functionalization keeps such views)."""
    if not isinstance(root.target, torch._ops.OpOverload):
        return False
    returns = root.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def _mode(argument: Any) -> TreeMaskMode | None:
    """Return a constant mode argument; None for anything that is not one of the modes."""
    try:
        return tree_mode(argument)
    except ValueError:
        return None


def _holds_every_batch(mask: Mask) -> bool:
    """Whether the allocation is provably for at least every batch that is built or told."""
    assert mask.alloc is not None
    bs = symbolic_value(mask.alloc.arguments["bs"])
    num_draft_tokens = symbolic_value(mask.alloc.arguments["num_draft_tokens"])
    return all(
        statically_known_true(bs >= rows) and statically_known_true(num_draft_tokens >= n)
        for rows, n in mask.batches()
    )
