"""Device functions that the tree kernel is made of: parents, ancestor rows, stores, prefixes."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Requests whose lengths are scanned at once.
LENGTH_BLOCK = tl.constexpr(256)
# Eight-byte words that one step of a prefix fill writes: 16 bytes for each of 128 threads, twice.
FILL_BLOCK = tl.constexpr(512)
NOT_FOUND = tl.constexpr(-1)
LARGEST = tl.constexpr(2**63 - 1)


@triton.jit
def length_of(
    seq_lens: tl.tensor, request: tl.tensor, live: tl.tensor, numel: tl.tensor
) -> tl.tensor:
    """Committed length for the purpose of offsets: int64, within [0, numel].

    A length past the buffer puts every later cell outside it either way; the bound keeps sums of
    garbage from wrapping back inside.
    """
    length = tl.load(seq_lens + request, mask=live, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), numel)


@triton.jit
def live_cells(
    seq_lens: tl.tensor, first_requests: tl.tensor, num_draft_tokens: tl.tensor, numel: tl.tensor
) -> tl.tensor:
    """Cells of the requests before `first_requests` in FULL_MASK: sum of n * (L + n), int64."""
    n = tl.cast(num_draft_tokens, tl.int64)
    total = tl.cast(0, tl.int64)
    for start in range(0, first_requests, LENGTH_BLOCK):
        request = start + tl.arange(0, LENGTH_BLOCK)
        live = request < first_requests
        length = length_of(seq_lens, request, live, numel)
        total += tl.sum(tl.where(live, n * (length + n), 0), axis=0)
    return total


@triton.jit
def request_at(
    cell: tl.tensor,
    seq_lens: tl.tensor,
    batch: tl.tensor,
    num_draft_tokens: tl.tensor,
    numel: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Which request holds a live cell of FULL_MASK, and the cell where that request begins."""
    n = tl.cast(num_draft_tokens, tl.int64)
    index = tl.cast(0, tl.int32)
    begin = tl.cast(0, tl.int64)
    total = tl.cast(0, tl.int64)
    for start in range(0, batch, LENGTH_BLOCK):
        request = start + tl.arange(0, LENGTH_BLOCK)
        live = request < batch
        length = length_of(seq_lens, request, live, numel)
        size = tl.where(live, n * (length + n), 0)
        end = total + tl.cumsum(size, axis=0)
        before = live & (end <= cell)
        index += tl.sum(before.to(tl.int32), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(before, end, 0), axis=0))
        total += tl.sum(size, axis=0)
    return index, begin


