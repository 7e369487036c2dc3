"""The compiled verify step of a transformers model, of its config alone, for `torchvm dump`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torchvm.tools.dump_errors import told
from torchvm.tools.dump_target import Request, shown_device, traced_device
from torchvm.tools.messages import CommandError
from torchvm.tools.models import model_config

if TYPE_CHECKING:
    from torchvm.inspection import TracedGraph

__all__ = ["model_graphs"]

BATCH, NODES, TOPK = 8, 8, 2
"""Requests, nodes of a tree and children of a node, where nothing else is asked for."""


def model_graphs(request: Request) -> list[TracedGraph]:
    """Trace the verify step of a model whose weights are never allocated.

    Raises:
        CommandError: when there is no such model, or the engine does not support it.
    """
    if request.dynamic:
        raise CommandError("a verify step has static shapes: leave --dynamic out")
    name = request.target.removeprefix("hf:")
    with told(f"{request.target} has no config", debug=request.debug):
        config = model_config(name)
    with told(f"{request.target} cannot be traced", debug=request.debug):
        return _trace(config, request)


def _trace(config: Any, request: Request) -> list[TracedGraph]:
    import torch
    import transformers

    from torchvm.backends.base import VerifyConfig
    from torchvm.engine.steps import verify_step
    from torchvm.engine.transformers_target import as_target
    from torchvm.engine.verifier import start_verifier, step_inputs
    from torchvm.inspection import GraphOptions, trace_graphs
    from torchvm.ops.layout import TreeMaskMode
    from torchvm.tracing import fake_mode

    bs, device = request.max_bs or BATCH, torch.device(traced_device(request.device))
    mode, make_model = fake_mode(), cast("Any", transformers.AutoModelForCausalLM).from_config
    with mode, torch.no_grad(), device:
        target = as_target(make_model(config).eval())
        context = request.max_context_len
        run = VerifyConfig(
            num_draft_tokens=request.num_draft_tokens or NODES,
            max_context_len=target.max_position_embeddings if context is None else context,
            topk=TOPK,
            device=device,
        )
        verifier = start_verifier(
            target, None, config=run, max_bs=bs, mask_mode=TreeMaskMode.FULL_MASK
        )
        args = step_inputs(target, verifier, bs, device)
    # The engine keeps a step's inputs where they are.
    options = GraphOptions(request.every_node, shown_device(request.device), static_inputs=True)
    with torch.no_grad(), target.attending():
        return trace_graphs(verify_step, args, fullgraph=True, mode=mode, options=options)
