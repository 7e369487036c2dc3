"""Checks for the tests of those who register mask readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torchvm.errors import MaskContractError
from torchvm.ops.contracts import MaskRead, mask_readers
from torchvm.ops.layout import (
    TreeMaskMode,
    live_mask_numel,
    mask_dtypes,
    tree_mode,
    tree_row_numel,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from torchvm.ops.contracts import MaskReader

__all__ = ["check_mask_contract"]

PAST, TREE, PREFIX = 0, 1, 2
"""What an element of a mask buffer is."""

MOST_TRIES = 300
"""Runs of the op spent on finding which elements matter."""


def check_mask_contract(
    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mask_arg: str,
    seq_lens: Tensor,
    num_draft_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Hold an op to its registered contract: what it says it does not read must not matter.

    The op runs with the arguments as they are, and again with every element that it claims not
    to read replaced, by zeros and by ones (255 in uint8). Results and arguments that it writes
    must be the same to the bit. TREE_BLOCK leaves the prefix columns and everything past the
    batch unread; the bits that fill up a packed row are zeros and may be relied upon.

    A claim of NOTHING is tried with other buffers too, as the passes make them: an empty one for
    an op without a mode argument; for one that is told the mode the smallest of each mode that it
    takes; and None for an optional mask whose causal argument is set.

    Args:
        op: an op with a contract, by overload or as `"namespace::name"`.
        args: its positional arguments. Nothing in them is changed.
        kwargs: its keyword arguments.
        mask_arg: name of the mask argument. It is a 1-D bool or uint8 mask in these arguments.
        seq_lens: (B,) int64 or int32, committed length of each request in the mask.
        num_draft_tokens: n, root included.
        tree_mask_mode: the `TreeMaskMode` in which the mask is laid out, and of which the op is
            told if its contract has a `mode_arg`.

    Raises:
        MaskContractError: when something that the op claims not to read changes its results; it
            names the op, the argument and an element that matters.
        TypeError: when an argument has the wrong type or the op cannot be called so.
        ValueError: when the op has no contract for `mask_arg` or writes it, a size or mode does
            not fit, or the op does not give the same results twice.
    """
    call = _Call.bind(op, args, kwargs)
    mode = tree_mode(tree_mask_mode)
    contract, mask = _contract(call, mask_arg, mode)
    lengths = _lengths(seq_lens)
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be >= 1, got {num_draft_tokens}")
    least = live_mask_numel(mode, len(lengths), num_draft_tokens, sum(lengths))
    if mask.numel() < least:
        raise ValueError(
            f"{mask_arg} must be of at least {least} elements for {mode.name} with these "
            f"seq_lens, got {mask.numel()}"
        )
    expected = call.run()
    if not _same(expected, call.run()):
        raise ValueError(f"{call.name} must give the same results when called twice")
    claim = contract.read(call.constants)
    layout = _Layout(mode, lengths, num_draft_tokens)
    for poison in (0, 1) if mask.dtype is torch.bool else (0, 255):
        _check_cells(call, contract, claim, layout, expected, poison)
    if claim is MaskRead.NOTHING:
        for change, words in _other_buffers(call, contract, layout):
            outcome = _outcome(call, change)
            if not _same(expected, outcome):
                raise MaskContractError(_complaint(call, contract, claim, words, outcome))


class _Call(NamedTuple):
    """An op and its arguments by name, defaults included."""

    op: torch._ops.OpOverload
    arguments: dict[str, Any]

    @classmethod
    def bind(cls, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        overload = _overload(op)
        schema = overload._schema.arguments
        names = [argument.name for argument in schema]
        given = dict(zip(names, args, strict=False))
        doubled, unknown = given.keys() & kwargs.keys(), kwargs.keys() - set(names)
        known = {**given, **kwargs}
        missing = [a.name for a in schema if a.name not in known and not a.has_default_value()]
        if len(args) > len(names) or doubled or unknown or missing:
            raise TypeError(
                f"args and kwargs must fit {overload._schema}, got {len(args)} positional, "
                f"{sorted(kwargs)} by name and none for {missing}"
            )
        defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
        return cls(overload, {**defaults, **known})

    @property
    def name(self) -> str:
        return str(self.op.name())

    @property
    def written(self) -> list[str]:
        arguments = self.op._schema.arguments
        return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    @property
    def constants(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.arguments.items()
            if not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value))
        }

    def run(self, **changed: Any) -> list[Any]:
        """Call the op on copies of what it writes; return its results and what it wrote."""
        given = {**self.arguments, **changed}
        mine = {name: pytree.tree_map(_copied, given[name]) for name in self.written}
        devices = {v.device for v in pytree.tree_leaves(given) if isinstance(v, torch.Tensor)}
        with torch.no_grad(), torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
            torch.manual_seed(0)
            result = self.op(**{**given, **mine})
        return pytree.tree_leaves((result, mine))


