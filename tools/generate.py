"""torchvm generate: speculative decoding of one prompt, and what the compiler made of the mask."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from torchvm.tools.messages import CommandError, progress
from torchvm.tools.models import PACKAGED, SMALL, Tokenizer, load_model, small_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from torchvm.engine.target import TargetModel
    from torchvm.tools.generate_report import Outcome

__all__ = ["generate"]


class MaskModeName(StrEnum):
    """Values of --mask-mode."""

    full = "full"
    qlen = "qlen"
    packed = "packed"


class Inner(StrEnum):
    """Values of --inner."""

    inductor = "inductor"
    aot_eager = "aot_eager"


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to continue or answer.")],
    model: Annotated[
        str,
        typer.Option(
            help=f"{PACKAGED!r} (SmolLM2-135M), a folder with a Llama-like model, or {SMALL!r}: "
            "random weights, in the kinds of layer that the back end attends in."
        ),
    ] = PACKAGED,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Attention back end that verifies and owns the mask: cpu, triton, "
            "triton-unified, flash-attention, flashinfer, flashmla, trtllm-mla, deepseek-v4, "
            "hybrid-attention, hybrid-linear, two-batch. By default the step allocates its mask "
            "itself."
        ),
    ] = None,
    topk: Annotated[
        int, typer.Option(min=1, help="Most children of a node; 1 drafts a chain.")
    ] = 2,
    depth: Annotated[int, typer.Option(min=1, help="Most drafted tokens on a path.")] = 4,
    num_draft_tokens: Annotated[
        int, typer.Option(min=2, max=1024, help="Nodes of a tree, root included.")
    ] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    max_context_len: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens with the prompt; by default a power of two."),
    ] = None,
    mask_mode: Annotated[
        MaskModeName, typer.Option(help="The layout that the mask is declared in.")
    ] = MaskModeName.full,
    inner: Annotated[
        Inner, typer.Option(help="What compiles the graph after torchvm's passes.")
    ] = Inner.inductor,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; by default one per available core.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Whether to apply the model's chat template, if any."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail unless plain decoding gives the same tokens.")
    ] = False,
    compare: Annotated[
        bool, typer.Option(help="Whether to decode plainly too, for its speed and tokens.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Generate text with draft trees by prompt lookup, verified by one compiled graph a step.

    Prints the text, how many drafts were accepted, the speed beside plain decoding, and the
    layout that the compiler gave the verify mask.
    """
    from torchvm.errors import MaskContractError
    from torchvm.tools.generate_report import as_dict, as_text

    if check and not compare:
        raise CommandError("--check needs plain decoding: leave --no-compare out")
    with progress("Loading the model"):
        lm, tokenizer = small_model(backend) if model == SMALL else load_model(model)
    tokens = _encode(tokenizer, prompt, chat)
    try:
        outcome = _run(
            lm,
            tokenizer,
            tokens,
            drafting=(topk, depth, num_draft_tokens),
            max_new_tokens=max_new_tokens,
            max_context_len=max_context_len,
            mask_mode=mask_mode,
            backend=backend,
            inner=inner.value,
            threads=threads,
            compare=compare,
        )
    except (ValueError, MaskContractError) as error:
        raise CommandError(str(error)) from error
    if as_json:
        import json

        typer.echo(json.dumps(as_dict(outcome)))
    else:
        typer.echo(as_text(outcome))
    if check and not outcome.agrees:
        raise typer.Exit(1)


def _encode(tokenizer: Tokenizer, prompt: str, chat: bool | None) -> list[int]:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise CommandError("--chat needs a model with a chat template: use --raw")
    if chat is False or not has_template:
        return list(tokenizer(prompt).input_ids)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _run(
    model: PreTrainedModel | TargetModel,
    tokenizer: Tokenizer,
    tokens: list[int],
    *,
    drafting: tuple[int, int, int],
    max_new_tokens: int,
    max_context_len: int | None,
    mask_mode: MaskModeName,
    backend: str | None,
    inner: str,
    threads: int | None,
    compare: bool,
) -> Outcome:
    """Decode speculatively, then plainly, each compiled before it is timed."""
    import torch

    from torchvm.compilation import reports
    from torchvm.engine import PlainDecoder, PromptLookupDrafter, SpeculativeDecoder
    from torchvm.engine.check import compare_with_plain
    from torchvm.engine.speculative import context_for
    from torchvm.engine.transformers_target import as_target
    from torchvm.ops.layout import TreeMaskMode
    from torchvm.tools.generate_report import Outcome

    torch.set_num_threads(threads or _available_cores())
    target = as_target(model)
    topk, depth, num_draft_tokens = drafting
    drafter = PromptLookupDrafter(topk=topk, depth=depth, num_draft_tokens=num_draft_tokens)
    context = max_context_len or context_for(
        target.max_position_embeddings, [tokens], max_new_tokens
    )
    mode = {
        MaskModeName.full: TreeMaskMode.FULL_MASK,
        MaskModeName.qlen: TreeMaskMode.QLEN_ONLY,
        MaskModeName.packed: TreeMaskMode.QLEN_ONLY_BITPACKING,
    }[mask_mode]
    speculative = SpeculativeDecoder(
        target, drafter, batch_size=1, max_context_len=context, inner=inner, mask_mode=mode,
        backend=backend,
    )  # fmt: skip
    eos = _eos_token_ids(model, tokenizer)
    before = len(reports())
    with progress(f"Compiling verification ({inner})"):
        compile_seconds = speculative.warm_up()
    verifier = speculative.verifier
    masks = reports()[before:] if verifier.plan is None else (verifier.plan.report(),)
    with progress("Decoding") as show:
        generation = speculative.decode(
            [tokens], max_new_tokens=max_new_tokens, eos_token_ids=eos, on_step=_counter(show)
        )
    plain = divergence = None
    plain_compile_seconds = 0.0
    if compare:
        decoder = PlainDecoder(target, batch_size=1, max_context_len=context, inner=inner)
        with progress(f"Compiling plain decoding ({inner})"):
            plain_compile_seconds = decoder.warm_up()
        with progress("Decoding plainly") as show:
            plain, (divergence,) = compare_with_plain(
                decoder,
                [tokens],
                generation.sequences,
                max_new_tokens=max_new_tokens,
                eos_token_ids=eos,
                on_step=_counter(show),
            )

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return Outcome(
        decode=decode,
        prompt_tokens=len(tokens),
        drafting=drafting,
        generation=generation,
        compile_seconds=compile_seconds,
        backend=verifier.backend.name,
        declares_read=verifier.backend.is_read if verifier.plan else None,
        masks=masks,
        plain=plain,
        plain_compile_seconds=plain_compile_seconds,
        divergence=divergence,
        inner=inner,
        threads=torch.get_num_threads(),
        context=context,
    )


def _counter(show: Callable[[str], None]) -> Callable[[list[list[int]]], None]:
    """Make a step callback that shows how many tokens there are."""
    count = 0

    def on_step(appended: list[list[int]]) -> None:
        nonlocal count
        count += sum(map(len, appended))
        show(f"{count} tokens")

    return on_step


def _eos_token_ids(model: PreTrainedModel | TargetModel, tokenizer: Tokenizer) -> set[int]:
    """End tokens of the model's generation config and of its tokenizer."""
    found: set[int] = set()
    of_model = getattr(model, "generation_config", None)
    for ids in (getattr(of_model, "eos_token_id", None), tokenizer.eos_token_id):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return found


def _available_cores() -> int:
    """Cores this process may run on, but no more than torch would take by itself."""
    import os

    import torch

    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
