"""What the lines of a random program may look like, and how often where that is not the same.

{m} and {o} are masks, {l} lengths, {r} the slice that takes their rows from a batch and {rn} their
rows and nodes, {n} draft tokens, {mode} a mode, {t} and {u} tags, {y} and {z} what the line makes.
"""

from __future__ import annotations

__all__ = [
    "ALIASES",
    "ATEN_READS",
    "LENGTHS",
    "OUT_READS",
    "PAIR_READS",
    "PARTS",
    "READS",
    "ROOTS",
    "SHAPE_READS",
    "WHOLE",
    "WHOLE_BODY",
    "WRITES",
]

READS = {
    "F.block({m}, {l}, {n}, {mode}, {t})": 6,
    "F.block(mask={m}, seq_lens={l}, num_draft_tokens={n}, mask_mode={mode}, tag={t})": 2,
    "F.block_any({m}, {l}, {n}, {mode}, {t})": 5,
    "F.block_fixed({m}, {l}, {n}, {mode}, {t})": 2,
    "F.block_packs({m}, {l}, {n}, {mode}, {t})": 1,
    "F.block_untold({m}, {l}, {n}, {t})": 4,
    "F.block_causal({m}, {l}, {n}, {mode}, False, {t})": 5,
    "F.block_causal({m}, {l}, {n}, {mode}, True, {t})": 1,
    "F.block_causal({m}, {l}, {n}, {mode}, causal=False, tag={t})": 1,
    "F.block_causal_untold({m}, {l}, {n}, False, {t})": 3,
    "F.nothing({m}, x, {t})": 5,
    "F.nothing_told({m}, {l}, {n}, {mode}, {t})": 3,
    "F.full({m}, {t})": 2,
    "F.full_told({m}, {mode}, {t})": 1,
    "F.by_topk({m}, x, 1, {t})": 2,
    "F.by_topk({m}, x, 2, {t})": 1,
    "F.by_topk_told({m}, {l}, {n}, 1, {mode}, {t})": 2,
    "F.by_topk_told({m}, {l}, {n}, 2, {mode}, {t})": 2,
    "F.by_default({m}, {l}, {n}, tag={t})": 2,
    "F.by_default({m}, {l}, {n}, True, {mode}, {t})": 1,
    "F.by_size({m}, {l}, {n}, {mode}, {t})": 2,
    "F.raising({m}, {t})": 1,
    "F.unknown({m}, {t})": 1,
    "F.unknown_list([{m}, {o}], {t})": 1,
    "convert({m}, {l}, {mode}, 1, {n}, 30)": 2,
    "convert({m}, {l}, {mode}, 0, {n}, 30)": 1,
    "convert({m}, {l}, {mode}, 2, {n}, 30)": 1,
    "attention(query{rn}, cache{r}, cache{r}, pages{r}, {l}, {m}, {mode}, False, {scale})": 4,
    "attention(query{rn}, cache{r}, cache{r}, pages{r}, {l}, {m}, {mode}, True, {scale})": 1,
    "checkpoint(lambda a, b: F.block(a, b, {n}, {mode}, {t}), {m}, {l}, use_reentrant=False)": 1,
    "choose({if}, lambda a: F.full(a, {t}), lambda a: F.unknown(a, {u}), ({m},))": 1,
    "choose({if}, lambda a: F.block({m}, a, {n}, {mode}, {t}), "
    "lambda a: F.block({m}, a, {n}, {mode}, {u}), ({l},))": 1,
}
PAIR_READS = {
    "F.pair({m}, {o}, {t})": 2,
    "F.two({m}, {o}, {l}, {n}, {mode}, {other_mode}, {t})": 3,
    "F.shared({m}, {o}, {l}, {n}, {mode}, {t})": 4,
    "F.shared_causal({m}, {o}, {l}, {n}, {mode}, {other_mode}, False, {t})": 4,
}
OUT_READS = {
    "{y} = torch.zeros({l}.shape[0], {n})\nF.block_out({m}, {l}, {n}, {mode}, {t}, {y})": 3,
    "{y} = torch.zeros(2, {l}.shape[0], {n})\nF.block_out({m}, {l}, {n}, {mode}, {t}, {y}[1])": 1,
    "{y} = torch.zeros({l}.shape[0], {n})\n"
    "{z} = F.block_both({m}, {l}, {n}, {mode}, {t}, {y}, None)": 1,
    "{y} = torch.zeros(2, {l}.shape[0], {n})\n"
    "{z} = F.block_both({m}, {l}, {n}, {mode}, {t}, {y}[0], {y}[1])": 1,
    "{z} = torch.ones(3)\n{y} = torch.zeros({l}.shape[0], {n})\n"
    "F.block_both({m}, {l}, {n}, {mode}, {t}, {y}, {z})": 1,
}
ATEN_READS = (
    "{m}.sum()",
    "{m}[3]",
    "{m}.to(torch.float32).sum()",
    "({m} == 1).sum()",
    "{m}[2:7].clone()",
    "{m}.clone()",
    "torch.cat([{m}, {m}])",
    "{m}.view(torch.uint8).sum()",
    "torch.where({m} > 0, 1, 2).sum()",
    "{m}.any()",
    "{m}.flip(0)[:4]",
    "torch.zeros_like({m}).copy_({m})",
    "F.nothing({m}[1:], x, {t})",
    "F.full({m}.to(torch.float32), {t})",
)
SHAPE_READS = (
    "{m}.new_ones({m}.shape)",
    "{m}.new_ones({m}.shape, dtype=torch.float32)",
    "torch.zeros_like({m})",
    "torch.ones_like({m}, dtype=torch.float32)",
    "torch.empty_like({m}).shape[0]",
    "torch.arange({m}.numel())",
    "torch.full((), {m}.shape[0])",
    "{m}.numel()",
    "{m}.numel() + 1",
    "{m}.size(0) // 2",
    "{m}.shape[-1]",
    "len({m})",
    "{m}.new_full((2,), 1)",
    "{m}.new_zeros(3)",
    "{m}.new_empty({m}.shape).fill_(1)",
    "{m}.element_size()",
)
WRITES = (
    "{m}.fill_(1)",
    "{m}.zero_()",
    "{m}[2:6] = 1",
    "{m}[0] = 0",
    "{m}.logical_not_()",
    "{m}.copy_({m}.flip(0))",
    "F.scale_({m}, 0, {t})",
    "F.scale_({m}, 1, {t})",
    "F.swap_({m}, {o}, {t})",
    "{y} = F.touch_({m}, {l}, {n}, {mode}, {t})",
)
ALIASES = (
    "{m}",
    "{m}[:]",
    "{m}.view(-1)",
    "{m}.reshape(-1)",
    "{m}.detach()",
    "{m}.contiguous()",
    "{m}.to({m}.dtype)",
    "{m}.view(1, -1)[0]",
    "{m}.as_strided(({m}.shape[0],), (1,))",
)
PARTS = (
    "{m}[4:]",
    "{m}[2:9]",
    "{m}.clone()",
    "{m}.view(torch.uint8)",
    "{m}.to(torch.uint8)",
    "{m}.split(8)[0]",
    "{m}.chunk(2)[1]",
    "{m}.as_strided((5,), (1,))",
    "{m}.narrow(0, 0, 6)",
)
ROOTS = (
    "torch.zeros(bs * n * (20 + n), dtype={dtype})",
    "torch.full((bs * n * (20 + n),), True)",
    "{alloc}.clone()",
    "{alloc}.fill_(1)",
    "{alloc}.logical_not()",
    "{alloc}[:]",
    "{alloc}.view(1, -1).view(-1)",
    "{alloc}[3:]",
)
LENGTHS = {
    "{l} + 1": 3,
    "{l}.clamp(max=5)": 2,
    "{l}.clone()": 2,
    "{l} * 1": 1,
    "{l}.flip(0)": 1,
    "{l}.to(torch.int32).to(torch.int64)": 2,
    "{l}.to(torch.float32).to(torch.int64)": 1,
    "{l}.to(torch.bool).to(torch.int64)": 1,
    "{l}.to(torch.int8).to(torch.int64)": 1,
    "{l}[:1]": 2,
    "{l}.to(torch.int32)": 1,
    "torch.zeros_like({l})": 1,
}
WHOLE_BODY = """\
def {f}(a, b):
    mask = alloc(bs, n, {context}, 0)
    positions = tree_of_parents(a, b, mask, n, 0)[0]
    return positions.view(bs, n) + {read}
"""
WHOLE = {
    "{y} = choose({if}, {f}, lambda a, b: torch.zeros(bs, n), (parents, lens))": 2,
    "{y} = region({f})(parents, lens)": 1,
    "{y} = checkpoint({f}, parents, lens, use_reentrant=False)": 1,
}