@triton.jit
def parents_from_candidates(
    node: tl.tensor,
    selected: tl.tensor,
    parent_list: tl.tensor,
    num_draft_tokens: tl.tensor,
    topk: tl.tensor,
    parent_width: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Parent of each node by the candidate ids of one request, NOT_FOUND where there is none.

    Args:
        node: int32 block of node indices.
        selected: pointer to the request's n - 1 ascending candidate ids, int64.
        parent_list: pointer to the request's `parent_width` parent ids, int64.
        num_draft_tokens: n.
        topk: candidates per beam.
        parent_width: entries of `parent_list` that may be read.
        BLOCK_N: power of two, at least n.
    """
    live = (node > 0) & (node < num_draft_tokens)
    candidate = tl.load(selected + node - 1, mask=live, other=-1)
    live &= candidate >= 0
    beam = tl.where(live, candidate, 0) // topk
    listed = live & (beam > 0) & (beam < parent_width)
    wanted = tl.load(parent_list + beam, mask=listed, other=-1)
    listed &= wanted >= 0
    # How many of the node - 1 ids before the node's own are smaller than the wanted one.
    smaller = tl.zeros_like(node)
    before = selected - 1
    step = BLOCK_N // 2
    while step > 0:
        probe = smaller + step
        held = tl.load(before + probe, mask=listed & (probe < node), other=LARGEST)
        smaller = tl.where(held < wanted, probe, smaller)
        step = step // 2
    held = tl.load(selected + smaller, mask=listed & (smaller + 1 < node), other=-1)
    found = tl.where(listed & (held == wanted), smaller + 1, NOT_FOUND)
    return tl.where(live & (beam == 0), 0, found)


@triton.jit
def parents_from_nodes(
    node: tl.tensor, parents: tl.tensor, num_draft_tokens: tl.tensor
) -> tl.tensor:
    """Parent of each node as one request's int64 row names it, NOT_FOUND unless in [0, node)."""
    live = (node > 0) & (node < num_draft_tokens)
    parent = tl.load(parents + node, mask=live, other=-1)
    return tl.where((parent >= 0) & (parent < node), parent, NOT_FOUND).to(tl.int32)


@triton.jit
def ancestor_bits(
    row: tl.tensor, parent: tl.tensor, limit: tl.tensor, ROWS: tl.constexpr, WORDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Walk from each row's node towards the root, at most `limit` steps.

    Args:
        row: int32 [ROWS], node indices.
        parent: int32 [BLOCK_N], the parent of every node of the request.
        limit: most steps of the walk.
        ROWS: rows of this tile.
        WORDS: 32-bit words of a row.

    Returns:
        uint32 [ROWS, WORDS] with bit j % 32 of word j // 32 for the root, the node itself and
        each ancestor found; int32 [ROWS], how many of those there are beyond the root.
    """
    word = tl.arange(0, WORDS)[None, :]
    one = tl.full([ROWS], 1, tl.uint32)
    bits = tl.where((row >> 5)[:, None] == word, (one << (row & 31).to(tl.uint32))[:, None], 0)
    bits |= (word == 0).to(tl.uint32)
    count = (row > 0).to(tl.int32)
    current = tl.gather(parent, row, 0)
    step = 0
    while (step < limit) & (tl.max(current, axis=0) > 0):
        found = current > 0
        at = tl.where(found, current, 0)
        bit = tl.where(found, one << (at & 31).to(tl.uint32), 0)
        bits |= tl.where((at >> 5)[:, None] == word, bit[:, None], 0)
        count += found.to(tl.int32)
        current = tl.where(found, tl.gather(parent, at, 0), NOT_FOUND)
        step += 1
    return bits, count


@triton.jit
def links(
    row: tl.tensor,
    parent: tl.tensor,
    first_row: tl.tensor,
    num_draft_tokens: tl.tensor,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """First child and next sibling of each row's node, int32 [ROWS] each, -1 where none.

    Both have larger indices than the node, so the columns before `first_row` are not looked at.
    """
    own = tl.gather(parent, row, 0)
    child = tl.full([ROWS], BLOCK_N, tl.int32)
    sibling = child
    for start in range(first_row // COLUMNS * COLUMNS, num_draft_tokens, COLUMNS):
        node = start + tl.arange(0, COLUMNS)
        holder = (parent if COLUMNS == BLOCK_N else tl.gather(parent, node, 0))[None, :]
        node = node[None, :]
        born = tl.where(holder == row[:, None], node, BLOCK_N)
        child = tl.minimum(child, tl.min(born, axis=1))
        later = (holder == own[:, None]) & (node > row[:, None]) & (holder >= 0)
        sibling = tl.minimum(sibling, tl.min(tl.where(later, node, BLOCK_N), axis=1))
    return tl.where(child < BLOCK_N, child, -1), tl.where(sibling < BLOCK_N, sibling, -1)


@triton.jit
def store_rows(
    tree_mask: tl.tensor,
    bits: tl.tensor,
    first_unit: tl.tensor,
    live: tl.tensor,
    row_units: tl.tensor,
    numel: tl.tensor,
    PACKED: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Write rows of tree cells in units of 1, 2 or 4 bytes, none of them past the buffer.

    Args:
        tree_mask: uint8 pointer.
        bits: uint32 [ROWS, WORDS], one bit a cell.
        first_unit: int64 [ROWS], the unit where each row begins.
        live: bool [ROWS].
        row_units: units of a row.
        numel: bytes of the buffer.
        PACKED: one bit a cell; otherwise one byte, and a unit of 4 holds four cells.
        UNIT_BYTES: 1, 2 or 4; what the buffer's address and size and the rows are multiples of.
        ROWS: rows of this tile.
        WORDS: 32-bit words of a row.
        STEP: words of each row that are written at a time.
    """
    PER_WORD: tl.constexpr = 4 // UNIT_BYTES if PACKED else 32 // UNIT_BYTES
    part = tl.arange(0, PER_WORD)[None, None, :]
    shift = part.to(tl.uint32) * (32 // PER_WORD)
    for start in range(0, WORDS, STEP):
        word = start + tl.arange(0, STEP)[None, :]
        if STEP == WORDS:
            unit = bits[:, :, None] >> shift
        else:
            some = tl.gather(bits, tl.broadcast_to(word, [ROWS, STEP]), 1)
            unit = some[:, :, None] >> shift
        if not PACKED:
            # The multiplication puts bit i of four at bit 8 * i; no two of its terms overlap.
            unit = ((unit & 15) * 0x204081) & 0x01010101 if UNIT_BYTES == 4 else unit & 1
        column = word[:, :, None] * PER_WORD + part
        at = first_unit[:, None, None] + column
        inside = live[:, None, None] & (column < row_units) & (at < numel // UNIT_BYTES)
        if UNIT_BYTES == 4:
            tl.store(tree_mask.to(tl.pointer_type(tl.uint32)) + at, unit, mask=inside)
        elif UNIT_BYTES == 2:
            unit = unit.to(tl.uint16)
            tl.store(tree_mask.to(tl.pointer_type(tl.uint16)) + at, unit, mask=inside)
        else:
            tl.store(tree_mask + at, unit.to(tl.uint8), mask=inside)


@triton.jit
def fill_prefixes(
    tree_mask: tl.tensor,
    seq_lens: tl.tensor,
    batch: tl.tensor,
    num_draft_tokens: tl.tensor,
    numel: tl.tensor,
) -> None:
    """Write this program's share of FULL_MASK's prefix cells.

    The live cells, tree blocks included, are cut into equal shares, one a program; a program
    writes the prefix cells among its own, row by row: 16-byte aligned words inside, single bytes
    at the ends. The alignment is the address's own, so that any slice of a buffer may be given.
    """
    n = tl.cast(num_draft_tokens, tl.int64)
    cells = tl.minimum(live_cells(seq_lens, batch, num_draft_tokens, numel), numel)
    share = tl.cdiv(tl.cdiv(cells, tl.num_programs(0)), 128) * 128
    cell = tl.program_id(0).to(tl.int64) * share
    stop = tl.minimum(cell + share, cells)
    misaligned = (-tree_mask.to(tl.int64)) & 15
    lane = tl.arange(0, 32)
    at_begin = lane < 16
    # The second half of the lanes counts from where the words end.
    edge = tl.where(at_begin, lane, lane - 16)
    word = tl.arange(0, FILL_BLOCK)
    ones = tl.full([FILL_BLOCK], 0x0101010101010101, tl.int64)
    if cell < stop:
        request, origin = request_at(cell, seq_lens, batch, num_draft_tokens, numel)
        length = length_of(seq_lens, request, True, numel)
        end = origin + n * (length + n)
        row = cell - (cell - origin) % (length + n)
        while cell < stop:
            prefix_end = tl.minimum(row + length, stop)
            if cell < prefix_end:
                body = tl.minimum(cell + ((misaligned - cell) & 15), prefix_end)
                num_words = (prefix_end - body) // 16 * 2
                at = edge + tl.where(at_begin, cell, body + num_words * 8)
                past = tl.where(at_begin, body, prefix_end)
                tl.store(tree_mask + at, tl.full([32], 1, tl.uint8), mask=at < past)
                aligned = tl.multiple_of((tree_mask + body).to(tl.pointer_type(tl.int64)), 16)
                while num_words > 0:
                    tl.store(aligned + word, ones, mask=word < num_words)
                    aligned += FILL_BLOCK
                    num_words -= FILL_BLOCK
            row += length + n
            if row == end:
                request += 1
                length = length_of(seq_lens, request, request < batch, numel)
                end += n * (length + n)
            cell = row
