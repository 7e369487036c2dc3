"""Plans for stock transformers models with random weights: no GPU and no mask allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchvm import MaskRead, Reason, TreeMaskMode, plan_verify_mask

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

from torchvm.backends.base import VerifyBatch, VerifyConfig  # noqa: E402 - after the skip
from torchvm.backends.cpu import CPUBackend  # noqa: E402
from torchvm.integrations.transformers import (  # noqa: E402 - after the skip
    StepCache,
    VerifyInputs,
    cache_keyword,
    tree_attention_of,
)

if TYPE_CHECKING:
    from torch import Tensor

LAYERS, BS, N, CAPACITY = 2, 4, 8, 64
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral", "Gemma"])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_plan_of_a_stock_model(family: str, chain: bool) -> None:
    sizes = getattr(transformers, f"{family}Config")(**SMALL)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(sizes).eval()
    name = cache_keyword(model)
    config = VerifyConfig(num_draft_tokens=N, max_context_len=1 << 20, topk=1 if chain else 2)
    backend = CPUBackend(config)

    def forward(mask: Tensor, tokens: Tensor, seq_lens: Tensor, keys: Any, values: Any) -> Tensor:
        pages = torch.arange(BS, dtype=torch.int32).unsqueeze(1)
        positions = seq_lens.unsqueeze(1) + torch.arange(N)
        full = int(TreeMaskMode.FULL_MASK)
        batch = VerifyBatch(pages, CAPACITY, seq_lens, positions, mask, full)
        verify = VerifyInputs(backend, backend.init_forward_metadata(batch))
        cache = StepCache(keys, values, torch.arange(BS), seq_lens, N)
        out = model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            verify=verify,
            **{name: cache},
        )
        logits: Tensor = out.logits
        return logits.argmax(-1)

    def inputs(mask: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sides = [[torch.zeros(BS, CAPACITY, 2, 8) for _ in range(LAYERS)] for _ in range(2)]
        tokens = torch.zeros(BS, N, dtype=torch.int64)
        return (mask, tokens, torch.zeros(BS, dtype=torch.int64), *sides), {}

    with tree_attention_of(model):
        plan = plan_verify_mask(
            forward,
            inputs,
            max_bs=BS,
            num_draft_tokens=N,
            max_context_len=1 << 20,
            device="cuda",
            declared_is_read=not chain,
        )
    reads = MaskRead.NOTHING if chain else MaskRead.TREE_BLOCK
    assert [(r.op, r.reads) for r in plan.readers] == [("torchvm::tree_attention", reads)] * LAYERS
    if chain:
        assert (plan.verdict, plan.mode) == (Reason.ELIDED, TreeMaskMode.QLEN_ONLY)
    else:
        packed = TreeMaskMode.QLEN_ONLY_BITPACKING
        assert (plan.verdict, plan.mode, plan.nbytes) == (Reason.COMPACTED, packed, BS * N)