class _Layout(NamedTuple):
    """Where a batch lies in a buffer."""

    mode: TreeMaskMode
    lengths: list[int]
    n: int

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Request, node, first element and number of prefix columns of each row."""
        start, width = 0, int(tree_row_numel(self.mode, self.n))
        for request, length in enumerate(self.lengths):
            prefix = length if self.mode is TreeMaskMode.FULL_MASK else 0
            for node in range(self.n):
                yield request, node, start, prefix
                start += prefix + width

    def kinds(self, numel: int) -> Tensor:
        """Say of every element whether it is PREFIX, TREE or PAST the batch."""
        kinds = torch.full((numel,), PAST, dtype=torch.uint8)
        width = int(tree_row_numel(self.mode, self.n))
        for _, _, start, prefix in self.rows():
            kinds[start : start + prefix] = PREFIX
            kinds[start + prefix : start + prefix + width] = TREE
        return kinds

    def describe(self, element: int) -> str:
        """Name the cell that an element holds."""
        width = int(tree_row_numel(self.mode, self.n))
        for request, node, start, prefix in self.rows():
            if start <= element < start + prefix + width:
                column = element - start
                part = "tree byte" if self.mode is TreeMaskMode.QLEN_ONLY_BITPACKING else "tree"
                where = f"prefix column {column}" if column < prefix else f"{part} column {{}}"
                where = where.format(column - prefix)
                return f"element {element} (request {request}, node {node}, {where})"
        return f"element {element} (past the batch)"


def _overload(op: Any) -> torch._ops.OpOverload:
    if isinstance(op, torch._ops.OpOverload):
        return op
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op.default
    if not isinstance(op, str):
        raise TypeError(f'op must be a registered op or "namespace::name", got {op!r}')
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"op must be a registered op, got {op!r}") from error
    assert isinstance(found, torch._ops.OpOverload)
    return found


def _contract(call: _Call, mask_arg: str, mode: TreeMaskMode) -> tuple[MaskReader, Tensor]:
    contract = next((c for c in mask_readers(call.op) if c.arg == mask_arg), None)
    if contract is None:
        known = [c.arg for c in mask_readers(call.op)]
        raise ValueError(
            f"mask_arg must be an argument of {call.name} that has a contract, out of {known}, "
            f"got {mask_arg!r}"
        )
    if mask_arg in call.written:
        raise ValueError(f"mask_arg must be an argument that {call.name} does not write")
    mask = call.arguments[mask_arg]
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{mask_arg} must be a tensor, got {mask!r}")
    dtypes = mask_dtypes(mode)
    if mask.dim() != 1 or mask.dtype not in dtypes:
        raise ValueError(
            f"{mask_arg} must be 1-D and of {' or '.join(map(str, dtypes))} for {mode.name}, got "
            f"{mask.dim()}-D of {mask.dtype}"
        )
    if mode not in contract.modes:
        taken = [TreeMaskMode(m).name for m in sorted(contract.modes)]
        raise ValueError(f"tree_mask_mode must be out of {taken}, got {mode.name}")
    told = call.arguments[contract.mode_arg] if contract.mode_arg is not None else mode
    if told != mode:
        raise ValueError(f"{contract.mode_arg} must be tree_mask_mode, {mode.value}, got {told}")
    return contract, mask


def _lengths(seq_lens: Any) -> list[int]:
    if not isinstance(seq_lens, torch.Tensor):
        raise TypeError(f"seq_lens must be a tensor, got {seq_lens!r}")
    if seq_lens.dim() != 1 or seq_lens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"seq_lens must be 1-D and int64 or int32, got {seq_lens.dim()}-D of {seq_lens.dtype}"
        )
    lengths: list[int] = seq_lens.tolist()
    if min(lengths, default=0) < 0:
        raise ValueError(f"seq_lens must be >= 0, got {lengths}")
    return lengths


def _check_cells(
    call: _Call,
    contract: MaskReader,
    claim: MaskRead,
    layout: _Layout,
    expected: list[Any],
    poison: int,
) -> None:
    """Replace what the op claims not to read, and find an element that matters if one does."""
    mask = call.arguments[contract.arg]
    kinds = layout.kinds(mask.numel())
    unread = {MaskRead.NOTHING: kinds >= PAST, MaskRead.TREE_BLOCK: kinds != TREE}.get(claim)
    if unread is None:
        return

    def outcome(elements: Tensor) -> list[Any] | Exception:
        changed = mask.clone()
        changed[elements.to(mask.device)] = poison
        return _outcome(call, {contract.arg: changed})

    elements = unread.nonzero().view(-1)
    first = outcome(elements)
    if _same(expected, first):
        return
    elements = _smallest(elements, lambda some: not _same(expected, outcome(some)))
    places = ", ".join(layout.describe(int(e)) for e in elements[:3])
    more = f" and {len(elements) - 3} more" if len(elements) > 3 else ""
    words = f"{places}{more} set to {poison}"
    raise MaskContractError(_complaint(call, contract, claim, words, outcome(elements)))


def _smallest(elements: Tensor, matter: Callable[[Tensor], bool]) -> Tensor:
    """Leave out ever smaller pieces of a set that matters as long as the rest does."""
    size, start, tries = len(elements) // 2, 0, 0
    while size and tries < MOST_TRIES:
        rest = torch.cat([elements[:start], elements[start + size :]])
        tries += 1
        if len(rest) and matter(rest):
            elements = rest
        else:
            start += size
        if start >= len(elements):
            size, start = size // 2, 0
    return elements


def _other_buffers(
    call: _Call, contract: MaskReader, layout: _Layout
) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of the arguments under which a claim of NOTHING must hold, and words for each."""
    mask, batch = call.arguments[contract.arg], len(layout.lengths)
    if contract.mode_arg is None:
        yield {contract.arg: mask.new_empty(0)}, "an empty mask"
    else:
        for mode in sorted(contract.modes):
            numel = live_mask_numel(mode, batch, layout.n, sum(layout.lengths))
            packed = mode is TreeMaskMode.QLEN_ONLY_BITPACKING
            other = mask.new_ones(numel, dtype=torch.uint8 if packed else mask.dtype)
            words = f"a {mode.name} mask of {numel} elements"
            yield {contract.arg: other, contract.mode_arg: int(mode)}, words
    schema = {a.name: a for a in call.op._schema.arguments}
    optional = isinstance(schema[contract.arg].type, torch.OptionalType)
    if optional and contract.causal_arg and call.arguments[contract.causal_arg] is True:
        yield {contract.arg: None}, "no mask"


def _outcome(call: _Call, changed: dict[str, Any]) -> list[Any] | Exception:
    """What the op does with changed arguments: its results, or what it raises."""
    try:
        return call.run(**changed)
    except Exception as error:
        return error


def _complaint(
    call: _Call, contract: MaskReader, claim: MaskRead, words: str, outcome: list[Any] | Exception
) -> str:
    effect = "changes its results"
    if isinstance(outcome, Exception):
        effect = f"makes it raise {type(outcome).__name__}: {outcome}"
    return f"{call.name} claims to read {claim.name} of {contract.arg}, but {words} {effect}"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(expected: list[Any], actual: list[Any] | Exception) -> bool:
    if isinstance(actual, Exception) or len(expected) != len(actual):
        return False
    return all(map(_same_bits, expected, actual))


def _same_bits(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return type(expected) is type(actual) and bool(expected == actual)
    if not isinstance(actual, torch.Tensor) or expected.dtype is not actual.dtype:
        return False
    return expected.shape == actual.shape and torch.equal(_bits(expected), _bits(actual))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
